"""Site files: the shipped examples, and errors in a user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.commands.submit.job import Job
from hvdtrain.commands.submit.site import EXAMPLES, Limits, Site, check_limits, load_site, read_site
from hvdtrain.errors import UsageError
from tests.unit.commands.submit.pbs_reader import job_with


def test_the_examples() -> None:
    names = set(EXAMPLES)
    assert names == {"aurora", "pbs", "perlmutter", "polaris"}
    for name in names:
        assert load_site(name, {}).scheduler in ("pbs", "slurm")


def test_polaris() -> None:
    assert load_site("polaris", {}) == Site(
        scheduler="pbs",
        queue="debug",
        account_required=True,
        filesystems="home:eagle",
        cores_per_node=32,
        gpus_per_node=4,
        whole_nodes=True,
        select="system=polaris",
        setup=("module use /soft/modulefiles", "module load conda", "conda activate base"),
        queues={
            "debug": Limits(1, 2, 3600),
            "debug-scaling": Limits(1, 10, 3600),
            "prod": Limits(10, 496, 86400),
            "preemptable": Limits(1, 10, 259200),
            "capacity": Limits(1, 4, 604800),
        },
    )


def test_the_location_of_a_site_file(tmp_path: Path) -> None:
    file = tmp_path / ".config" / "hvdtrain" / "site.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("queue: mine\n")
    assert load_site(None, {"HOME": str(tmp_path)}).queue == "mine"
    assert load_site(None, {"HOME": str(tmp_path / "other")}) == Site()
    assert load_site(None, {"XDG_CONFIG_HOME": str(file.parent.parent)}).queue == "mine"
    assert load_site(str(file), {}).queue == "mine"
    with pytest.raises(UsageError, match=r"--site polari: no such file.*aurora, pbs, perlmutter"):
        load_site("polari", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quue: x", "unknown key 'quue'; did you mean queue?"),
        ("zzz: x", "unknown key 'zzz'; valid keys: scheduler, queue"),
        ("cores_per_node: many", "cores_per_node: 'many': Expected `int | null`, got `str`"),
        ("name_limit: 0", "name_limit: '0': Expected `int` >= 1"),
        ("modules: one", "modules: 'one' is not a list, such as [one, two]"),
        ("modules: [gcc openmpi]", "modules: 'gcc openmpi' is not one module"),
        ("modules: ['gcc; date']", "modules: 'gcc; date' is not one module"),
        ("modules: [-f]", "modules: '-f' is not one module"),
        ("directives: ['-l select=2']", "directives: '-l select=2': written by submit"),
        ("scheduler: lsf", "scheduler: 'lsf': must be one of pbs, slurm, none"),
        ("walltime_limit: soon", "walltime_limit: 'soon' is not a time such as 1:00:00"),
        ("queues: [a]", "queues: must have a line per queue"),
        ("queues: {a: {cores: 3}}", "queues: a: {'cores': '3'}: valid keys: nodes, walltime"),
        ("queues: {a: {nodes: few}}", "queues: a: nodes: 'few' is not a range such as 1-2"),
        ("- a list", "lines such as `queue: debug`"),
    ],
)
def test_errors_in_a_site_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_site(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_times_with_and_without_quotes_and_empty_values(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("walltime_limit: 1:00:00\nqueue:\nqueues: {a: {walltime: '2-00:00:00'}}\n")
    assert read_site(path) == Site(walltime_limit=3600, queues={"a": Limits(1, None, 172800)})


LIMITED = Site(
    cores_per_node=8,
    gpus_per_node=4,
    walltime_limit=7200,
    queues={"debug": Limits(2, 4, 3600), "long": Limits(1, None, None)},
)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (job_with("x", ppn=9), "--ppn 9: a node of this site has 8 cores"),
        (job_with("x", ppn=4, threads=3), "--ppn 4 --threads 3: a node of this site has 8"),
        (job_with("x", gpus_per_node=5), "--gpus-per-node 5: a node of this site has 4"),
        (job_with("x", walltime=7201), "--walltime: the limit of this site is 02:00:00; --chain"),
        (job_with("x", walltime=7201, queue="long"), "queue long is 02:00:00"),
        (job_with("x", walltime=3601, nodes=2, queue="debug"), "queue debug is 01:00:00"),
        (job_with("x", nodes=1, queue="debug"), "--nodes 1: queue debug accepts 2 to 4"),
        (job_with("x", nodes=5, queue="debug"), "--nodes 5: queue debug accepts 2 to 4"),
    ],
)
def test_a_job_beyond_the_limits_of_a_site_is_refused(job: Job, message: str) -> None:
    with pytest.raises(UsageError) as error:
        check_limits(job, LIMITED)
    assert message in str(error.value)


def test_a_job_within_the_limits_of_a_site_is_accepted() -> None:
    check_limits(job_with("x", walltime=7200, nodes=99, ppn=8, queue="long"), LIMITED)
    check_limits(job_with("x", walltime=3600, nodes=4, ppn=2, threads=4, queue="debug"), LIMITED)
    check_limits(job_with("x", walltime=10**9, nodes=10**6, ppn=999, gpus_per_node=999), Site())
