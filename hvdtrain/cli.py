"""The command ``hvdtrain VERB``: parses, then calls the one package that does it.

Only the module of the verb that was asked for is imported, so that every ``--help`` answers at
once; no module of a verb imports a framework to declare its options. argparse, because a verb's
few options need nothing that it lacks.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from hvdtrain import __version__
from hvdtrain.config.parser import CommandParser, nearest
from hvdtrain.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, HvdtrainError, UsageError
from hvdtrain.system.runtime import terminal


@dataclass(frozen=True)
class Verb:
    """One word of the command line."""

    name: str
    """As typed."""
    summary: str
    """One line for the table."""
    module: str | None = None
    """Has ``add_arguments(parser)`` and ``run_verb(arguments) -> Report``; None: not built yet,
    and shown nowhere."""


VERBS = (
    Verb(
        "install-horovod",
        "build Horovod for the installed frameworks, cache, prove and install it",
        "hvdtrain.commands.install_horovod.verb",
    ),
    Verb(
        "doctor",
        "look for what keeps a training from running well on this machine",
        "hvdtrain.commands.doctor.verb",
    ),
    Verb(
        "verify",
        "prove on your own ranks that each of the eight steps takes effect",
        "hvdtrain.commands.verify.verb",
    ),
    Verb(
        "data-fetch",
        "download a public data set, on a node that has network",
        "hvdtrain.commands.data_fetch.verb",
    ),
    Verb(
        "pack",
        "gather the many files of a data set in few, for a shared file system",
        "hvdtrain.commands.pack.verb",
    ),
    Verb(
        "launch",
        "start a training under the right launcher with the right options",
        "hvdtrain.commands.launch.verb",
    ),
    Verb(
        "submit", "write a job script and hand it to PBS or Slurm", "hvdtrain.commands.submit.verb"
    ),
    Verb(
        "scaling",
        "measure how well a training scales with the ranks",
        "hvdtrain.commands.scaling.verb",
    ),
    Verb(
        "compare",
        "measure strategies, frameworks and precisions against each other",
        "hvdtrain.commands.compare.verb",
    ),
    Verb(
        "timeline",
        "read a Horovod timeline: what takes the time, which rank is late",
        "hvdtrain.commands.timeline.verb",
    ),
    Verb(
        "report",
        "put a run or a study, with its curves and measurements, into one page",
        "hvdtrain.commands.report.verb",
    ),
)
PROGRAMS = """programs, each started by `hvdtrain launch -n N -- python -m PROGRAM`:
  hvdtrain.mnist        train on handwritten digits
  hvdtrain.resnet       train a ResNet on images
  hvdtrain.ssd300       train a detector, SSD300, on images with boxes
  hvdtrain.train FILE   train the task that a Python file of yours defines
  hvdtrain.pi           estimate pi with random points: MPI alone
  hvdtrain.collectives  show what each collective does, and how fast it is"""
EXAMPLE = """example:
  hvdtrain install-horovod
  hvdtrain launch -n 2 -- python -m hvdtrain.mnist

The options of a verb: `hvdtrain help VERB`; of a program: `python -m PROGRAM --help`."""
SHELLS = ("bash", "zsh", "tcsh")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words:
        overview().print_help()
        return EXIT_USAGE
    if words[0].startswith("-"):
        try:
            shell = overview().read(words).completion
        except UsageError as error:
            return _complain(str(error))
        return _completion(shell) if shell else _complain(f"{words[0]} needs a verb after it")
    verb = next((verb for verb in VERBS if verb.name == words[0]), None)
    if verb is None:
        return _complain(f"unknown verb {words[0]!r}: {_near(words[0])}")
    if verb.module is None:
        return _complain(f"{verb.name} is not built yet in hvdtrain {__version__}")
    module = importlib.import_module(verb.module)
    return _run(module, _declare(verb, module, CommandParser), words[1:])


def _built() -> list[Verb]:
    return [verb for verb in VERBS if verb.module]


def _near(word: str) -> str:
    """Return a hint for ``word``, which is no verb."""
    names = [verb.name for verb in _built()]
    near = nearest(word, names)
    return f"did you mean {near}?" if near else f"choose one of {', '.join(names)}"


def overview() -> CommandParser:
    """Return the parser that knows the table of verbs."""
    width = max(len(verb.name) for verb in VERBS)
    rows = [f"  {verb.name:<{width}}  {verb.summary}" for verb in _built()]
    parser = CommandParser(
        prog="hvdtrain",
        usage="hvdtrain VERB [options]",
        description="\n".join(
            ["Horovod training on an HPC cluster.", "", "verbs:", *rows, "", PROGRAMS]
        ),
        epilog=EXAMPLE,
    )
    parser.add_argument("--version", action="version", version=f"hvdtrain {__version__}")
    parser.add_argument(
        "--completion",
        choices=SHELLS,
        metavar="SHELL",
        help='for TAB in bash, zsh, tcsh: eval "$(hvdtrain --completion bash)"',
    )
    return parser


def _declare(verb: Verb, module: ModuleType, new: Callable[..., CommandParser]) -> CommandParser:
    """Return the parser of ``verb``, which ``module`` carries out, made by ``new``."""
    parser = new(prog=f"hvdtrain {verb.name}", description=verb.summary)
    module.add_arguments(parser)
    return parser


def _completion(shell: str) -> int:
    """Print what makes ``shell`` complete verbs and options."""
    try:
        from hvdtrain.completion import completion
    except ImportError:
        return _complain("--completion needs shtab: pip install shtab")
    parser = overview()
    verbs = parser.add_subparsers()
    for verb in _built():
        module = importlib.import_module(str(verb.module))
        _declare(verb, module, partial(verbs.add_parser, verb.name, help=verb.summary))
    print(completion(shell, parser))
    return EXIT_OK


def _run(module: ModuleType, parser: CommandParser, words: Sequence[str]) -> int:
    """Parse the options of a verb, carry it out, and print what it reports."""
    try:
        arguments = parser.read(words)
    except UsageError as error:
        return _complain(str(error))
    as_json = getattr(arguments, "json", False)
    # Standard output belongs to the result, so everything on the way goes to standard error.
    # Libraries that we use have nothing to say there but warnings.
    shown = terminal.Handler(sys.stderr)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[shown])
    logging.getLogger("hvdtrain").setLevel(logging.INFO)
    try:
        report = module.run_verb(arguments)
    except HvdtrainError as error:
        if as_json:
            _print_json({"ok": False, "error": str(error)})
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED)
    try:
        if as_json:
            _print_json(report.data)
        elif report.text:
            print(report.text)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as head has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(report.exit_code)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1, sort_keys=True))


def _complain(message: str, code: int = EXIT_USAGE) -> int:
    """Say what is wrong on standard error, in one line, and return the exit code."""
    print(f"hvdtrain: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
