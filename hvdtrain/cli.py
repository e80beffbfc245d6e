"""The command ``hvdtrain VERB``: parse the command line and run the verb.

Only the module of the requested verb is imported, and no verb imports a framework to declare its
options, so that every ``--help`` is fast. The script of ``--completion`` is static: completing a
word does not start Python.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from hvdtrain import __version__
from hvdtrain.config.checks import check, of_fields
from hvdtrain.config.declare import CommandParser, add_options, from_namespace, nearest
from hvdtrain.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    HvdtrainError,
    UsageError,
    escaped,
)
from hvdtrain.system.files import check_working_directory
from hvdtrain.system.output.plots import check_installed
from hvdtrain.system.runtime import terminal

# Name and summary of each verb, in the order of the help.
VERBS = {
    "install-horovod": "build, test and install Horovod for the installed frameworks",
    "doctor": "diagnose the environment: MPI, GPUs, limits, Horovod",
    "verify": "check on real ranks that each of the eight steps takes effect",
    "data-fetch": "download a public dataset, on a node with network access",
    "pack": "pack a dataset of small files into tar shards",
    "launch": "launch a training with the right launcher and options",
    "submit": "write a job script and submit it to PBS or Slurm",
    "scaling": "measure how a training scales with the number of ranks",
    "compare": "compare strategies, frameworks and precisions by measurement",
    "timeline": "analyse a Horovod timeline: time per operation, late ranks",
    "report": "write one HTML page about a run or a study",
}
# Characters in a report that may be those of any file; the report's colours are kept.
CONTROL = re.compile(r"(?!\x1b\[[\d;]*m)[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
NO_THREAD = "can't start new thread"  # Python's message
DRAWING = ("scaling", "compare", "report")  # verbs that need hvdtrain[studies]
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

Options: `hvdtrain help VERB`, or `python -m PROGRAM --help`."""


