"""containers/Dockerfile."""

from __future__ import annotations

import re

import pytest

from hvdtrain.commands.install_horovod.plan import TOOLKIT
from tests.conftest import ROOT
from tests.containers.manifests import Instruction, needed, stages

STAGES = stages()
DEFINITION = (ROOT / "containers" / "hvdtrain.def").read_text()


def runs(*names: str) -> str:
    """The RUN lines of these stages."""
    return "\n".join(one.text for name in names for one in STAGES[name].of("RUN"))


def test_the_base_is_pinned_by_release_and_digest() -> None:
    assert re.fullmatch(r"debian:bookworm-\d{8}-slim@sha256:[0-9a-f]{64}", STAGES["system"].base)
    tag, _, digest = STAGES["system"].base.partition("@")
    assert {stage.base for stage in STAGES.values()} <= {STAGES["system"].base, *STAGES}
    assert re.findall(r"^From:.*", DEFINITION, re.MULTILINE) == [f"From: debian@{digest}"]
    assert f"# From {tag}," in DEFINITION


def test_packages_are_checked_by_hash_but_for_those_that_the_policy_names() -> None:
    commands = re.findall(r"pip install ([^&|;\n]*)", f"{runs(*STAGES)}\n{DEFINITION}")
    packages = {
        word.strip("'").partition("[")[0]
        for words in map(str.split, commands)
        if "--require-hashes" not in words
        for word in words
        if not word.startswith(("-", ":", "/wheels/", "constraints.txt"))
    }
    assert packages == {"torch", "torchvision", "cuda-toolkit", "mpich==4.3.2"}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_both_images_are_built_alike_and_leave_the_compilers(target: str) -> None:
    assert needed(STAGES, target) == [
        "system", "environment", f"environment-{target}", f"build-{target}", target
    ]  # fmt: skip
    final = STAGES[target]
    assert final.base == f"environment-{target}"
    assert [(one.flags, one.text) for one in final.of("COPY")] == [
        ({"from": f"build-{target}"}, "/wheels /wheels")
    ]
    (user,) = final.of("USER")
    assert user.text == "1000:1000"  # by number: runAsNonRoot of Kubernetes asks for it
    assert "g++" not in runs("system", "environment", f"environment-{target}", target)


def test_the_images_differ_as_the_pages_say() -> None:
    assert "install-horovod --gpu none" in runs("build-cpu")
    assert "install-horovod --gpu nccl" in runs("build-cuda")
    assert f"'{TOOLKIT}'" in runs("build-cuda")
    assert "--require-hashes --requirement requirements-cuda.txt" in runs("environment-cuda")
    assert "--require-hashes --requirement requirements.txt" in runs("environment")


def test_versions_stand_in_the_files_of_the_project_alone() -> None:
    lines = [one for stage in STAGES.values() for one in stage.of("RUN")]
    assert not [one.text for one in lines if "==" in one.text]
    torch = [one for one in lines if "torch torchvision" in one.text]
    assert len(torch) == 2
    assert all("--constraint constraints.txt" in one.text for one in torch)


def test_what_is_copied_is_there_and_docker_is_let_see_it() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    seen = {line[1:] for line in lines if line.startswith("!")}
    copied: list[Instruction] = [one for stage in STAGES.values() for one in stage.of("COPY")]
    sources = {word for one in copied if "from" not in one.flags for word in one.text.split()[:-1]}
    assert sources == seen
    assert all((ROOT / source).exists() for source in sources)
