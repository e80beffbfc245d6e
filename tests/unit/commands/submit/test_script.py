"""The whole text of scripts (``golden``), and their directives as a batch system reads them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdtrain.commands.submit.dialect import Dialect, Local
from hvdtrain.commands.submit.job import Job
from hvdtrain.commands.submit.pbs import Pbs
from hvdtrain.commands.submit.script import quote, render, script_text, sweep_sizes
from hvdtrain.commands.submit.site import Site
from hvdtrain.commands.submit.slurm import Slurm
from tests.unit.commands.submit.pbs_reader import job_with, read_script

# All options at once, with words that are hard to quote.
FULL = Job(
    command=("python", "it's.py", "--data=$DATA", "--seed=$TASK", "$HOME", "a\n#PBS -q other"),
    walltime=90_061,
    nodes=2,
    ppn=4,
    threads=8,
    name="full",
    queue="prod",
    account="me",
    gpus_per_node=4,
    memory="64gb",
    filesystems="home:eagle",
    array="1-9:2",
    after="7.server",
    requeue=True,
    tolerate_node_failures=True,
    module=("cray-mpich", "cuda/12"),
    email="me@x.org",
    directive=("-W umask=027",),
    setup=("export NCCL_DEBUG=WARN",),
    env="/opt/my env",
    var=(("DATA", ""), ("RESULTS", "my results")),
    comment="First line.\nSecond line.",
)
SITE = Site(
    gpu_resource="ngpus",
    select="host=a",
    directives=("-W sandbox=private",),
    modules=("base",),
    setup=("module use /soft",),  # for the modules of the job
)

CHAIN = Job(
    command=("python", "-m", "hvdtrain.mnist", "--checkpoint-dir", "my runs"),
    walltime=3600,
    ppn=2,
    name="mnist",
    chain=True,
    progress="my runs",
)
SLURM_SITE = Site(directives=("--constraint=gpu",), modules=("base",))
GOLDEN = {
    "full.pbs": (FULL, Pbs(), SITE, "", ""),
    "full.slurm": (FULL, Slurm(), SLURM_SITE, "", ""),
    "chain.slurm": (CHAIN, Slurm(), Site(), "mnist-1.chain", "mnist-1.exit"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_every_script_is_the_golden_one(name: str) -> None:
    expected = (Path(__file__).parent / "golden" / name).read_text()
    assert script_text(*GOLDEN[name]) == expected


def test_a_program_with_an_equals_sign_is_no_assignment() -> None:
    text = script_text(job_with("X=1", "Y=2", once=True), Pbs(), Site())
    assert "\n'X=1' Y=2\n" in text


def test_the_environment_is_staged_by_launch() -> None:
    staged = job_with("python", "train.py", stage_env=True)
    assert "hvdtrain launch -n 1 --ppn 1 --stage-env -- \\\n" in script_text(staged, Pbs(), Site())


EXCLUSIVE = "-l place=scatter:excl"
WHOLE = Site(whole_nodes=True, select="system=polaris")


@pytest.mark.parametrize(
    ("dialect", "job", "site", "line"),
    [
        (Pbs(), job_with("x", nodes=2, ppn=4), WHOLE, "#PBS -l select=2:system=polaris"),
        (Pbs(), job_with("x", nodes=2), Site(directives=(EXCLUSIVE,)), f"#PBS {EXCLUSIVE}"),
        (Pbs(), job_with("x", nodes=2, directive=(EXCLUSIVE,)), Site(), f"#PBS {EXCLUSIVE}"),
        # By default PBS reruns every job, and Slurm as configured.
        (Pbs(), job_with("x"), Site(), "#PBS -r n"),
        (Pbs(), job_with("x", requeue=True), Site(), "#PBS -r y"),
        (Slurm(), job_with("x"), Site(), "#SBATCH --no-requeue"),
        (Slurm(), job_with("x", queue="debug"), Site(queue_is_qos=True), "#SBATCH --qos=debug"),
    ],
)
def test_directives(dialect: Dialect, job: Job, site: Site, line: str) -> None:
    lines = dialect.directives(job, site)
    assert line in lines
    assert sum("place=" in line for line in lines) <= 1


@pytest.mark.parametrize("dialect", [Pbs(), Slurm(), Local()])
@pytest.mark.parametrize("job", [FULL, CHAIN, job_with("x", array="1-3")])
def test_generated_scripts_are_accepted(job: Job, dialect: Dialect) -> None:
    read_script(script_text(job, dialect, SITE, "c"), frozenset({"ngpus", "filesystems"}))


@pytest.mark.parametrize(
    ("nodes", "ppn", "sizes"),
    [
        (16, 4, [1, 2, 4, 8, 16, 32, 64]),
        (3, 12, [1, 2, 4, 8, 12, 24]),
        (1, 1, [1]),
        (2, 1, [1, 2]),
        (1, 6, [1, 2, 4, 6]),
    ],
)
def test_a_sweep_doubles_ranks_and_then_nodes(nodes: int, ppn: int, sizes: list[int]) -> None:
    assert sweep_sizes(nodes, ppn) == sizes


# Words pass through bash unchanged

# A path or an option may contain any character but NUL. Lone surrogates are bytes that are not
# UTF-8; Python writes the original bytes.
NASTY = st.sampled_from([*" '\"$`\\\n\r\t!#&*;|<>(){}[]~-=,:%^@?", "$A", "${A}", "#PBS", "é"])
CHARACTERS = st.characters(max_codepoint=0x2FF, exclude_characters="\0")
WORDS = st.lists(st.one_of(NASTY, CHARACTERS), max_size=12).map("".join)


def from_bash(line: str, **variables: str) -> list[str]:
    """Return ``line`` as split by bash."""
    script = f'set -- {line}\nprintf \'%s\\0\' "$#" "$@"\n'
    result = subprocess.run(
        ["bash", "-c", script],
        env={"LC_ALL": "C.UTF-8", **variables},
        capture_output=True,
        check=True,
        timeout=60,
    )
    number, *words = os.fsdecode(result.stdout).split("\0")[:-1]
    assert len(words) == int(number)
    return words


@given(st.lists(WORDS, max_size=8))
@example(["", "-n", "--", "#PBS -q other", "a\n#PBS -q other", "x\r\ny", "'", '"', "\\", "\udcff"])
def test_quoted_words_are_unchanged(words: list[str]) -> None:
    line = " ".join(map(quote, words))
    assert "\n" not in line
    assert "\r" not in line
    assert from_bash(line) == words


@given(st.lists(WORDS, max_size=4), WORDS, WORDS)
@example(["$A", "${A}", "$A$A", "${A}b", "$A[0]", "\\$A", "$$A", "$B", "\n$A"], "two words\n*", "")
@example(["--data=$E", "$E", "a'b$E"], "", "")
@example(["--data=$E/$A", "x}$E", "\n$E"], "a", "}")
def test_only_declared_variables_are_expanded(words: list[str], a: str, e: str) -> None:
    """A may not be empty; E may: a word with it is left out then."""
    a = a or "a"
    line = " ".join(render(word, ["A", "E"], ["E"]) for word in words)
    expected = []
    for word in words:
        plain = word.replace("${A}", "\0a").replace("${E}", "\0e")
        if name_follows(plain):
            return  # $Ab is the undeclared variable Ab: see the examples below
        plain = plain.replace("$A", "\0a").replace("$E", "\0e")
        if "\0e" in plain and not e:
            continue
        expected.append(plain.replace("\0a", a).replace("\0e", e))
    assert from_bash(line, A=a, E=e) == expected


def name_follows(word: str) -> bool:
    """Return whether a character of a name follows a reference."""
    ends = [end for mark in ("$A", "$E") for end in ends_of(word, mark)]
    return any(word[end : end + 1].isalnum() or word[end : end + 1] == "_" for end in ends)


def ends_of(word: str, mark: str) -> list[int]:
    return [at + len(mark) for at in range(len(word)) if word.startswith(mark, at)]


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--epochs=$EPOCHS", '"--epochs=$EPOCHS"'),
        ("--data=$DATA", '${DATA:+"--data=$DATA"}'),
        ("$EPOCHS/${EPOCHS}.json", '"$EPOCHS/$EPOCHS.json"'),
        ("${EPOCHS}x", '"${EPOCHS}x"'),
        ("$EPOCHSx", "'$EPOCHSx'"),
        ("$HOME/it's", "'$HOME/it'\"'\"'s'"),
        ("plain", "plain"),
    ],
)
def test_quoting_is_minimal(word: str, text: str) -> None:
    assert render(word, ["EPOCHS", "DATA"], ["DATA"]) == text
