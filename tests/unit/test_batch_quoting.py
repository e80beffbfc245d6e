"""Words come back from bash as they went in, whatever is in them."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdtrain.batch.quoting import quote, render

# What a file system or an option can hold: anything but NUL. Lone surrogates are bytes that are
# no UTF-8; Python writes them back as the bytes they were.
NASTY = st.sampled_from([*" '\"$`\\\n\r\t!#&*;|<>(){}[]~-=,:%^@?", "$A", "${A}", "#PBS", "é"])
CHARACTERS = st.characters(max_codepoint=0x2FF, exclude_characters="\0")
WORDS = st.lists(st.one_of(NASTY, CHARACTERS), max_size=12).map("".join)


def from_bash(line: str, **variables: str) -> list[str]:
    """The words that bash makes of ``line``."""
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
def test_words_come_back(words: list[str]) -> None:
    line = " ".join(map(quote, words))
    assert "\n" not in line
    assert "\r" not in line
    assert from_bash(line) == words


@given(st.lists(WORDS, max_size=4), WORDS, WORDS)
@example(["$A", "${A}", "$A$A", "${A}b", "$A[0]", "\\$A", "$$A", "$B", "\n$A"], "two words\n*", "")
@example(["--data=$E", "$E", "a'b$E"], "", "")
@example(["--data=$E/$A", "x}$E", "\n$E"], "a", "}")
def test_only_declared_variables_are_bash_s(words: list[str], a: str, e: str) -> None:
    """A may not be empty, E may: then a word that names it is left out."""
    a = a or "a"
    line = " ".join(render(word, ["A", "E"], ["E"]) for word in words)
    expected = []
    for word in words:
        plain = word.replace("${A}", "\0a").replace("${E}", "\0e")
        if name_follows(plain):
            return  # $Ab names Ab, which is not declared: told by the examples below
        plain = plain.replace("$A", "\0a").replace("$E", "\0e")
        if "\0e" in plain and not e:
            continue
        expected.append(plain.replace("\0a", a).replace("\0e", e))
    assert from_bash(line, A=a, E=e) == expected


def name_follows(word: str) -> bool:
    """Whether a reference goes on with a character of a name."""
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
def test_it_stays_readable(word: str, text: str) -> None:
    assert render(word, ["EPOCHS", "DATA"], ["DATA"]) == text
