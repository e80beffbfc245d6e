"""``hvdtrain verify --script`` for TensorFlow and Keras: right scripts, and each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.parallel.test_verify_distributed import copied, rows, watched

STEP = "train_step_keras"
SCORES = r"self\.compute_loss\(inputs, labels, (self.*)\)$"
OVER_ALL = r"""tf.reduce_sum(
                keras.losses.sparse_categorical_crossentropy(
                    tf.where(labels > 0, labels, -1), \1, from_logits=True, ignore_class=-1
                )
            )
            valid = tf.cast(tf.math.count_nonzero(labels), loss.dtype)
            loss *= SIZE / hvd.allreduce(valid, op=hvd.Sum)"""
HIDDEN = r'keras\.layers\.Dense\(16, activation="relu"\)'
NORMALIZED = r"\g<0>, keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)"
EMBEDDED = "keras.layers.Discretization([-1.0, 0.0, 1.0]), keras.layers.Embedding(4, 3), "
EMBEDDED += "keras.layers.Flatten()"
RIGHT: dict[str, tuple[str, str, int, str]] = {  # pattern, replacement, ranks, end of the evidence
    "over all tokens": (SCORES, OVER_ALL, 3 if LONG else 2, "in fp64"),
    "BatchNorm and dropout": (HIDDEN, NORMALIZED, 2, "statistics of BatchNorm are frozen"),
    "an embedding": (HIDDEN, EMBEDDED, 2, "in fp64"),
}


@pytest.mark.parametrize("name", RIGHT if LONG else ["over all tokens"])
def test_a_right_script(name: str, tmp_path: Path) -> None:
    pattern, replacement, ranks, end = RIGHT[name]
    script = copied(STEP, tmp_path, pattern, replacement)
    outcome = watched(script, "--exact", updates="5", ranks=ranks)
    assert rows(outcome, "failed") == {}, outcome.out
    assert rows(outcome, "ok")[9].endswith(end), outcome.out


TAPE = r"tape = hvd\.DistributedGradientTape\(tape\)"
CLIP = r"""local = tape.gradient(loss, [each.value for each in self.trainable_variables])
        local = [hvd.allreduce(each) for each in tf.clip_by_global_norm(local, 0.1)[0]]
        self.optimizer.apply(local, self.trainable_variables)
        return {"loss": loss}"""
RATE, SHARD = r"0\.05 \* SIZE", r"\.shard\(SIZE, RANK\)"
# Pattern, replacement, updates, the rows that fail, and words of the last one.
MISTAKES: dict[str, tuple[str, str, str, list[int], str]] = {
    "tokens": (
        "logits=True",
        "logits=True, ignore_class=0",
        "5",
        [9],
        "a mean of the ranks' means",
    ),
    "uneven parts": (r"batch\(8", r"batch(8 + 4 * RANK", "5", [9], "means, of 8 + 12 samples"),
    "clipped by rank": (TAPE, CLIP, "5", [9], "clipped or scaled before the reduction"),
    "inputs by rank": (r"self\(inputs", r"\g<0> + 0.1 * RANK", "5", [9], "depend on the rank"),
    "not reduced": (TAPE, "pass", "5", [5, 9], "the ranks apply different gradients"),
    "sum for mean": (r"(Tape\(tape)\)$", r"\1, op=hvd.Sum)", "5", [5], "the sum, not the mean"),
    "no shards": (SHARD, "", "all", [3], "samples seen were on more than one rank"),
    "shuffled before": (f"({SHARD})(.*)seed=1\\)", r"\2seed=RANK)\1", "5", [3], "than one rank"),
    "one shard for all": (SHARD, ".shard(SIZE, 0)", "5", [3], "shards 0 of 2, 0 of 2"),
    "a rate scaled twice": (RATE, r"\g<0> ** 2", "5", [4], "x 4, more than the linear rule's 2"),
    "a rate not scaled": (RATE, "0.05", "5", [4], "0.05"),
    "no broadcast": (r"\[Broadcast\(\)\]", "[]", "5", [6], "no broadcast was executed"),
    "of the optimizer": (r"\*self\.model\.variables, ", "", "5", [6], "before update 1: 0.9"),
    "all write": ("if RANK == 0", "if True", "all", [7], "ranks 0, 1 wrote "),
    "divided twice": (SCORES, r"\g<0> / SIZE", "5", [5], "already divided by the global batch"),
}


@pytest.mark.parametrize("name", MISTAKES if LONG else ["tokens", "uneven parts"])
def test_a_mistake_fails_in_its_row(name: str, tmp_path: Path) -> None:
    pattern, replacement, updates, steps, words = MISTAKES[name]
    script = copied(STEP, tmp_path, pattern, replacement)
    outcome = watched(script, updates=updates, code=1)
    failed = rows(outcome, "failed")
    assert list(failed) == steps, outcome.out
    assert words in failed[steps[-1]]