REGISTRATION = "\ncomplete "  # the last line of shtab's script for bash
# Choose the function of shtab: for the word after `-- ... -m` that of the programs.
CHOICE = """
_hvdtrain() {
  local place=1
  while [[ $place -lt $COMP_CWORD && ${COMP_WORDS[place]} != -- ]]; do ((place += 1)); done
  if [[ $place -ge $COMP_CWORD ]]; then
    _shtab_hvdtrain "$@"
    return
  fi
  while [[ $place -lt $COMP_CWORD && ${COMP_WORDS[place]} != -m ]]; do ((place += 1)); done
  COMPREPLY=()
  if [[ $place -lt $COMP_CWORD ]]; then
    COMP_WORDS=(hvdtrain "${COMP_WORDS[@]:place + 1}")
    ((COMP_CWORD -= place))
    _shtab_hvdtrain_program
  fi
}

complete -o bashdefault -o default -F _hvdtrain hvdtrain"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words:
        print(overview().description, EXAMPLE.splitlines()[-1], sep="\n")  # fits in 24 lines
        return EXIT_USAGE
    if words[0].startswith("-"):
        try:
            shell = overview().read(words).completion
        except UsageError as error:
            return _complain(str(error))
        return _completion(shell) if shell else _complain(f"{words[0]}: missing verb after it")
    if words[0] not in VERBS:
        if f"  hvdtrain.{words[0]} " in PROGRAMS:
            start = f"hvdtrain launch -n 2 -- python -m hvdtrain.{words[0]}"
            return _complain(f"{words[0]!r} is a program, not a verb: {start}")
        near = nearest(words[0], VERBS)
        hint = f"did you mean {near}?" if near else f"choose from {', '.join(VERBS)}"
        return _complain(f"unknown verb {words[0]!r}: {hint}")
    return _run(words[0], words[1:])


def module_of(verb: str) -> ModuleType:
    """Import the module of ``verb``, with ``run_verb(options)``, ``EPILOG``, maybe ``USAGE``."""
    return importlib.import_module(f"hvdtrain.commands.{verb.replace('-', '_')}.verb")


def options_of(verb: str) -> type[Any]:
    """Return the dataclass that declares the options of ``verb``, which its ``run_verb`` takes."""
    kind: type[Any] = get_type_hints(module_of(verb).run_verb)["options"]
    return kind


def parser_of(verb: str, create: Callable[..., CommandParser] = CommandParser) -> CommandParser:
    """Return the parser of ``verb``, created by ``create``."""
    module = module_of(verb)
    parser = create(
        prog=f"hvdtrain {verb}",
        usage=getattr(module, "USAGE", None),
        description=VERBS[verb],
        epilog=module.EPILOG,
    )
    add_options(parser, options_of(verb))
    return parser


def overview() -> CommandParser:
    """Return the parser of ``hvdtrain`` without a verb; its help lists the verbs."""
    width = max(map(len, VERBS))
    rows = [f"  {name:<{width}}  {summary}" for name, summary in VERBS.items()]
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
        choices=("bash", "zsh"),
        metavar="SHELL",
        help='print shell completion: eval "$(hvdtrain --completion bash)"',
    )
    return parser


def program_parsers() -> Iterator[tuple[str, CommandParser]]:
    """Yield each program, as named after ``python -m``, and its parser."""
    from hvdtrain import pi
    from hvdtrain.commands.collectives import program as collectives
    from hvdtrain.config.command_line import build_parser
    from hvdtrain.tasks import own
    from hvdtrain.workloads.mnist.task import WORKLOAD as MNIST
    from hvdtrain.workloads.resnet.task import WORKLOAD as RESNET
    from hvdtrain.workloads.ssd300.task import WORKLOAD as SSD300

    for workload in (MNIST, RESNET, SSD300):
        name = workload.name
        yield f"hvdtrain.{name}", build_parser(name, workload.description, "", workload.options)
    yield "hvdtrain.train", build_parser("train", own.DESCRIPTION, "")
    yield "hvdtrain.pi", pi.build_parser()
    yield "hvdtrain.collectives", collectives.build_parser()


def _completion(shell: str) -> int:
    """Print the script that completes verbs and options; in bash programs after ``--``, too."""
    try:
        import shtab
    except ImportError:
        return _complain("--completion needs shtab: pip install shtab")
    from hvdtrain.commands.submit.site import EXAMPLES

    parser = overview()
    verbs = parser.add_subparsers()
    for name, summary in VERBS.items():
        verb = parser_of(name, partial(verbs.add_parser, name, help=summary))
        if site := verb.action_of("--site"):
            site.choices = list(EXAMPLES)  # or a file: the shell completes it if none of these fits
    text = shtab.complete(parser, shell)
    if shell == "bash":
        programs = CommandParser(prog="hvdtrain", add_help=False)
        table = programs.add_subparsers()
        for name, program in program_parsers():
            table.add_parser(name, help=program.description, parents=[program], add_help=False)
        of_programs = shtab.complete(programs, shell, root_prefix="hvdtrain_program")
        scripts = [script.rpartition(REGISTRATION)[0] for script in (text, of_programs)]
        text = "\n".join([*scripts, CHOICE])
    print(text)
    return EXIT_OK


def _open_output() -> None:
    """Make standard output usable, although it is closed or the locale cannot spell a name."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(verb: str, words: Sequence[str]) -> int:
    """Parse the options of a verb, run it, and print its report."""
    _open_output()
    with contextlib.suppress(RuntimeError):  # e.g. systemd sets none, and mpirun needs it
        os.environ.setdefault("HOME", str(Path.home()))
    try:
        check_working_directory()
        parsed = parser_of(verb).read(words)
    except UsageError as error:
        return _complain(str(error))
    as_json = getattr(parsed, "json", False)
    # Standard output is for the result, all other messages go to standard error; of libraries
    # only warnings.
    handler = terminal.Handler(sys.stderr)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("hvdtrain").setLevel(logging.INFO)
    logging.captureWarnings(True)  # of matplotlib, with names of any file
    try:
        if verb in DRAWING:
            check_installed(f"hvdtrain {verb}")
        options = from_namespace(options_of(verb), parsed)
        check(of_fields(options))
        report = module_of(verb).run_verb(options)
    except HvdtrainError as error:
        if as_json:
            print(json.dumps({"ok": False, "error": str(error)}, indent=1, sort_keys=True))
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED)
    except (BlockingIOError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != NO_THREAD:
            raise
        reason = "probably the limit of processes and threads (ulimit -u, pids.max)"
        return _complain(f"{error}: {reason}", EXIT_FAILURE)
    try:
        if as_json:
            print(json.dumps(report.data, indent=1, sort_keys=True))
        elif report.text:
            print(CONTROL.sub(lambda match: escaped(match[0]), report.text))
        sys.stdout.flush()
    except OSError as error:
        # Python would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader, e.g. head, has closed the pipe
            return _complain(f"standard output: {error.strerror}", EXIT_FAILURE)
    return int(report.exit_code)


def _complain(message: str, code: int = EXIT_USAGE) -> int:
    """Print a one-line error message on standard error and return the exit code."""
    print(f"hvdtrain: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
