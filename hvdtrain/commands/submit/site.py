"""The site file: defaults and rules of a cluster in YAML, read by ``submit``.

``--site NAME`` selects an example in ``sites/``, ``--site FILE.yaml`` another file; the default is
``~/.config/hvdtrain/site.yaml``, if it exists. Options of the command line override it.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec

from hvdtrain.commands.submit.job import (
    MAX_NAME,
    SCHEDULERS,
    Job,
    directive_line,
    module_name,
    plain_word,
    setup_line,
)
from hvdtrain.errors import UsageError
from hvdtrain.system.files import is_file
from hvdtrain.system.runtime.walltime import parse_clock, show_clock
from hvdtrain.system.settings import read_settings

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parent / "sites").glob("*.yaml"))}
Number = Annotated[int, msgspec.Meta(ge=1)]

_NODES = re.compile(r"(\d+)(?:-(\d*))?")


@dataclass(frozen=True)
class Limits:
    """The limits of a queue; in the file ``debug: {nodes: 1-2, walltime: "1:00:00"}``."""

    fewest: int = 1  # nodes
    most: int | None = None  # nodes; None: no limit
    walltime: int | None = None  # seconds; None: no limit


@dataclass(frozen=True)
class Site:
    """Defaults and rules of a cluster; the fields are the keys of its file."""

    scheduler: str | None = None  # ``pbs``, ``slurm`` or ``none``; None: detected
    queue: str | None = None  # default of ``--queue``
    queue_is_qos: bool = False  # Slurm: a queue is a quality of service, not a partition
    account: str | None = None  # default of ``--account``
    account_required: bool = False  # whether jobs without one are refused
    filesystems: str | None = None  # default of ``--filesystems``
    cores_per_node: Number | None = None  # maximum number of cores
    gpus_per_node: Number | None = None  # maximum number of GPUs, and default of ``--ppn``
    gpu_resource: str | None = None  # PBS: the resource that counts GPUs, often ``ngpus``
    whole_nodes: bool = False  # PBS: cores, ranks and GPUs are not requested
    select: str | None = None  # PBS: other resources of each node, e.g. ``system=polaris``
    directives: tuple[str, ...] = ()  # more directives, e.g. ``-l place=scatter``
    modules: tuple[str, ...] = ()  # loaded first
    setup: tuple[str, ...] = ()  # lines of shell after them, before ``--module`` and ``--setup``
    name_limit: Number = MAX_NAME  # characters; 15 for Torque and old PBS
    walltime_limit: int | None = None  # seconds, in the file H:MM:SS; of any job
    queues: Mapping[str, Limits] = dataclasses.field(default_factory=dict)  # see ``Limits``


def load_site(name: str | None, environ: Mapping[str, str]) -> Site:
    """Return the example or file ``name``; None: the user's file, or an empty site.

    Raises:
        UsageError: the file cannot be read, or is invalid.
    """
    if name is None:
        home = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")) / ".config"
        path = Path(home) / "hvdtrain" / "site.yaml"
        return read_site(path) if is_file(path, str(path)) else Site()
    if name in EXAMPLES:
        return read_site(EXAMPLES[name])
    if not is_file(Path(name), f"--site {name}"):
        names = ", ".join(EXAMPLES)
        raise UsageError(f"--site {name}: no such file or example (examples: {names})")
    return read_site(Path(name))


def read_site(path: Path) -> Site:
    """Return the site of a file.

    Raises:
        UsageError: the file is invalid; the message contains the file, line and key.
    """
    kinds = get_type_hints(Site, include_extras=True)
    values = {}
    for setting in read_settings(path, "queue: debug"):
        key, location = setting.name, f"{path} line {setting.line}"
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, 1)
            hint = f"did you mean {near[0]}?" if near else f"valid keys: {', '.join(kinds)}"
            raise UsageError(f"{location}: unknown key {key!r}; {hint}")
        if setting.value is None:
            continue
        try:
            read = _READERS.get(key)
            values[key] = read(setting.value) if read else _convert(setting.value, kinds[key])
        except ValueError as error:
            raise UsageError(f"{location}: {key}: {error}") from error
    return Site(**values)


def _convert(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, strict=False)  # numbers are text in the file
    except msgspec.ValidationError as error:
        raise ValueError(f"{value!r}: {error}") from None


def _word(value: Any) -> str:
    return plain_word(_convert(value, str))


def _each(read: Callable[[str], str], value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list, such as [one, two]")
    return tuple(map(read, _convert(value, tuple[str, ...])))


def _scheduler(value: Any) -> str:
    if value not in SCHEDULERS:
        raise ValueError(f"{value!r}: must be one of {', '.join(SCHEDULERS)}")
    return str(value)


def _seconds(value: Any) -> int:
    seconds = parse_clock(str(value))
    if seconds is None:
        raise ValueError(f"{value!r} is not a time such as 1:00:00")
    return seconds


def _queues(value: Any) -> dict[str, Limits]:
    if not isinstance(value, dict):
        raise ValueError("must have a line per queue, e.g. `debug: {nodes: 1-2}`")
    return {str(name): _limits(str(name), entry) for name, entry in value.items()}


def _limits(queue: str, entry: Any) -> Limits:
    if not isinstance(entry, dict) or not set(entry) <= {"nodes", "walltime"}:
        raise ValueError(f"{queue}: {entry!r}: valid keys: nodes, walltime")
    span = _NODES.fullmatch(str(entry.get("nodes", "1-")))
    if span is None:
        raise ValueError(f"{queue}: nodes: {entry['nodes']!r} is not a range such as 1-2")
    most = span[2] if span[2] is not None else span[1]
    walltime = entry.get("walltime")
    return Limits(
        int(span[1]), int(most) if most else None, None if walltime is None else _seconds(walltime)
    )


_READERS: dict[str, Callable[[Any], Any]] = {
    "scheduler": _scheduler,
    "queue": _word,
    "account": _word,
    "filesystems": _word,
    "walltime_limit": _seconds,
    "directives": partial(_each, directive_line),
    "modules": partial(_each, module_name),
    "setup": partial(_each, setup_line),
    "queues": _queues,
}  # any other value has the type of its field


def check_limits(job: Job, site: Site) -> None:
    """Raise ``UsageError`` if an option of the job exceeds a limit of the site."""
    if site.cores_per_node is not None and job.cores_per_node > site.cores_per_node:
        option = f"--ppn {job.ppn}" + (f" --threads {job.threads}" if job.threads else "")
        raise UsageError(f"{option}: a node of this site has {site.cores_per_node} cores")
    if site.gpus_per_node is not None and (job.gpus_per_node or 0) > site.gpus_per_node:
        raise UsageError(
            f"--gpus-per-node {job.gpus_per_node}: a node of this site has {site.gpus_per_node}"
        )
    limits = site.queues.get(job.queue or "", Limits())
    scope = f"queue {job.queue}" if job.queue in site.queues else "this site"
    walltime = min(filter(None, (limits.walltime, site.walltime_limit)), default=job.seconds)
    if job.seconds > walltime:
        longest = show_clock(walltime)
        raise UsageError(
            f"--walltime: the limit of {scope} is {longest}; --chain submits several jobs"
        )
    if job.nodes < limits.fewest or job.nodes > (limits.most or job.nodes):
        most = f"to {limits.most}" if limits.most else "or more"
        raise UsageError(f"--nodes {job.nodes}: {scope} accepts {limits.fewest} {most}")
    if site.account_required and not job.account:
        raise UsageError("--account: this site requires one, e.g. --account my-project")
