"""The detected launcher, and the whole argv for each, compared with ``golden/launch.txt``.

To print the current text, to review and commit:
python -c "from tests.unit.commands.launch.test_mpirun import golden; print(golden(), end='')"
"""

from __future__ import annotations

import difflib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.launch import launcher_choice
from hvdtrain.commands.launch.argv import BUILDERS, Launch, forwarded
from hvdtrain.commands.launch.hosts import Allocation, Host, RankLayout, lay_out
from hvdtrain.commands.launch.launcher_choice import (
    AGENT,
    NAMES,
    MpiLauncher,
    agent_settings,
    classify,
    find_mpi,
)
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.gpus import VISIBLE
from tests.conftest import executable

GOLDEN = Path(__file__).parent / "golden" / "launch.txt"
WORDS = ("python", "-m", "hvdtrain.mnist", "--data", "/data/my mnist")
PROGRAMS = {
    "openmpi4": "/usr/bin/mpirun",
    "openmpi5": "/venv/bin/mpirun",
    "mpich": "/opt/mpich/bin/mpirun",
    "intel": "/opt/intel/mpi/bin/mpiexec.hydra",
    "pals": "/opt/cray/pe/pals/1.2.12/bin/mpiexec",
    "srun": "/usr/bin/srun",
}
ENVIRON = {
    "HOME": "/home/me",
    "HVDTRAIN_CACHE": "/scratch/cache",
    "NCCL_DEBUG": "INFO",
    "PATH": "/venv/bin:/usr/bin",
    "SECRET_TOKEN": "is not handed on",
}
GPUS = {**ENVIRON, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
TWO = Allocation("PBS", (Host("node1", 2), Host("node2", 2)))
FOUR_EACH = Allocation("PBS", (Host("node1", 4), Host("node2", 4)))
HERE, FULL = lay_out(2, Allocation("none")), lay_out(4, TWO)
CASES: dict[str, Mapping[str, Any]] = {
    "this machine, 2 ranks on 8 cores": {"layout": HERE, "environ": {}},
    "oversubscribed: 6 ranks on 4 cores, as root": {
        "layout": lay_out(6, Allocation("none")),
        "cores": 4,
        "root": True,
        "environ": {},
    },
    "1 host of the allocation, tagged": {"layout": lay_out(2, TWO), "tag": True},
    "2 hosts, 3 threads per rank": {"layout": FULL, "threads": 3},
    "2 hosts, oversubscribed by --ppn 4": {"layout": lay_out(8, TWO, ppn=4)},
    "2 hosts, by an agent that is deaf to TERM": {
        "layout": FULL,
        "agent": {"AGENT": "/venv/deaf_to_term ssh -x"},
    },
    "2 hosts with 4 GPUs each": {
        "layout": lay_out(8, FOUR_EACH),
        "cores": 64,
        "gpus": 4,
        "environ": GPUS,
    },
    "2 hosts, the second one not full": {"layout": lay_out(3, TWO)},
    "1 rank with room for 4 on its host": {
        "layout": lay_out(1, TWO),
        "ranks_per_host": 4,
        "cpus": 16,
    },
}


def job(dialect: str, layout: RankLayout = FULL, **settings: Any) -> Launch:
    """Return a job on hosts with 8 cores."""
    mpi = MpiLauncher(dialect, PROGRAMS[dialect], "1.0")
    return Launch(mpi, WORDS, layout, **{"cores": 8, **settings})


def golden() -> str:
    """Every launcher with every case, one command a block."""
    blocks = [
        f"# {dialect}: {case}\n{job(dialect, **{'environ': ENVIRON, **settings}).command.show()}\n"
        for dialect in BUILDERS
        for case, settings in CASES.items()
    ]
    return "\n".join(blocks)


def test_every_command_is_the_golden_one() -> None:
    expected, text = GOLDEN.read_text(), golden()
    changes = difflib.unified_diff(expected.splitlines(), text.splitlines(), "golden", "current")
    assert expected == text, "\n".join(changes)
    assert set(NAMES) == set(BUILDERS) == set(PROGRAMS)


@pytest.mark.parametrize(
    ("dialect", "word", "environ"),
    [
        ("openmpi5", "mpi_yield_when_idle", {"OMPI_MCA_mpi_yield_when_idle": "0"}),
        ("intel", "I_MPI_PIN_DOMAIN", {"I_MPI_PIN_DOMAIN": "socket"}),
        ("srun", "--mpi=pmix", {"SLURM_MPI_TYPE": "pmi2"}),
        ("srun", "--mpi=pmix", {"CRAY_MPICH_VERSION": "8.1.28"}),
    ],
)
def test_settings_of_the_user_and_the_site_are_kept(
    dialect: str, word: str, environ: dict[str, str]
) -> None:
    assert word in job(dialect).command.argv
    assert word not in job(dialect, environ=environ).command.argv


def test_the_environment_of_the_ranks() -> None:
    assert job("openmpi5").command.env == {}
    threads = job("openmpi5", threads=2).command
    assert threads.env == {"OMP_NUM_THREADS": "2"}
    assert threads.argv[threads.argv.index("OMP_NUM_THREADS") - 1] == "-x"
    assert "OMP_NUM_THREADS" not in job("openmpi5").command.argv
    placement = {"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "1"}
    assert job("intel").command.env["I_MPI_JOB_RESPECT_PROCESS_PLACEMENT"] == "0"
    assert placement.keys().isdisjoint(job("intel", environ=placement).command.env)
    for dialect in ("openmpi5", "mpich", "srun"):  # else Slurm hides it from the ranks
        bare = job(dialect, environ={"SLURM_EXPORT_ENV": "NONE"})
        assert bare.command.env == {"SLURM_EXPORT_ENV": "ALL"}


@pytest.mark.parametrize("dialect", ["openmpi5", "mpich", "srun"])  # all use srun on other hosts
def test_a_step_started_from_a_step_shares_its_cores(dialect: str) -> None:
    assert job(dialect, environ={"SLURM_STEP_ID": "0"}).command.env == {"SLURM_OVERLAP": "1"}
    assert job(dialect, environ={"SLURM_JOB_ID": "7"}).command.env == {}


def test_more_threads_than_cores_per_rank_are_not_bound() -> None:
    assert job("openmpi5", HERE, threads=4).width == 4
    assert job("openmpi5", HERE, threads=5).width == 0
    assert not job("openmpi5", HERE, threads=5).oversubscribed


@pytest.mark.parametrize(
    ("ranks", "packages", "mapping"),
    [
        (1, 1, "slot:PE=20"),
        (1, 2, "slot"),  # binding to more than one package would be refused
        (2, 2, "slot:PE=10"),
        (3, 2, "slot"),
        (6, 2, "slot:PE=3"),  # not 20 // 6 cores: the fourth rank would span both packages
        (20, 2, "slot:PE=1"),
        (2, 0, "slot"),
    ],
)
def test_open_mpi_binds_within_packages(ranks: int, packages: int, mapping: str) -> None:
    layout = lay_out(ranks, Allocation("none"))
    argv = job("openmpi5", layout, cores=20, packages=packages).command.argv
    assert argv[argv.index("--map-by") + 1] == mapping
    assert argv[argv.index("--bind-to") + 1] == ("core" if ":" in mapping else "none")


@pytest.mark.parametrize("dialect", ["openmpi4", "openmpi5", "mpich", "pals", "srun"])
@pytest.mark.parametrize(
    ("packages", "ranks_per_host", "width"), [(1, 4, 2), (1, 3, 2), (2, 4, 2), (1, 64, 1)]
)
def test_fewer_ranks_get_the_cores_of_a_full_host(
    dialect: str, packages: int, ranks_per_host: int, width: int
) -> None:
    for ranks in range(1, min(ranks_per_host, 8) + 1):
        layout = lay_out(ranks, Allocation("none"))
        shared = {"packages": packages, "ranks_per_host": ranks_per_host}
        argv = job(dialect, layout, **shared).command.argv
        options = (f"slot:PE={width}", f"core:{width}", f"--cpus-per-task={width}")
        shown = [word for word in argv if word in options] or [argv[argv.index("--depth") + 1]]
        assert shown in ([options[0]], [options[1]], [options[2]], [f"{width}"])


@pytest.mark.parametrize("name", VISIBLE)
def test_a_gpu_uuid_is_not_exported(name: str) -> None:
    assert forwarded({name: "0,1", "HOME": "/"}) == [name]
    assert forwarded({name: ""}) == [name]
    assert forwarded({name: "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"}) == []
    assert forwarded({name: "0,GPU-4b2c1a9f7d5e6c3b"}) == []


def test_settings_of_the_libraries_are_exported() -> None:
    names = ["CCL_ATL_TRANSPORT", "CUBLAS_WORKSPACE_CONFIG", "HSA_OVERRIDE_GFX_VERSION"]
    names += ["MIOPEN_FIND_MODE", "ONEAPI_DEVICE_SELECTOR", "OPENBLAS_NUM_THREADS"]
    assert forwarded(dict.fromkeys(names, "1")) == names


@pytest.mark.parametrize("dialect", ["intel", "pals", "srun"])
@pytest.mark.parametrize("slots", [(2, 4), (4, 2, 4), (4, 2, 2)])
def test_launchers_without_uneven_placement_report_it(dialect: str, slots: tuple[int, ...]) -> None:
    hosts = tuple(Host(f"n{i}", number) for i, number in enumerate(slots))
    layout = RankLayout(sum(slots), hosts)
    with pytest.raises(UsageError, match="starts the same number of ranks on each host, not"):
        assert job(dialect, layout).command
    assert job("openmpi5", layout).command


# The detected launcher

VERSIONS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/\n": "openmpi5 5.0.11",
    "mpiexec (Open MPI) 6.0.0rc1\n": "openmpi5 6.0.0rc1",
    "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/\n": "openmpi4 4.1.4",
    "mpiexec (OpenRTE) 4.1.4\n": "openmpi4 4.1.4",
    "mpirun (Open MPI) 3.1.6\n": "openmpi4 3.1.6",
    "mpirun (IBM Spectrum MPI) 10.4.0.03\n": "openmpi4 10.4.0.03",
    "HYDRA build details:\n    Version:                                 5.0.2\n": "mpich 5.0.2",
    "Intel(R) MPI Library for Linux* OS, Version 2021.4 Build 20210831 (id: 758)": "intel 2021.4",
    "mpiexec version 1.8.0 revision 7c5f8a\n": "pals 1.8.0",
    "slurm 22.05.8\n": "srun 22.05.8",
    "slurm-wlm 23.11.4\n": "srun 23.11.4",
}


@pytest.mark.parametrize("output", [*VERSIONS, "", "Unknown option: version\nUsage:\n    mpiexec"])
def test_versions(output: str) -> None:
    version = VERSIONS.get(output)
    assert classify(output) == (tuple(version.split()) if version else None)


def program(folder: Path, name: str, output: str) -> str:
    """Write a program that prints ``output``, and return its path."""
    folder.mkdir(exist_ok=True)
    (folder / "output").write_text(output)
    return str(executable(folder / name, '#!/bin/sh\nexec /bin/cat "${0%/*}/output"\n'))


OPEN_MPI, HYDRA, INTEL, SLURM = (
    next(output for output, version in VERSIONS.items() if version.startswith(kind))
    for kind in ("openmpi5", "mpich", "intel", "srun")
)
IN_JOB = {"SLURM_JOB_ID": "7"}


def test_the_first_launcher_on_the_path_counts(tmp_path: Path) -> None:
    first = program(tmp_path / "a", "mpirun", HYDRA)
    program(tmp_path / "b", "mpirun", OPEN_MPI)
    path = f"{tmp_path}/a:{tmp_path}/b"
    assert find_mpi({"PATH": path}) == MpiLauncher("mpich", first, "5.0.2")
    only = program(tmp_path / "c", "mpiexec", "mpiexec version 1.2.12 revision 1\n")
    assert find_mpi({"PATH": f"{tmp_path}/c"}) == MpiLauncher("pals", only, "1.2.12")


def test_srun_counts_in_a_slurm_job_without_mpirun(tmp_path: Path) -> None:
    srun = program(tmp_path / "a", "srun", SLURM)
    # Debian's Slurm brings an mpirun that only calls srun.
    program(tmp_path / "b", "mpirun", "Unknown option: version\n")
    path = f"{tmp_path}/a:{tmp_path}/b"
    assert find_mpi({"PATH": path, **IN_JOB}) == MpiLauncher("srun", srun, "22.05.8")
    with pytest.raises(UsageError, match=r"no mpirun.* \(.*/b/mpirun: unknown version"):
        find_mpi({"PATH": path})
    real = program(tmp_path / "c", "mpirun", OPEN_MPI)
    assert find_mpi({"PATH": f"{tmp_path}/a:{tmp_path}/c", **IN_JOB}).program == real
    with pytest.raises(UsageError, match=r"no mpirun, mpiexec or srun .*'hvdtrain\[mpi\]'"):
        find_mpi({"PATH": str(tmp_path)})


@pytest.mark.parametrize("text", ["echo Sorry.; echo no opal", "echo no opal; echo '    [-man]'"])
def test_a_launcher_that_fails_is_quoted(text: str, tmp_path: Path) -> None:
    program = executable(tmp_path / "mpirun", f"#!/bin/sh\n{text}\nexit 1\n")
    with pytest.raises(UsageError) as error:
        find_mpi({"PATH": str(tmp_path)})
    assert f"({program}: --version ended with code 1: no opal)" in str(error.value)


def test_intels_script_is_skipped(tmp_path: Path) -> None:
    script = program(tmp_path, "mpirun", INTEL)
    assert find_mpi({"PATH": str(tmp_path)}).program == script
    hydra = program(tmp_path, "mpiexec.hydra", INTEL)
    assert find_mpi({"PATH": str(tmp_path)}) == MpiLauncher("intel", hydra, "2021.4")


# The ssh by which Open MPI starts its daemons on other hosts


@pytest.fixture
def site(tmp_path: Path) -> tuple[MpiLauncher, dict[str, str]]:
    """Return an Open MPI in a temporary directory, and an environment without settings."""
    (tmp_path / "mpi" / "etc").mkdir(parents=True)
    launcher = program(tmp_path / "mpi" / "bin", "mpirun", OPEN_MPI)
    ssh = program(tmp_path / "bin", "ssh", "")
    home = tmp_path / "home"
    return MpiLauncher("openmpi5", launcher, "5"), {
        "PATH": str(Path(ssh).parent),
        "HOME": str(home),
    }


WRAPPER = Path(launcher_choice.__file__).with_name("deaf_to_term")


def test_ssh_is_wrapped_to_ignore_term(site: tuple[MpiLauncher, dict[str, str]]) -> None:
    mpi, environ = site
    for dialect, name in AGENT.items():
        ours = {name: f"{WRAPPER} ssh -x"}
        assert agent_settings(MpiLauncher(dialect, mpi.program, ""), environ) == ours
    assert agent_settings(MpiLauncher("mpich", mpi.program, ""), environ) == {}
    assert agent_settings(mpi, {**environ, "PATH": "/nowhere"}) == {}  # Open MPI reports it


@pytest.mark.parametrize(
    ("value", "agent"),
    [
        ("ssh -q", "ssh -q -x"),
        ("/opt/nowhere/tmssh : tmssh --verbose", "tmssh --verbose"),
        ("rsh", ""),  # it is not there
        ("", ""),
    ],
)
@pytest.mark.parametrize("name", ["PRTE_MCA_plm_ssh_agent", "OMPI_MCA_orte_rsh_agent"])
def test_an_agent_in_the_environment(
    name: str, value: str, agent: str, tmp_path: Path, site: tuple[MpiLauncher, dict[str, str]]
) -> None:
    mpi, environ = site
    program(tmp_path / "bin", "tmssh", "")
    expected = {name: f"{WRAPPER} {agent}"} if agent else {}
    assert agent_settings(mpi, {**environ, name: value}) == expected
    assert agent_settings(mpi, {**environ, name: value, "PE_HOSTFILE": "/spool/hosts"}) == {}


@pytest.mark.parametrize(
    "file",
    [
        "mpi/etc/openmpi-mca-params.conf",
        "mpi/etc/prte-mca-params.conf",
        "home/.openmpi/mca-params.conf",
        "home/.prte/mca-params.conf",
    ],
)
def test_an_agent_in_a_file(
    file: str, tmp_path: Path, site: tuple[MpiLauncher, dict[str, str]]
) -> None:
    mpi, environ = site
    settings, name = tmp_path / file, AGENT[mpi.dialect]
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("# plm_ssh_agent = none\nbtl = ^openib\n")
    assert agent_settings(mpi, environ) == {name: f"{WRAPPER} ssh -x"}
    tmssh = program(tmp_path / "opt", "tmssh", "")
    settings.write_text(f"btl = ^openib\n plm_rsh_agent = {tmssh} -v \nx = y\n")
    assert agent_settings(mpi, environ) == {name: f"{WRAPPER} {tmssh} -v"}


def test_ssh_outlives_term_and_no_kill(tmp_path: Path) -> None:
    executable(tmp_path / "ssh", '#!/bin/sh\necho "$@"\nread line\necho "$line"\nread line\n')
    with subprocess.Popen(
        [str(WRAPPER), "ssh", "-x", "node 2"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "-x node 2\n"
        assert os.getsid(process.pid) == os.getsid(0)
        process.terminate()
        process.stdin.write("goes on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "goes on\n"
        process.kill()
        assert process.wait() == -signal.SIGKILL
