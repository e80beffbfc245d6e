"""Options, help texts and JSON keys, compared with the files in ``golden/``.

``golden/options.txt`` and ``golden/keys.txt`` are contracts: names of options, their values, and
keys of JSON. ``golden/help/`` shows the effect of a changed text on the whole help page. After an
intended change, rewrite the files and review the difference:

python -m tests.unit.test_interface
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from hvdtrain import cli
from hvdtrain.commands.scaling import runs as records
from hvdtrain.commands.study.run import append_record
from hvdtrain.config.declare import CommandParser
from hvdtrain.steps.summary import Summary
from hvdtrain.workloads.mnist.task import WORKLOAD as MNIST
from hvdtrain.workloads.resnet.task import WORKLOAD as RESNET
from hvdtrain.workloads.ssd300.task import WORKLOAD as SSD300
from tests.studies import TUTORIAL, run
from tests.timelines import straggling
from tests.unit.commands.compare.test_table import THREE, write

GOLDEN = Path(__file__).parent / "golden"
WIDTH = 80


def parsers() -> dict[str, CommandParser]:
    """Return the parser of each verb and program, by command."""
    verbs = {f"hvdtrain {verb}": cli.parser_of(verb) for verb in cli.VERBS}
    programs = {f"python -m {name}": parser for name, parser in cli.program_parsers()}
    for workload in (MNIST, RESNET, SSD300):  # completion needs no epilog
        programs[f"python -m hvdtrain.{workload.name}"].epilog = workload.epilog
    return {"hvdtrain": cli.overview(), **verbs, **programs}


def file_of(command: str) -> str:
    return f"help/{command.removeprefix('python -m ').replace(' ', '-')}.txt"


def help_of(command: str) -> str:
    """Return the help of a verb or program as a terminal of 80 columns shows it."""
    with mock.patch.dict(os.environ, COLUMNS=str(WIDTH)):
        return parsers()[command].format_help()


def options() -> str:
    """Return each option of each verb and program: names, number of values, and choices."""
    lines = []
    for command, parser in parsers().items():
        for action in sorted(parser._actions, key=lambda action: action.option_strings):
            choices = action.choices and [str(choice) for choice in action.choices]
            default = "-" if action.default is argparse.SUPPRESS else action.default
            names = "|".join(action.option_strings) or action.dest
            lines.append(
                f"{command}: {names} nargs={action.nargs} choices={choices} default={default}"
            )
    return "\n".join(lines) + "\n"


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the leaves of a JSON value, e.g. ``rows[].ranks``."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and value:
        for inner in value:
            yield from paths(inner, f"{path}[]")
    else:
        yield path


def objects(folder: Path) -> dict[str, Any]:
    """Return the ``--json`` output of each verb without ranks, and a line of each study."""
    (folder / "measured.csv").write_text(TUTORIAL)
    (folder / "timeline.json").write_text(straggling(10).text)
    comparison, images = folder / "comparison", folder / "images"
    comparison.mkdir()
    write(comparison, list(THREE))
    for name in ("train/cat/1.jpg", "train/dog/2.jpg", "val/cat/3.jpg", "val/dog/4.jpg"):
        (images / name).parent.mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(images / name)
    commands = (
        ("timeline", folder / "timeline.json"),
        ("scaling", "--from", folder / "measured.csv", "--predict", "16"),
        ("compare", "--out", comparison),
        ("report", comparison),
        ("pack", images, folder / "packed"),
        ("pack", "--check", folder / "packed"),
        ("data-fetch", "mnist", "--to", folder / "mnist", "--dry-run"),
        ("submit", "--scheduler", "pbs", "--walltime", "1:00:00", "--dry-run", "--", "python"),
    )
    result: dict[str, Any] = {}
    for words in commands:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert cli.main([words[0], "--json", *map(str, words[1:])]) == 0, words
        name = " ".join(str(word) for word in words[:2] if not isinstance(word, Path))
        result[name] = json.loads(out.getvalue())
    append_record(folder / records.LINES, run(2))
    result[records.LINES] = json.loads((folder / records.LINES).read_text())
    result["compare.jsonl"] = json.loads((comparison / "compare.jsonl").read_text().splitlines()[0])
    result["--summary"] = Summary.from_json({}).to_json()
    return result


def keys() -> str:
    """Return the keys of each object, one per line."""
    with tempfile.TemporaryDirectory() as folder:
        printed = objects(Path(folder))
    lines = [f"{name}: {path}" for name, value in printed.items() for path in paths(value)]
    return "\n".join(dict.fromkeys(lines)) + "\n"


def compare(name: str, now: str) -> None:
    expected = (GOLDEN / name).read_text()
    changes = difflib.unified_diff(expected.splitlines(), now.splitlines(), "golden", "now")
    assert expected == now, "\n".join(changes)


def test_options_are_the_golden_ones() -> None:
    compare("options.txt", options())


def test_keys_of_json_are_the_golden_ones() -> None:
    compare("keys.txt", keys())


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse writes usage in another way")
@pytest.mark.parametrize("command", parsers())
def test_each_help_is_the_golden_one(command: str) -> None:
    compare(file_of(command), help_of(command))


def test_every_golden_help_has_its_command() -> None:
    files = {str(path.relative_to(GOLDEN)) for path in (GOLDEN / "help").iterdir()}
    assert files == {file_of(command) for command in parsers()}


if __name__ == "__main__":
    (GOLDEN / "options.txt").write_text(options())
    (GOLDEN / "keys.txt").write_text(keys())
    for command in parsers():
        (GOLDEN / file_of(command)).write_text(help_of(command))
