"""A checker of job scripts, for lines that a batch system would ignore or refuse."""

from __future__ import annotations

import re

DIRECTIVE = re.compile(r"#(PBS|SBATCH)\b")


def check_script(text: str) -> list[str]:
    """Return the problems of the script for a batch system; empty: none.

    Batch systems stop reading at the first command, and silently ignore directives after it.
    """
    problems = []
    lines = text.split("\n")
    if not lines[0].startswith("#!/"):
        problems.append("line 1: no #! with a shell; PBS would take the user's own")
    if "\r" in text:
        problems.append("it has DOS line ends, which sbatch refuses")
    command: int | None = None
    directives = []
    for number, line in enumerate(lines, 1):
        if DIRECTIVE.match(line):
            directives.append(line)
            if command is not None:
                problems.append(
                    f"line {number}: {line!r} comes after the first command (line {command}), so "
                    "no batch system reads it"
                )
        elif command is None and line.strip() and not line.startswith("#"):
            command = number
    return problems + _check_directives(directives)


def _check_directives(directives: list[str]) -> list[str]:
    problems = []
    resources = [line.split("-l", 1)[1].strip() for line in directives if " -l" in line]
    for name in ("select", "walltime"):
        lines = [line for line in resources if line.startswith(f"{name}=")]
        if len(lines) > 1:
            problems.append(f"{name} is requested {len(lines)} times")
    for line in resources:
        if "walltime=" in line and "select=" in line:
            problems.append(f"{line!r}: Slurm wants select and walltime on lines of their own")
        if line.startswith("select=") and "+" in line:
            problems.append(f"{line!r}: Slurm knows no chunks joined by +")
        if re.search(r"\bmem=[^:,]*[:,]", line):
            problems.append(f"{line!r}: Slurm reads mem= only at the end")
        if re.match(r"nodes=", line) and any(item.startswith("select=") for item in resources):
            problems.append(f"{line!r}: PBS refuses nodes= beside select=")
    return problems
