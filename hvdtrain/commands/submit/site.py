"""What all jobs of a cluster have in common: a small YAML file, read once by ``submit``.

``--site NAME`` takes one of the examples in ``sites/``, ``--site FILE.yaml`` one's own; without it
``~/.config/hvdtrain/site.yaml`` counts, where it exists. The command line wins over all of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.commands.submit.job import LONGEST_NAME, PLAIN, Job
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.walltime import parse_clock, show_clock
from hvdtrain.system.settings import read_settings

EXAMPLES = Path(__file__).parent / "sites"
SCHEDULERS = ("pbs", "slurm", "none")

_NODES = re.compile(r"(\d+)(?:-(\d*))?")


@dataclass(frozen=True)
class Limits:
    """The limits of a queue, in the file ``debug: {nodes: 1-2, walltime: "1:00:00"}``."""

    fewest: int = 1  # nodes
    most: int | None = None  # nodes; None: no limit
    walltime: int | None = None  # seconds; None: no limit


@dataclass(frozen=True)
class Site:
    """Defaults and rules of a cluster; the fields are the keys of its file."""

    scheduler: str | None = None  # ``pbs``, ``slurm`` or ``none``; None: whichever is found
    queue: str | None = None  # where ``--queue`` is not given
    queue_is_qos: bool = False  # Slurm: a queue is a quality of service, not a partition
    account: str | None = None  # where ``--account`` is not given
    filesystems: str | None = None  # where ``--filesystems`` is not given
    cores_per_node: int | None = None  # more cores than that are refused
    gpus_per_node: int | None = None  # also the ranks per node where ``--ppn`` is not given
    gpu_resource: str | None = None  # PBS: the resource that counts GPUs, often ``ngpus``
    whole_nodes: bool = False  # PBS: cores, ranks and GPUs are not asked for
    select: str | None = None  # PBS: what else each node must have, such as ``system=polaris``
    directives: tuple[str, ...] = ()  # more of them, such as ``-l place=scatter``
    modules: tuple[str, ...] = ()  # loaded before those of ``--module``
    setup: tuple[str, ...] = ()  # lines of shell, before those of ``--setup``
    name_limit: int = LONGEST_NAME  # characters; 15 for Torque and old PBS
    walltime_limit: int | None = None  # seconds, in the file as H:MM:SS: of any job
    queues: Mapping[str, Limits] = dataclasses.field(default_factory=dict)  # see ``Limits``


def load_site(name: str | None, environ: Mapping[str, str]) -> Site:
    """Return the site called ``name``, the one in the file ``name``, the user's own, or none.

    Raises:
        UsageError: the file cannot be read, or holds something that it should not.
    """
    if name is None:
        home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")) / ".config"
        path = Path(home) / "hvdtrain" / "site.yaml"
        return read_site(path) if path.is_file() else Site()
    example = EXAMPLES / f"{name}.yaml"
    if "/" not in name and example.is_file():
        return read_site(example)
    if not Path(name).is_file():
        names = ", ".join(sorted(path.stem for path in EXAMPLES.glob("*.yaml")))
        raise UsageError(f"--site {name}: no such file, and no example of hvdtrain ({names})")
    return read_site(Path(name))


def read_site(path: Path) -> Site:
    """Read a site file.

    Raises:
        UsageError: naming the file, the line and the key.
    """
    fields = {field.name: field for field in dataclasses.fields(Site)}
    values = {}
    for setting in read_settings(path, "queue: debug"):
        key, where = setting.name, f"{path} line {setting.line}"
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(fields)}"
            raise UsageError(f"{where}: unknown key {key!r}; {hint}")
        if setting.value is None:
            continue
        try:
            values[key] = _READERS.get(key, _text)(setting.value)
        except ValueError as error:
            raise UsageError(f"{where}: {key}: {error}") from error
    return Site(**values)


def _of(kind: type, what: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"{value!r} is not {what}")
        return value

    return read


_text, _switch = _of(str, "a text"), _of(bool, "true or false")


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is not a number of 1 or more")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list, such as [one, two]")
    return tuple(_text(one) for one in value)


def _directives(value: Any) -> tuple[str, ...]:
    for line in _texts(value):
        if re.match(r"-l\s*(select|nodes|walltime)=", line):  # PBS refuses two of a kind
            raise ValueError(f"{line!r}: submit writes that line itself, with what `select` says")
    return _texts(value)


def _modules(value: Any) -> tuple[str, ...]:
    for word in _texts(value):
        if not PLAIN.fullmatch(word):  # it stands in the script as it is, as that of --module does
            raise ValueError(f"{word!r} is not one module; give each as an item of its own")
    return _texts(value)


def _scheduler(value: Any) -> str:
    if value not in SCHEDULERS:
        raise ValueError(f"{value!r}: choose one of {', '.join(SCHEDULERS)}")
    return str(value)


def _seconds(value: Any) -> int:
    # YAML 1.1 reads 1:00:00 without quotes as a number to the base of 60: 3600, the same thing.
    seconds = value if isinstance(value, int) else parse_clock(str(value))
    if seconds is None or isinstance(value, bool):
        raise ValueError(f"{value!r} is no time such as 1:00:00")
    return seconds


def _queues(value: Any) -> dict[str, Limits]:
    if not isinstance(value, dict):
        raise ValueError("it needs a line for each queue, such as `debug: {nodes: 1-2}`")
    return {str(name): _limits(str(name), entry) for name, entry in value.items()}


def _limits(queue: str, entry: Any) -> Limits:
    if not isinstance(entry, dict) or not set(entry) <= {"nodes", "walltime"}:
        raise ValueError(f"{queue}: {entry!r}: it may hold nodes and walltime")
    span = _NODES.fullmatch(str(entry.get("nodes", "1-")))
    if span is None:
        raise ValueError(f"{queue}: nodes: {entry['nodes']!r} is no range such as 1-2")
    most = span[2] if span[2] is not None else span[1]
    walltime = entry.get("walltime")
    return Limits(
        int(span[1]), int(most) if most else None, None if walltime is None else _seconds(walltime)
    )


_READERS: dict[str, Callable[[Any], Any]] = {
    "scheduler": _scheduler,
    "queue_is_qos": _switch,
    "whole_nodes": _switch,
    "cores_per_node": _number,
    "gpus_per_node": _number,
    "name_limit": _number,
    "walltime_limit": _seconds,
    "directives": _directives,
    "modules": _modules,
    "setup": _texts,
    "queues": _queues,
}  # any other key is a text


def check_limits(job: Job, site: Site) -> None:
    """Refuse what this site would.

    Raises:
        UsageError: naming the option and the limit.
    """
    cores = job.ppn * (job.threads or 1)
    if site.cores_per_node is not None and cores > site.cores_per_node:
        option = f"--ppn {job.ppn}" + (f" --threads {job.threads}" if job.threads else "")
        raise UsageError(f"{option}: a node of this site has {site.cores_per_node} cores")
    if site.gpus_per_node is not None and (job.gpus_per_node or 0) > site.gpus_per_node:
        raise UsageError(
            f"--gpus-per-node {job.gpus_per_node}: a node of this site has {site.gpus_per_node}"
        )
    limits = site.queues.get(job.queue or "", Limits())
    where = f"queue {job.queue}" if job.queue in site.queues else "this site"
    walltime = min(filter(None, (limits.walltime, site.walltime_limit)), default=job.walltime)
    if job.walltime > walltime:
        longest = show_clock(walltime)
        raise UsageError(f"--walltime: {where} takes at most {longest}; --chain makes several jobs")
    if job.nodes < limits.fewest or job.nodes > (limits.most or job.nodes):
        most = f"to {limits.most}" if limits.most else "or more"
        raise UsageError(f"--nodes {job.nodes}: {where} takes {limits.fewest} {most}")
