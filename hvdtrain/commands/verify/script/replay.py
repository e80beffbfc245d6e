"""Record what N ranks draw and compute in a few updates, and compute the same on one process.

Both runs are of the same script. Its loaders are read here, in this process: each sample is drawn
after seeding by its loader and index, so that it is the same wherever it is drawn. Dropout is off,
and the statistics of BatchNorm are frozen. In the run on one process, ``one_process`` answers for
N ranks, and each batch is the union of those that the ranks drew.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hvdtrain.commands.verify.hooks import after, replace
from hvdtrain.commands.verify.script.one_horovod import OneHorovod
from hvdtrain.commands.verify.script.one_process import OneProcess
from hvdtrain.commands.verify.script.record import SCALED, Array, ScriptRecorder
from hvdtrain.commands.verify.script.watch_horovod import first_argument, leaves
from hvdtrain.commands.verify.script.watch_torch import mark

UPDATES = 3  # that are compared
MAX_VALUES = 4_000_000  # of the parameters; of larger models some, at equal distances
REGULAR = {"updates", "its own end", "exit code 0"}  # ends of a script
MAX_MARKS = 2000  # samples of which digests are kept
MIX = 1_000_003  # a prime
OURS = ("hvdtrain.adapters.", "hvdtrain.keras.")
DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


@dataclass
class Draws:
    """What one rank drew, and what it made of it."""

    indices: list[list[list[int]]] = field(default_factory=list)  # by iterator, and by batch
    samples: list[int] = field(default_factory=list)  # that the model was trained on, by update
    batchnorm: bool = False  # whether statistics were frozen
    rounding: float = 0.0  # relative error of the smallest type of a result, or of compression
    elements: list[int] = field(default_factory=list)  # of tf.data that were kept, by iterator
    random: bool = False  # whether random numbers were drawn between two batches
    gathered: bool = False  # whether activations may have been gathered
    obstacle: str = ""  # why the script cannot be replayed
    marks: dict[str, str] = field(default_factory=dict)  # digests of some samples, by their keys
    by_rank: bool = False  # whether a sample was not that which its rank had drawn
    start: str = ""  # digest of the parameters before the first update
    weighted: bool = False  # whether hvdtrain weighs the ranks by their samples


@dataclass(frozen=True)
class ReplayPlan:
    """How a script is run to be compared."""

    folder: Path  # where the draws of the ranks are
    ranks: int = 0  # that one process stands for; 0: a rank that records
    exact: bool = False  # in fp64
    perturbed: bool = False  # another order of the samples, and rounding errors in the parameters


class Replay:
    """Lets the script train on recorded samples, or records them; one for each process."""

    def __init__(self, plan: ReplayPlan, recorder: ScriptRecorder) -> None:
        self.plan, self.recorder = plan, recorder
        self.draws = Draws()
        self.recorded = [read_draws(plan.folder, rank) for rank in range(plan.ranks)]
        self.arrays: dict[str, Array] = {}
        self.elements: dict[str, Array] = {}  # of tf.data, by iterator, number and leaf
        self.perturbs = plan.perturbed  # whether the parameters are yet to be

    @property
    def actions(self) -> dict[str, Callable[[Any], None]]:
        """Return what to do after the import of a module, by its name."""
        return {
            "torch": self.start,
            "horovod.torch": self.horovod,
            "hvdtrain.adapters.common_adapter": self.adapters,
        }

    def start(self, torch: Any) -> None:
        """Take over loaders, random numbers and layers from now on."""
        self.torch = torch
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        if self.plan.exact:
            torch.set_default_dtype(torch.float64)
            torch.Tensor.float = torch.Tensor.double
        after(torch.distributed, "all_reduce", lambda r, *a, **k: self._sent(first_argument(a, k)))
        if self.plan.ranks:  # last: it looks at its caller
            OneProcess(torch, self.plan.ranks, self.draws).install()
        replace(torch.utils.data.DataLoader, "__iter__", self._iterator)
        functions = torch.nn.functional
        for name in DROPOUTS:
            replace(functions, name, undropped)
        replace(functions, "scaled_dot_product_attention", _without_dropout)
        replace(functions, "batch_norm", self._frozen)
        self._unsynchronized(torch.nn.SyncBatchNorm)
        after(torch.autocast, "__enter__", lambda r, cast: self._casts(cast))
        for name in ("float", "half", "bfloat16", "to"):
            after(torch.Tensor, name, lambda r, tensor, *a, **k: self._converted(r, tensor))
        wrapper = torch.nn.parallel.DistributedDataParallel
        after(wrapper, "register_comm_hook", lambda *a, **k: self._hooked())
        torch.nn.modules.module.register_module_forward_pre_hook(self._forward)
        torch.nn.modules.module.register_module_forward_hook(self._output)
        self.recorder.applied = self.applied

    def _unsynchronized(self, layer: Any) -> None:
        """Let SyncBatchNorm, which has a kernel of its own, normalize as BatchNorm does."""
        plain = self.torch.nn.modules.batchnorm._BatchNorm.forward
        replace(layer, "forward", lambda original, *a, **k: plain(*a, **k))

    def horovod(self, module: Any) -> None:
        """Answer for the ranks of ``horovod.torch`` from now on, or record what they send."""
        operations = sys.modules[f"{module.__name__}.mpi_ops"]
        for name in ("_allreduce_async", "_grouped_allreduce_async"):
            after(operations, name, lambda r, tensors, *a: self._sent(tensors))
        self._unsynchronized(module.SyncBatchNorm)
        if self.plan.ranks:
            OneHorovod(module, self.plan.ranks, self.draws).install()

    def _hooked(self) -> None:
        if not self.recorder.record.hvdtrain:  # a hook may compress to this type or another one
            self._rounds(self.torch.bfloat16)

    def _sent(self, tensors: Any) -> None:
        for tensor in leaves(tensors):
            if tensor.is_floating_point() and tensor.dtype.itemsize < 4:  # compressed
                self._rounds(tensor.dtype)

    def adapters(self, module: Any) -> None:
        """Record the parts of hvdtrain's shards; one process sees a world of N ranks.

        It remains one for the adapter itself, so that its part is the global batch.
        """
        replace(module.Shards, "parts", self._parts)
        if not self.plan.ranks:
            return

        def initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
            return self._as_ranks(original(*args, **kwargs))

        def keep(adapter: Any, world: Any) -> None:
            vars(adapter)["world"] = world

        replace(module.CommonAdapter, "initialize", initialize)
        module.CommonAdapter.world = property(self._world, keep)

    def _world(self, adapter: Any) -> Any:
        """Return the world of an adapter, which itself has the true one, but for the rate."""
        world = vars(adapter).get("world") or adapter.__getattr__("world")
        caller = sys._getframe(1)
        inside = caller.f_globals.get("__name__", "").startswith(OURS)
        scales = caller.f_code.co_name == SCALED
        return world if inside and not scales else self._as_ranks(world)

    def _as_ranks(self, world: Any) -> Any:
        return with_changes(world, size=self.plan.ranks, local_size=self.plan.ranks)

    def _parts(self, original: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield the parts of hvdtrain's shards; those of one process are the global batches."""
        drawn = self._begin()
        for part in original(*args, **kwargs):
            drawn.extend([part.indices.tolist()] * (not part.stand_in))
            state = self.random_state()
            perturbed = self.plan.perturbed
            yield with_changes(part, indices=part.indices[::-1].copy()) if perturbed else part
            self.draws.random |= state != self.random_state()

    def _begin(self) -> list[list[int]]:
        """Return the list of the batches of an iterator that begins."""
        self.draws.indices.append([])
        return self.draws.indices[-1]

    def _frozen(self, original: Any, value: Any, mean: Any, var: Any, *args: Any, **k: Any) -> Any:
        """Normalize by the running statistics, which do not depend on the other samples."""
        if mean is None:
            self.draws.obstacle = "BatchNorm without running statistics depends on the batch"
            return original(value, mean, var, *args, **k)
        self.draws.batchnorm = True
        if "training" in k:
            k["training"] = False
        return original(value, mean, var, *args[:2], *[False] * len(args[2:3]), *args[3:], **k)

    def _iterator(self, original: Any, loader: Any) -> Any:
        """Return the batches of a loader as recorded, or record them."""
        dataset = loader.dataset
        stream = isinstance(dataset, self.torch.utils.data.IterableDataset)
        if loader.batch_sampler is None or stream:
            self.draws.obstacle = f"{type(dataset).__name__} is not read by batches of indices"
            return original(loader)
        if hasattr(loader.batch_sampler, "shards"):  # hvdtrain's, which seeds each sample itself
            return map(self._cast, original(loader))
        number = len(self.draws.indices)
        return self._batches(loader, number, self._begin())

    def _batches(self, loader: Any, number: int, drawn: list[list[int]]) -> Iterator[Any]:
        # hvdtrain's shards of one process are those of all ranks.
        by_shards = self.recorder.shards and isinstance(loader.batch_sampler, list)
        united = self.plan.ranks and not by_shards
        for indices in self._union(number) if united else self._sampled(loader.batch_sampler):
            drawn.append([int(index) for index in indices])
            samples = [self._seeded(number, index, loader.dataset) for index in indices]
            state = self.random_state()
            yield self._cast(loader.collate_fn(samples))
            self.draws.random |= state != self.random_state()

    def _sampled(self, sampler: Any) -> Iterator[Any]:
        """Yield the indices; what a sampler draws leaves the random numbers as they were."""
        state = self.torch.get_rng_state()
        for indices in sampler:
            self.torch.set_rng_state(state)
            yield indices
            state = self.torch.get_rng_state()

    def _union(self, number: int) -> Iterator[list[int]]:
        """Yield what the ranks drew, batch by batch."""
        by_rank = [draws.indices[number] for draws in self.recorded if number < len(draws.indices)]
        for batch in range(max(map(len, by_rank), default=0)):
            parts = [drawn[batch] for drawn in by_rank if batch < len(drawn)]
            union = [index for part in parts for index in part]
            yield union[::-1] if self.plan.perturbed else union

    def random_state(self) -> tuple[Any, ...]:
        """Return the state of all generators of random numbers."""
        states, torch = [], sys.modules.get("torch")  # which TensorFlow's scripts may not have
        if torch:
            states = [torch.get_rng_state()]
            states += torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        arrays = [state.numpy().tobytes() for state in states]
        state: Any = np.random.get_state()
        return random.getstate(), state[1].tobytes(), state[2], *arrays

    def _seeded(self, number: int, index: int, dataset: Any) -> Any:
        """Draw a sample with the random numbers of its iterator and index."""
        states = random.getstate(), np.random.get_state(), self.torch.get_rng_state()
        seed = (number * MIX + int(index)) % 2**32
        random.seed(seed)
        np.random.seed(seed)
        self.torch.default_generator.manual_seed(seed)
        try:
            sample = dataset[index]
            self._compare(f"{number} {index}", sample)
            return sample
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            self.torch.set_rng_state(states[2])

    def _compare(self, key: str, sample: Any) -> None:
        """Record a sample, and whether the ranks had another one under this index."""
        marks = self.draws.marks
        if key in marks or len(marks) >= MAX_MARKS:
            return
        marks[key] = mark(sample)
        for rank, draws in enumerate(self.recorded):
            if draws.marks.get(key, marks[key]) == marks[key]:
                continue
            if rank:
                self.draws.by_rank = True
            else:  # this process is rank 0, too
                self.draws.obstacle = "the dataset draws random numbers of a generator of its own"

    def _cast(self, value: Any) -> Any:
        """Cast the floating-point tensors of a batch to fp64, if the plan says so."""
        if not self.plan.exact:
            return value
        if isinstance(value, dict):
            return type(value)({key: self._cast(part) for key, part in value.items()})
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self._cast, value))
        if isinstance(value, list | tuple):
            return type(value)(map(self._cast, value))
        floats = self.torch.is_tensor(value) and value.is_floating_point()
        return value.double() if floats else value

    def _casts(self, cast: Any) -> None:
        if cast._enabled and not self.plan.exact:  # it does not cast fp64
            self._rounds(cast.fast_dtype)

    def _converted(self, result: Any, tensor: Any) -> None:
        if result.requires_grad and result.dtype.itemsize < tensor.dtype.itemsize:
            self._rounds(result.dtype)

    def _output(self, module: Any, _: Any, output: Any) -> None:
        if self.torch.is_tensor(output) and output.is_floating_point():
            self._rounds(output.dtype)

    def _rounds(self, dtype: Any) -> None:
        """Record that values of ``dtype`` are computed with, or sent."""
        self.draws.rounding = max(self.draws.rounding, self.torch.finfo(dtype).eps)

    def _forward(self, module: Any, inputs: Any) -> Any:
        """Cast the inputs of a module, and perturb the model before its first pass."""
        self._perturb(module)
        return self._cast(inputs) if self.plan.exact else None

    def _perturb(self, module: Any) -> None:
        """Change each parameter of the model by a rounding error."""
        parameters = list(module.parameters()) if self.perturbs else []
        self.perturbs = self.perturbs and not parameters
        generator = self.torch.Generator().manual_seed(0)
        for parameter in parameters:
            if hasattr(parameter, "to_local"):  # of FSDP
                parameter = parameter.to_local()
            eps = max(self.torch.finfo(parameter.dtype).eps, *(d.rounding for d in self.recorded))
            signs = self.torch.randint(0, 2, parameter.shape, generator=generator) * 2.0 - 1
            parameter.data *= (1 + eps * signs.double()).to(parameter)

    def applied(self, gradients: Sequence[Array], parameters: Callable[[], list[Array]]) -> None:
        """Keep gradients and parameters of an update."""
        number = len(self.draws.samples)
        self.draws.samples.append(self.recorder.record.updates[-1].samples)
        if number == 0:
            self.draws.start = self.recorder.record.updates[-1].before.digest
        self.arrays[f"gradients {number}"] = _some(gradients)
        self.arrays[f"parameters {number}"] = _some(parameters())
        last = self.recorder.record.updates[-1]
        if last.local is not None:
            self.arrays[f"local {number}"] = np.array(last.local)
            self.arrays[f"sample {number}"] = np.array(last.applied)

    def finish(self) -> None:
        """Write the draws and the values."""
        rank, folder = self.recorder.path.stem, self.recorder.path.parent
        ended = self.recorder.record.ended or ""
        self.draws.weighted = self.recorder.record.hvdtrain
        if ended not in REGULAR:
            self.draws.obstacle = self.draws.obstacle or ended.removeprefix("UnreplayableError: ")
        np.savez(folder / f"{rank}.npz", **self.arrays)  # type: ignore[arg-type]
        np.savez(folder / f"{rank}.elements.npz", **self.elements)  # type: ignore[arg-type]
        (folder / f"{rank}.draws").write_text(json.dumps(self.draws, default=vars))


def read_draws(folder: Path, rank: int) -> Draws:
    """Return the draws that a rank has written."""
    return msgspec.convert(json.loads((folder / f"{rank}.draws").read_bytes()), Draws)


def _some(tensors: Sequence[Array]) -> Array:
    """Return the values of all tensors in fp64, or of a large model some."""
    flat = np.concatenate([np.ravel(tensor) for tensor in tensors]).astype(np.float64)
    return flat[:: -(-len(flat) // MAX_VALUES)]


def undropped(_: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the input of a dropout, of PyTorch, Keras or TensorFlow."""
    names = ("input", "inputs", "x")
    return args[0] if args else next(kwargs[name] for name in names if name in kwargs)


def _without_dropout(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Attend without dropout, the fifth argument."""
    if "dropout_p" in kwargs:
        kwargs["dropout_p"] = 0.0
    return original(*args[:4], *[0.0] * len(args[4:5]), *args[5:], **kwargs)
