"""Agreement of three MPIs: of mpirun, of mpi4py and of Horovod."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.commands.doctor.checks.loading import Loaded
from hvdtrain.commands.doctor.checks.software import REBUILD
from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.commands.install_horovod.plan import NAMES
from hvdtrain.commands.launch.launcher_choice import OPEN_MPI as OPEN_MPIS
from hvdtrain.commands.launch.launcher_choice import REMEDY, MpiLauncher, find_mpi
from hvdtrain.errors import UsageError

OPEN_MPI = "Open MPI"
# Family by dialect: a launcher starts ranks of its family; one that is absent here, e.g. srun,
# starts ranks of any.
FAMILIES = dict.fromkeys(("mpich", "intel", "pals"), "MPICH") | dict.fromkeys(OPEN_MPIS, OPEN_MPI)
# Without pip's cache, which may have a build for another MPI.
MPI4PY = "pip install --no-cache-dir --force-reinstall --no-binary mpi4py mpi4py"


@dataclass(frozen=True)
class MpiFacts:
    """The MPIs of this environment."""

    launcher: MpiLauncher | None  # of `hvdtrain launch`; None if there is none
    error: str  # on identifying it
    environment_mpirun: str  # the mpirun of this Python's environment, on the PATH or not
    mpi4py: Loaded  # result of loading mpi4py
    horovod: Mapping[str, Loaded]  # result of loading each library of Horovod, by framework


def find_mpis(
    environ: Mapping[str, str], mpi4py: Loaded, horovod: Mapping[str, Loaded]
) -> MpiFacts:
    """Return the MPIs: the launcher's, and those loaded with mpi4py and Horovod."""
    mpirun = Path(sys.executable).with_name("mpirun")
    launcher, problem = None, ""
    try:
        launcher = find_mpi(environ)
    except UsageError as error:
        problem = str(error)
    return MpiFacts(launcher, problem, str(mpirun) if mpirun.is_file() else "", mpi4py, horovod)


def mpi_findings(facts: MpiFacts) -> Iterator[Finding]:
    """Judge each MPI, then their agreement."""
    yield _launcher(facts)
    if facts.mpi4py.error:
        remedy = f"pip install 'hvdtrain[mpi]', or load the module of your MPI and {MPI4PY}"
        yield Finding("mpi4py", ERROR, f"it does not load: {facts.mpi4py.error}", remedy)
    else:
        libraries = "; ".join(f"{identity}, {path}" for path, identity in facts.mpi4py.mpi)
        yield Finding("mpi4py", OK, f"uses {libraries or 'no MPI'}")
    users = {"mpi4py": facts.mpi4py}
    users |= {f"Horovod ({NAMES[name]})": loaded for name, loaded in facts.horovod.items()}
    yield agreement(facts, {name: loaded for name, loaded in users.items() if loaded.mpi})


def _launcher(facts: MpiFacts) -> Finding:
    mpi = facts.launcher
    if mpi is None:
        remedy = (
            f"put {facts.environment_mpirun} on the PATH: activate this environment"
            if facts.environment_mpirun
            else REMEDY
        )
        evidence = facts.error.removesuffix(f": {REMEDY}") or "none on the PATH"
        return Finding("mpirun", ERROR, evidence, remedy)
    name = FAMILIES.get(mpi.dialect, mpi.dialect)
    return Finding("mpirun", OK, f"{name} {mpi.version}, {mpi.program}")


def agreement(facts: MpiFacts, users: Mapping[str, Loaded]) -> Finding:
    """Judge whether the MPIs that ``users`` have loaded, by their names, are the launcher's."""
    check = "MPI agreement"
    if not users:
        return Finding(check, ABSENT, "no library uses MPI")
    libraries = {name: loaded.mpi[0] for name, loaded in users.items()}
    summary = "; ".join(
        f"{', '.join(name for name in libraries if libraries[name] == library)}: "
        f"{library[1]}, {library[0]}"
        for library in dict.fromkeys(libraries.values())
    )
    mpi = facts.launcher
    starter = FAMILIES.get(mpi.dialect, "") if mpi else ""
    families = {
        OPEN_MPI if identity.startswith(OPEN_MPI) else "MPICH"
        for _, identity in libraries.values()
        if not identity.startswith("unknown")
    }
    if mpi and starter and families - {starter}:
        evidence = f"{mpi.program} starts ranks of {starter}, each in a world of 1 ({summary})"
        remedy = f"put the mpirun of that MPI first on the PATH, or {REBUILD} with this one first"
        return Finding(check, ERROR, evidence, remedy)
    if len(families) > 1:
        return Finding(check, ERROR, f"two MPIs in one process: {summary}", f"{REBUILD}; {MPI4PY}")
    if len({path for path, _ in libraries.values()}) > 1:
        return Finding(check, WARNING, f"two copies of one MPI: {summary}", f"{REBUILD}; {MPI4PY}")
    path, identity = next(iter(libraries.values()))
    version = identity.rpartition(" ")[2]
    if mpi and starter == OPEN_MPI and mpi.version not in ("", version):
        evidence = f"mpirun is {mpi.version}, the library {version} ({path}): may work"
        remedy = f"use the mpirun that belongs to the library, or {REBUILD}"
        return Finding(check, WARNING, evidence, remedy)
    names = ", ".join(["mpirun"] * bool(starter) + [*users])
    if mpi is None:
        return Finding(check, ABSENT, f"no mpirun to compare with; {names}: {identity}")
    return Finding(check, OK, f"{names}: {identity}")
