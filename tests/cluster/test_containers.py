"""The commands of containers/, run between hosts with the names of the pods."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import hosts
from tests.cluster.hosts import TwoHosts
from tests.conftest import Outcome, ended, on_demand
from tests.containers.manifests import job, manifests, services, variables

TRAINED = "images in 60 steps"
START = 120.0  # seconds for a training to end on a busy machine


@contextmanager
def pods(folder: Path, names: Sequence[str]) -> Iterator[TwoHosts]:
    """Hosts with these names, taken down at the end."""
    if reason := hosts.lacks():
        pytest.skip(reason)
    two = TwoHosts(folder, names)
    try:
        two.start()
        yield two
    finally:
        two.stop()


def assert_trained(outcome: Outcome, ranks: int) -> None:
    """The training took its steps, on all ranks together."""
    assert outcome.code == 0, outcome.out + outcome.err
    assert TRAINED in outcome.out, outcome.out
    assert re.search(rf"\b{ranks} ranks\b", outcome.out + outcome.err), outcome.out + outcome.err


def test_the_launcher_of_the_mpi_job(tmp_path: Path) -> None:
    """With the hostfile and the variables of the operator (its newConfigMap and ompiEnvVars)."""
    (manifest,) = manifests("mpijob.yaml")
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    slots, launcher = spec["slotsPerWorker"], spec["mpiReplicaSpecs"]["Launcher"]
    workers = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    names = [f"{name}-worker-{number}.{name}.default.svc" for number in range(workers)]
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{host} slots={slots}\n" for host in names))
    (container,) = launcher["template"]["spec"]["containers"]
    words = [str(hostfile) if word == "/etc/mpi/hostfile" else word for word in job(container)]
    operator = {
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": str(hostfile),
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": str(slots),
    }
    with pods(tmp_path, [*names, f"{name}-launcher"]) as three:
        outcome = three.run(three.on(3, *words), **variables(container), **operator)
    assert_trained(outcome, workers * slots)


@on_demand  # two agents train in test_two_hosts, too
def test_the_agents_of_the_torchrun_job(tmp_path: Path) -> None:
    service, manifest = manifests("torchrun-job.yaml")
    spec = manifest["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    name, domain = manifest["metadata"]["name"], service["metadata"]["name"]
    names = [f"{name}-{number}.{domain}" for number in range(spec["completions"])]
    with pods(tmp_path, names) as two:
        # Kubernetes sets this variable.
        index = {number: {"JOB_COMPLETION_INDEX": str(number)} for number in range(len(names))}
        first, second = (
            two.on(1 + number, *job(container, index[number])) for number in range(len(names))
        )
        with two.running(second) as process:
            outcome = two.run(first)
            ended(process, 0, seconds=START)
    assert_trained(outcome, 4)


@on_demand  # launch reaches the hosts as in the MPI job
def test_the_hosts_of_compose(tmp_path: Path) -> None:
    containers = services()
    names = [containers[name]["hostname"] for name in ("host1", "host2")]
    with pods(tmp_path, names) as two:
        outcome = two.run(two.on(1, *containers["host1"]["command"]))
    assert_trained(outcome, 4)
