"""Judge whether N ranks compute what one process computes: the row of the replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.commands.verify.rows import REPLAY, StepRow, by_rank, not_seen, number, row
from hvdtrain.commands.verify.script.record import Array
from hvdtrain.commands.verify.script.replay import Draws, read_draws
from hvdtrain.system.output.text import plural

EXACT = 1e-9  # relative difference in fp64 that counts as equal
FLOOR = 1e-6  # the same in fp32, where rounding errors alone are as large
LARGEST = 0.02  # tolerance with which an equal result shows something
MARGIN = 10.0  # of a difference over that of one process from itself
NOISE = 1e-5  # gradients that small, relative to the largest one, are rounding errors
SAME = 1e-3  # relative difference of a gradient to a multiple of another one
STEP = REPLAY.number


@dataclass(frozen=True)
class Replayed:
    """What one process of a run has drawn and computed."""

    draws: Draws
    arrays: dict[str, Array]

    @property
    def updates(self) -> int:
        """Number of updates."""
        return len(self.draws.samples)

    def gradients(self, update: int) -> Array:
        """Return the gradients that an update applied."""
        return self.arrays[f"gradients {update}"]

    def parameters(self, update: int) -> Array:
        """Return the parameters after an update."""
        return self.arrays[f"parameters {update}"]


def read_replayed(folder: Path, rank: int) -> Replayed:
    """Return what a rank has written."""
    with np.load(folder / f"{rank}.npz") as arrays:
        return Replayed(read_draws(folder, rank), dict(arrays))


def replay_row(
    ranks: Sequence[Replayed], whole: Replayed, perturbed: Replayed, *, exact: bool
) -> StepRow:
    """Compare the ranks with one process that trained on the union of their batches.

    Args:
        ranks: the run of N ranks.
        whole: the run of one process.
        perturbed: the same with another order of the samples, and with rounding errors in the
            parameters, which shows what is no difference.
        exact: whether all is in fp64 that the script does not cast itself.
    """
    if reason := obstacle(ranks) or obstacle([whole]) or _mismatch(ranks, whole):
        return not_seen(STEP, f"cannot be replayed: {reason}")
    differences = _differences(ranks[0], whole)
    noise = max(_differences(whole, perturbed), default=0.0)
    limit = max(EXACT if exact else FLOOR, MARGIN * noise)
    largest = int(np.argmax(differences))
    evidence = f"{plural(len(ranks), 'rank')} = one process: largest difference "
    evidence += f"{number(differences[largest])} at update {largest + 1} of {len(differences)}"
    evidence += ", in fp64" if exact else ""
    evidence += "" if limit == EXACT else f" (rounding: up to {number(limit)})"
    if whole.draws.batchnorm:
        evidence += "; statistics of BatchNorm are frozen"
    if differences[largest] > min(limit, LARGEST) and (reason := _reason(ranks, whole)):
        return not_seen(STEP, f"cannot be replayed: {reason}")
    if perturbed.draws.obstacle or perturbed.updates < len(differences):
        return not_seen(STEP, f"cannot be replayed: {perturbed.draws.obstacle or 'it has ended'}")
    wrong = [update for update, value in enumerate(differences) if not value <= limit]
    if wrong:
        evidence = evidence.replace(" = ", " differ from ", 1)
        rounding = MARGIN**2 * max(run.draws.rounding for run in ranks)
        if exact and differences[largest] <= rounding:
            return not_seen(STEP, f"{evidence}; the script rounds to a smaller type")
        applied, expected = (run.gradients(wrong[0]) for run in (ranks[0], whole))
        if _relative(len(ranks) * applied, expected) <= SAME:  # that of a sum is 1 / N of it
            reason = "the loss is a sum over the samples, or divided by a constant"
            return not_seen(STEP, f"{evidence}; {reason}")
        evidence += f"; {_cause(ranks, whole, wrong[0])}"
    elif limit > LARGEST:
        return not_seen(STEP, evidence + ("" if exact else "; use --exact to see more"))
    return row(STEP, not wrong, evidence, differences=differences, limit=limit)


def _reason(ranks: Sequence[Replayed], whole: Replayed) -> str:
    """Return why a difference need not be a mistake; empty if it is one."""
    if any(run.draws.random for run in ranks):
        return "random numbers drawn in the training loop differ between the ranks"
    return "values that may be activations are gathered" if whole.draws.gathered else ""


def obstacle(runs: Sequence[Replayed]) -> str:
    """Return why runs cannot be compared with others; empty if they can."""
    if reason := next((run.draws.obstacle for run in runs if run.draws.obstacle), ""):
        return reason
    if not all(run.updates for run in runs):
        return "no update was made"
    if not any(runs[0].draws.indices) and not any(runs[0].draws.elements):
        return "no DataLoader of samples with an index was seen, and no iterator of tf.data"
    if len({(len(run.draws.indices), len(run.draws.elements)) for run in runs}) > 1:
        return "the ranks do not draw from the same loaders"
    if len({run.draws.start for run in runs}) > 1:
        return "the ranks begin with different parameters"
    return ""


def _mismatch(ranks: Sequence[Replayed], whole: Replayed) -> str:
    """Return why the runs cannot be compared with one another; empty if they can."""
    if whole.draws.by_rank and not _is_disjoint(ranks):
        return "the dataset is another one on each rank"
    count = min(run.updates for run in (*ranks, whole))
    for update in range(count):
        samples = [run.draws.samples[update] for run in ranks]
        if not any(samples):
            return "the model's input was not seen: no tensor, or of a model without optimizer"
        if sum(samples) != whole.draws.samples[update]:
            seen = f"{by_rank(samples)} samples by rank, {whole.draws.samples[update]} on one"
            return f"update {update + 1} is not made of what the loader draws ({seen})"
        for kind in (Replayed.gradients, Replayed.parameters):
            here, there = kind(ranks[0], update), kind(whole, update)
            if here.shape != there.shape:
                return "one process holds more of the model than a rank"
            if not (np.isfinite(here).all() and np.isfinite(there).all()):
                return f"update {update + 1} is not finite"
    if not any(whole.gradients(update).any() for update in range(count)):
        return "all gradients are 0"
    if ranks[0].draws.start != whole.draws.start:
        return (
            "the runs begin with different parameters: a checkpoint of an earlier run, or a seed "
            "that changes"
        )
    return ""


def _differences(left: Replayed, right: Replayed) -> list[float]:
    """Return the relative difference of gradients and parameters at each update."""
    differences = []
    noises: dict[int, Array] = {}  # by size: what is a rounding error in each update
    for update in range(min(left.updates, right.updates)):
        applied = left.gradients(update), right.gradients(update)
        noise = noises.setdefault(applied[0].size, np.ones(applied[0].shape, bool))
        large = max(np.abs(applied[0]).max(initial=0), np.abs(applied[1]).max(initial=0))
        # An adaptive optimizer enlarges these, e.g. of a bias that has no effect.
        noise &= np.maximum(*np.abs(applied)) <= NOISE * large
        after = (run.parameters(update)[~noise] for run in (left, right))
        differences.append(max(_relative(*applied), _relative(*after)))
    return differences


def _relative(left: Array, right: Array) -> float:
    scale = max(np.linalg.norm(left), np.linalg.norm(right))
    return float(np.linalg.norm(left - right) / scale) if scale else 0.0


def _is_disjoint(ranks: Sequence[Replayed]) -> bool:
    """Return whether a sampler gave each rank other indices of the first loader."""
    drawn = [{index for batch in run.draws.indices[0] for index in batch} for run in ranks]
    return len(set.union(*drawn)) == sum(map(len, drawn))


def _cause(ranks: Sequence[Replayed], whole: Replayed, update: int) -> str:
    """Return why the gradients of an update differ from those of one process, as far as known."""
    applied, expected = ranks[0].gradients(update), whole.gradients(update)
    if whole.draws.by_rank:
        return "the samples depend on the rank"
    if any(_relative(run.gradients(update), applied) > SAME for run in ranks):
        return "the ranks apply different gradients: they are not reduced"
    if any(_relative(run.parameters(update), ranks[0].parameters(update)) > SAME for run in ranks):
        return "the ranks' parameters, or the states of their optimizers, differ"
    if _relative(applied, expected) <= SAME:
        return "the gradients are equal, the updates are not"
    factor = float(applied @ expected / (expected @ expected)) if expected.any() else 0.0
    if factor and _relative(applied, factor * expected) <= SAME:
        return f"the gradients are {factor:.3g} times those of one process"
    counts = [run.draws.samples[update] for run in ranks]
    if len(set(counts)) > 1 and not whole.draws.weighted:
        return f"the mean of the ranks' means, of {by_rank(counts)} samples"
    if factors := _factors(ranks, update):
        return f"{factors} times the gradients of the ranks: clipped or scaled before the reduction"
    return (
        "a mean of the ranks' means, if the loss divides by something else than samples (tokens, "
        "pixels, weights); gradients that are clipped before they are reduced; or inputs or layers "
        "that depend on the rank (also random numbers of a generator of their own)"
    )


def _factors(ranks: Sequence[Replayed], update: int) -> str:
    """Return the unequal factors with which the ranks' gradients were added; empty if not so."""
    local = [run.arrays.get(f"local {update}") for run in ranks]
    applied = ranks[0].arrays.get(f"sample {update}")
    if applied is None or any(values is None for values in local):
        return ""
    factors, _, independent, _ = np.linalg.lstsq(np.array(local).T, applied, rcond=1e-6)
    if independent < len(ranks) or _relative(factors @ np.array(local), applied) > SAME:
        return ""
    equal = np.ptp(factors) <= MARGIN * SAME * np.abs(factors).max()
    return "" if equal else by_rank([f"{factor:.3g}" for factor in factors], ", ")
