"""Shell completion of verbs and options; in bash also of a program and its options after ``--``.

The script is static: completing a word does not start Python.
"""

from __future__ import annotations

from collections.abc import Iterator

import shtab

from hvdtrain import pi, train
from hvdtrain.commands.collectives import program as collectives
from hvdtrain.config.command_line import build_parser
from hvdtrain.config.declare import CommandParser
from hvdtrain.workloads.mnist.task import WORKLOAD as MNIST
from hvdtrain.workloads.resnet.task import WORKLOAD as RESNET
from hvdtrain.workloads.ssd300.task import WORKLOAD as SSD300

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


def completion(shell: str, verbs: CommandParser) -> str:
    """Return the completion script for ``shell``; ``verbs`` has a subparser per verb."""
    text = shtab.complete(verbs, shell)
    if shell != "bash":
        return text
    programs = CommandParser(prog="hvdtrain", add_help=False)
    table = programs.add_subparsers()
    for name, parser in _programs():
        table.add_parser(name, help=parser.description, parents=[parser], add_help=False)
    of_programs = shtab.complete(programs, shell, root_prefix="hvdtrain_program")
    parts = [script.rpartition(REGISTRATION)[0] for script in (text, of_programs)]
    return "\n".join([*parts, CHOICE])


def _programs() -> Iterator[tuple[str, CommandParser]]:
    """Yield each program, as named after ``python -m``, and its parser."""
    for workload in (MNIST, RESNET, SSD300):
        name = workload.name
        yield f"hvdtrain.{name}", build_parser(name, workload.description, "", workload.options)
    yield "hvdtrain.train", build_parser("train", train.DESCRIPTION, "")
    yield "hvdtrain.pi", pi.build_parser()
    yield "hvdtrain.collectives", collectives.build_parser()
