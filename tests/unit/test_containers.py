"""The files of containers/ agree with one another and with the project; CI builds the image."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hvdtrain.commands.install_horovod.plan import TOOLKIT
from tests.conftest import ROOT
from tests.manifests import FOLDER, manifests, services

DOCKERFILE = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
_, *_PARTS = re.split(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
BASES = dict(zip(_PARTS[1::3], _PARTS[::3], strict=True))
STAGES = dict(zip(_PARTS[1::3], _PARTS[2::3], strict=True))
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
    assert f"\nUSER {security['runAsUser']}:{security['runAsGroup']}\n" in STAGES["cpu"]


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


def test_the_base_is_pinned_by_release_and_digest() -> None:
    base = re.search(
        r"^ARG BASE=(debian:bookworm-\d{8}-slim)@sha256:[0-9a-f]{64}$", DOCKERFILE, re.M
    )
    assert base and f"From: {base[1]}\n" in (FOLDER / "hvdtrain.def").read_text()


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_both_images_are_built_alike_and_leave_the_compilers(target: str) -> None:
    assert BASES == {
        "system": "${BASE}",
        "environment": "system",
        "environment-cpu": "environment",
        "environment-cuda": "environment",
        "build-cpu": "environment-cpu",
        "build-cuda": "environment-cuda",
        "cpu": "environment-cpu",
        "cuda": "environment-cuda",
    }
    assert f"\nCOPY --from=build-{target} /wheels /wheels\n" in STAGES[target]
    assert "\nUSER 1000:1000\n" in STAGES[target]  # by number: Kubernetes checks runAsNonRoot
    used = ("system", "environment", f"environment-{target}", target)
    assert not any("g++" in STAGES[name] for name in used)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("build-cpu", "install-horovod --gpu none"),
        ("build-cuda", "install-horovod --gpu nccl"),
        ("build-cuda", f"'{TOOLKIT}'"),
        ("environment", "--require-hashes --requirement requirements.txt"),
        ("environment-cpu", "--constraint constraints.txt torch torchvision"),
        ("environment-cuda", "--constraint constraints.txt torch torchvision"),
        ("environment-cuda", "--require-hashes --requirement requirements-cuda.txt"),
    ],
)
def test_the_images_differ_as_the_pages_say(stage: str, words: str) -> None:
    assert words in STAGES[stage]
    assert "==" not in STAGES[stage]  # versions are in the files of the project


def test_the_copied_files_exist_and_docker_sees_them() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    sources = {word for words in copied for word in words.split()}
    assert sources == {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / source).exists() for source in sources)
