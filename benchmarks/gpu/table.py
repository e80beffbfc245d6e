"""Show what a machine's calls have found, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN = "plain DDP loop"  # what the others are shown against


def tables(results: Mapping[str, Any], *, commands: bool = True) -> str:
    """Return the machine, the rates and, unless the table is omitted, how each command ended."""
    blocks = [
        machine_line(results["machine"]),
        rate_table(results["rates"], results.get("scale")),
        command_table(results["commands"]) if commands else "",
    ]
    return "\n\n".join(block for block in blocks if block)


def machine_line(machine: Mapping[str, Any]) -> str:
    """Say in a sentence what the figures are of."""
    if machine.get("rehearsal", True):
        what = "A rehearsal on a CPU, in small sizes: its figures tell nothing of GPUs"
    else:
        names = machine.get("gpus") or ["a GPU that is not NVIDIA's"]
        what = f"{len(names)} x {names[0]}"
    stack = ", ".join(f"{name} {one}" for name, one in machine.get("versions", {}).items())
    return f"{what}; {machine.get('cores')} cores; Python {machine.get('python')}, {stack}."


def rate_table(rates: Sequence[Mapping[str, Any]], scale: str | None) -> str:
    """Return a row per loop and a column per precision: images/s, and the ratio to plain DDP's."""
    if not rates:
        return ""
    precisions = list(dict.fromkeys(rate["precision"] for rate in rates))
    loops = dict.fromkeys((rate["data"], rate["loop"]) for rate in rates)
    lines = [
        f"{scale}: images/s, and in parentheses the ratio to the plain loop on the same images; "
        f"n is the number of runs, the memory that of {precisions[0]}.",
        "",
        f"| images | loop | {' | '.join(precisions)} | peak memory |",
        f"|---|---|{'--:|' * len(precisions)}--:|",
    ]
    for data, loop in sorted(loops, key=lambda names: names[0], reverse=True):
        cells = [cell(rates, data, loop, precision) for precision in precisions]
        wanted = (data, loop, precisions[0])
        peak = max(
            (r["peak_memory"] or 0 for r in rates if key(r) == wanted),
            default=0,
        )
        shown = f"{peak / 2**30:.1f} GiB" if peak else ""
        lines.append(f"| {data} | {loop} | {' | '.join(cells)} | {shown} |")
    wrong = {f"{r['loop']}, {r['precision']}: {r['trouble']}" for r in rates if r["trouble"]}
    return "\n".join([*lines, *(["", "Not measured:", ""] if wrong else []), *bullets(wrong)])


def key(rate: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return what was measured: images, loop and precision."""
    return rate["data"], rate["loop"], rate["precision"]


def bullets(lines: set[str]) -> list[str]:
    """Return the lines as a list of Markdown."""
    return [f"- {plain(line)}" for line in sorted(lines)]


def plain(line: str) -> str:
    """Return the line without what would end a table's cell or a code span."""
    return line.replace("|", "/").replace("`", "'")


def median(
    rates: Sequence[Mapping[str, Any]], data: str, loop: str, precision: str
) -> tuple[float, int]:
    """Return the median rate of a loop and of how many runs it is; 0 where there is none."""
    wanted = (data, loop, precision)
    found = [rate["rate"] for rate in rates if key(rate) == wanted and rate["rate"]]
    return (statistics.median(found), len(found)) if found else (0.0, 0)


def cell(rates: Sequence[Mapping[str, Any]], data: str, loop: str, precision: str) -> str:
    """Return the rate of a loop, what it is of the plain loop's, and of how many runs."""
    rate, runs = median(rates, data, loop, precision)
    plain, _ = median(rates, data, PLAIN, precision)
    if not rate:
        return "-"
    ratio = f" ({rate / plain:.2f})" if plain and loop != PLAIN else ""
    return f"{rate:,.4g}{ratio}, n={runs}" if rate < 1000 else f"{rate:,.0f}{ratio}, n={runs}"


def command_table(commands: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per command: its seconds, and what came of it."""
    if not commands:
        return ""
    lines = ["| part | command | | |", "|---|---|--:|---|"]
    for row in commands:
        came = f"`{plain(row['trouble'])}`" if row["trouble"] else "ok"
        if row["part"] == "tests" and "time was" not in row["trouble"]:
            came = row["said"].strip("= ")  # how many passed
        lines.append(f"| {row['part']} | {row['name']} | {row['seconds']:.0f} s | {came} |")
    return "\n".join(lines)
