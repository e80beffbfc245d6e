"""Manifests, compose file and ssh settings agree with one another and with the image."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.containers.manifests import FOLDER, manifests, services, stages

HOME = "/home/hvdtrain"
(MPIJOB,) = manifests("mpijob.yaml")
SERVICE, JOB = manifests("torchrun-job.yaml")
REPLICAS = MPIJOB["spec"]["mpiReplicaSpecs"]
PODS = {
    **{name: one["template"]["spec"] for name, one in REPLICAS.items()},
    "torchrun": JOB["spec"]["template"]["spec"],
}


def container(pod: dict[str, Any]) -> dict[str, Any]:
    """The one container of a pod."""
    (found,) = pod["containers"]
    return dict(found)


@pytest.mark.parametrize("name", PODS)
def test_a_pod_runs_the_image_as_its_user(name: str) -> None:
    pod, security = PODS[name], PODS[name]["securityContext"]
    assert container(pod)["image"] == "hvdtrain:cpu"
    assert security["runAsNonRoot"] is True
    (user,) = stages()["cpu"].of("USER")
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == user.text


@pytest.mark.parametrize("name", ["Worker", "torchrun"])
def test_where_ranks_run_there_is_shared_memory(name: str) -> None:
    (volume,) = PODS[name]["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory"
    (mounted,) = container(PODS[name])["volumeMounts"]
    assert mounted == {"name": volume["name"], "mountPath": "/dev/shm"}


def test_the_mpi_job_starts_as_many_ranks_as_there_are_slots() -> None:
    command = container(PODS["Launcher"])["command"]
    assert command[: command.index("-n")] == [
        "hvdtrain", "launch", "--hostfile", "/etc/mpi/hostfile"
    ]  # fmt: skip
    slots = MPIJOB["spec"]["slotsPerWorker"] * REPLICAS["Worker"]["replicas"]
    assert command[command.index("-n") + 1] == str(slots)


def test_the_agents_find_the_first_pod() -> None:
    spec, pod = JOB["spec"], PODS["torchrun"]
    words = container(pod)["command"]
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == SERVICE["metadata"]["name"]
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}
    assert f"--master-addr={JOB['metadata']['name']}-0.{pod['subdomain']}" in words
    assert f"--nnodes={spec['completions']}" in words
    assert spec["completions"] == spec["parallelism"]


def test_the_hosts_of_compose_are_those_that_launch_names() -> None:
    found = services()
    command = found["host1"]["command"]
    hosts = command[command.index("--hosts") + 1]
    assert [one.partition(":")[0] for one in hosts.split(",")] == ["host1", "host2"]
    assert [found[one]["hostname"] for one in ("host1", "host2")] == ["host1", "host2"]
    assert sum(int(one.partition(":")[2]) for one in hosts.split(",")) == 4
    assert {one["image"] for one in found.values()} == {"hvdtrain:cpu"}
    (build,) = {tuple(sorted(one["build"].items())) for one in found.values()}
    assert (FOLDER / dict(build)["context"] / dict(build)["dockerfile"]).samefile(
        FOLDER / "Dockerfile"
    )


def test_ssh_and_sshd_of_the_image_agree_with_what_mounts_the_key() -> None:
    daemon = (FOLDER / "ssh/sshd_config.d/hvdtrain.conf").read_text()
    client = (FOLDER / "ssh/ssh_config.d/hvdtrain.conf").read_text()
    ports = [re.findall(r"^ *Port (\d+)$", text, re.MULTILINE) for text in (daemon, client)]
    assert ports == [["2222"], ["2222"]]
    folder = MPIJOB["spec"]["sshAuthMountPath"]
    assert folder == f"{HOME}/.ssh"
    assert f"HostKey {folder}/id_rsa\n" in daemon  # as the operator names it
    assert f"{folder}/authorized_keys\n" in client
    assert {one["volumes"][0] for one in services().values()} == {f"keys:{folder}"}
    for name in ("host2",):
        assert services()[name]["command"] == container(PODS["Worker"])["command"]


def test_what_the_definition_takes_is_there() -> None:
    text = (FOLDER / "hvdtrain.def").read_text()
    files = re.search(r"%files\n(.*?)\n\n", text, re.DOTALL)
    assert files
    rows = [line.split() for line in files[1].splitlines()]
    assert all(there == f"/src/{here}" and (ROOT / here).exists() for here, there in rows)
    names = {here for here, _ in rows}
    makefile = (ROOT / "Makefile").read_text()
    pins = re.search(r"^PINS := (.*)$", makefile, re.MULTILINE)
    assert pins and {"setup.cfg", "pyproject.toml", *pins[1].split()} <= names
