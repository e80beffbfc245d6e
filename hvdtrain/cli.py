"""The command ``hvdtrain VERB``: parse the command line and run the verb.

Only the module of the requested verb is imported, and no verb imports a framework to declare its
options, so that every ``--help`` is fast.
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
from hvdtrain.system.output.plots import check_installed
from hvdtrain.system.runtime import terminal


@dataclass(frozen=True)
class Verb:
    """A subcommand."""

    name: str
    """Name on the command line."""
    summary: str
    """One-line description for the help."""
    module: str | None = None
    """Module with ``add_arguments(parser)`` and ``run_verb(arguments) -> Report``; None: not
    implemented yet, and hidden."""
    draws: bool = False
    """Whether it needs the packages of the extra ``studies``."""


VERBS = (
    Verb(
        "install-horovod",
        "build, test and install Horovod for the installed frameworks",
        "hvdtrain.commands.install_horovod.verb",
    ),
    Verb(
        "doctor",
        "diagnose the environment: MPI, GPUs, limits, Horovod",
        "hvdtrain.commands.doctor.verb",
    ),
    Verb(
        "verify",
        "check on real ranks that each of the eight steps takes effect",
        "hvdtrain.commands.verify.verb",
    ),
    Verb(
        "data-fetch",
        "download a public dataset, on a node with network access",
        "hvdtrain.commands.data_fetch.verb",
    ),
    Verb(
        "pack",
        "pack a dataset of small files into tar shards",
        "hvdtrain.commands.pack.verb",
    ),
    Verb(
        "launch",
        "launch a training with the right launcher and options",
        "hvdtrain.commands.launch.verb",
    ),
    Verb(
        "submit",
        "write a job script and submit it to PBS or Slurm",
        "hvdtrain.commands.submit.verb",
    ),
    Verb(
        "scaling",
        "measure how a training scales with the number of ranks",
        "hvdtrain.commands.scaling.verb",
        draws=True,
    ),
    Verb(
        "compare",
        "compare strategies, frameworks and precisions by measurement",
        "hvdtrain.commands.compare.verb",
        draws=True,
    ),
    Verb(
        "timeline",
        "analyse a Horovod timeline: time per operation, late ranks",
        "hvdtrain.commands.timeline.verb",
    ),
    Verb(
        "report",
        "write one HTML page about a run or a study",
        "hvdtrain.commands.report.verb",
        draws=True,
    ),
)
PROGRAMS = """programs, launched by `hvdtrain launch -n N -- python -m PROGRAM`:
  hvdtrain.mnist        train on handwritten digits
  hvdtrain.resnet       train a ResNet on images
  hvdtrain.ssd300       train an SSD300 detector on images with bounding boxes
  hvdtrain.train FILE   train the task defined in your Python file
  hvdtrain.pi           estimate pi with random points, using MPI only
  hvdtrain.collectives  demonstrate and time collectives"""
EXAMPLE = """example:
  hvdtrain install-horovod
  hvdtrain launch -n 2 -- python -m hvdtrain.mnist

Options of a verb: `hvdtrain help VERB`; of a program: `python -m PROGRAM --help`."""
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
        return _completion(shell) if shell else _complain(f"{words[0]}: missing verb after it")
    verb = next((verb for verb in VERBS if verb.name == words[0]), None)
    if verb is None:
        return _complain(f"unknown verb {words[0]!r}: {_hint(words[0])}")
    if verb.module is None:
        return _complain(f"{verb.name} is not implemented in hvdtrain {__version__}")
    module = importlib.import_module(verb.module)
    return _run(verb, module, words[1:])


def _implemented() -> list[Verb]:
    return [verb for verb in VERBS if verb.module]


def _hint(word: str) -> str:
    """Return a hint for ``word``, which is not a verb."""
    names = [verb.name for verb in _implemented()]
    near = nearest(word, names)
    return f"did you mean {near}?" if near else f"choose one of {', '.join(names)}"


def overview() -> CommandParser:
    """Return the parser of ``hvdtrain`` without a verb; its help lists the verbs."""
    width = max(len(verb.name) for verb in VERBS)
    rows = [f"  {verb.name:<{width}}  {verb.summary}" for verb in _implemented()]
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
        help='print shell completion: eval "$(hvdtrain --completion bash)"',
    )
    return parser


def _declare(verb: Verb, module: ModuleType, create: Callable[..., CommandParser]) -> CommandParser:
    """Return the parser of ``verb``, created by ``create``, with the options of ``module``."""
    parser = create(prog=f"hvdtrain {verb.name}", description=verb.summary)
    module.add_arguments(parser)
    return parser


def _completion(shell: str) -> int:
    """Print the completion script for ``shell``."""
    try:
        from hvdtrain.completion import completion
    except ImportError:
        return _complain("--completion needs shtab: pip install shtab")
    parser = overview()
    verbs = parser.add_subparsers()
    for verb in _implemented():
        module = importlib.import_module(str(verb.module))
        _declare(verb, module, partial(verbs.add_parser, verb.name, help=verb.summary))
    print(completion(shell, parser))
    return EXIT_OK


def _run(verb: Verb, module: ModuleType, words: Sequence[str]) -> int:
    """Parse the options of a verb, run it, and print its report."""
    try:
        arguments = _declare(verb, module, CommandParser).read(words)
    except UsageError as error:
        return _complain(str(error))
    as_json = getattr(arguments, "json", False)
    # Standard output is for the result, all other messages go to standard error; of libraries
    # only warnings.
    handler = terminal.Handler(sys.stderr)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("hvdtrain").setLevel(logging.INFO)
    try:
        if verb.draws:
            check_installed(f"hvdtrain {verb.name}")
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
    except BrokenPipeError:  # the reader, e.g. head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(report.exit_code)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1, sort_keys=True))


def _complain(message: str, code: int = EXIT_USAGE) -> int:
    """Print a one-line error message on standard error and return the exit code."""
    print(f"hvdtrain: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
