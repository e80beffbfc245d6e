"""Three MPIs that must be one: of mpirun, of mpi4py and of Horovod."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hvdtrain.commands.doctor.checks.loading import Loaded
from hvdtrain.commands.doctor.checks.software import PACKAGES
from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.commands.launch.mpirun import OPEN_MPI as OPEN_MPIS
from hvdtrain.commands.launch.mpirun import REMEDY, Mpi

OPEN_MPI = "Open MPI"
FAMILIES = dict.fromkeys(("mpich", "intel", "pals"), "MPICH") | dict.fromkeys(OPEN_MPIS, OPEN_MPI)
"""Who can start whose ranks: the MPIs that come from MPICH understand each other. What is not here,
such as srun, starts every kind."""


@dataclass(frozen=True)
class MpiFacts:
    """The MPIs that were found."""

    launcher: Mpi | None  # what `hvdtrain launch` would take; None where there is none
    trouble: str  # why it could not be identified
    beside_python: str  # the mpirun of this Python's environment, on the PATH or not
    mpi4py: Loaded  # what came of loading mpi4py
    horovod: Mapping[str, Loaded]  # what came of loading each library of Horovod, by framework


def family(identity: str) -> str:
    """Return the family of a library, such as ``Open MPI`` for ``Open MPI 5.0.11``."""
    if identity.startswith(OPEN_MPI):
        return OPEN_MPI
    return "" if identity.startswith("unknown") else "MPICH"


def mpi_findings(facts: MpiFacts) -> Iterator[Finding]:
    """Judge each, then whether they agree."""
    yield _launcher(facts)
    if facts.mpi4py.error:
        remedy = f"pip install 'hvdtrain[mpi]', or load the module of your MPI and {MPI4PY}"
        yield Finding("mpi4py", ERROR, f"it does not load: {facts.mpi4py.error}", remedy)
    else:
        yield Finding("mpi4py", OK, f"uses {_show(facts.mpi4py)}")
    users = {"mpi4py": facts.mpi4py}
    users |= {f"Horovod ({PACKAGES[name]})": loaded for name, loaded in facts.horovod.items()}
    yield agreement(facts, {name: one for name, one in users.items() if one.mpi})


def _show(loaded: Loaded) -> str:
    return "; ".join(f"{identity}, {path}" for path, identity in loaded.mpi) or "no MPI"


def _launcher(facts: MpiFacts) -> Finding:
    mpi = facts.launcher
    if mpi is None:
        remedy = (
            f"put {facts.beside_python} on the PATH: activate this environment"
            if facts.beside_python
            else REMEDY
        )
        evidence = facts.trouble.removesuffix(f": {REMEDY}") or "none on the PATH"
        return Finding("mpirun", ERROR, evidence, remedy)
    name = FAMILIES.get(mpi.dialect, mpi.dialect)
    return Finding("mpirun", OK, f"{name} {mpi.version}, {mpi.program}")


def agreement(facts: MpiFacts, users: Mapping[str, Loaded]) -> Finding:
    """Judge whether what would be started belongs to what would start it.

    Args:
        facts: for the launcher.
        users: who loads which MPI, by name; each loads one.
    """
    check, rebuild = "MPI agreement", "hvdtrain install-horovod --rebuild"
    if not users:
        return Finding(check, ABSENT, "nothing here uses MPI")
    libraries = {name: one.mpi[0] for name, one in users.items()}
    told = "; ".join(
        f"{', '.join(name for name, one in libraries.items() if one == library)}: "
        f"{library[1]}, {library[0]}"
        for library in dict.fromkeys(libraries.values())
    )
    mpi = facts.launcher
    starter = FAMILIES.get(mpi.dialect, "") if mpi else ""
    families = {family(identity) for _, identity in libraries.values()} - {""}
    if mpi and starter and families - {starter}:
        evidence = f"{mpi.program} starts ranks of {starter}, and each would be alone ({told})"
        remedy = f"put the mpirun of that MPI first on the PATH, or {rebuild} with this one first"
        return Finding(check, ERROR, evidence, remedy)
    if len(families) > 1:
        return Finding(check, ERROR, f"two MPIs in one process: {told}", f"{rebuild}; {MPI4PY}")
    if len({path for path, _ in libraries.values()}) > 1:
        return Finding(check, WARNING, f"two copies of one MPI: {told}", f"{rebuild}; {MPI4PY}")
    path, identity = next(iter(libraries.values()))
    version = identity.rpartition(" ")[2]
    if mpi and starter == OPEN_MPI and mpi.version not in ("", version):
        evidence = f"mpirun is {mpi.version}, the library {version} ({path}): it may work"
        remedy = f"use the mpirun that belongs to the library, or {rebuild}"
        return Finding(check, WARNING, evidence, remedy)
    return Finding(check, OK, f"mpirun, {', '.join(users)}: {identity}")


# Without pip's cache, which would give again what was built for another MPI.
MPI4PY = "pip install --no-cache-dir --force-reinstall --no-binary mpi4py mpi4py"
