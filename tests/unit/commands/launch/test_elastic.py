"""``hvdtrain launch --elastic``: the request, its hosts, and which of them answer."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.commands.launch.host_process import variables
from hvdtrain.commands.launch.hosts import Host
from hvdtrain.commands.launch.prepare import GLOO, Pool, Request, check_gloo, make_pool
from hvdtrain.commands.launch.remote import Reachable, on_host
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.runtime.command import Command
from hvdtrain.system.runtime.command import run as run_command
from tests.conftest import BIN, executable, run, until

ENVIRON = {"PATH": "/bin:/usr/bin"}
WORDS = ["sh", "-c", "true"]


def pool(fewest: int, most: int, *, environ: Mapping[str, str] = ENVIRON, **options: Any) -> Pool:
    script = options.pop("script", None)
    return make_pool(Request(most, WORDS, fewest=fewest, **options), script, environ)


def program(file: Path, text: str) -> Path:
    return executable(file, f"#!/bin/sh\n{text}\n")


def test_hosts_are_those_of_launch(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\n")
    environ = {**ENVIRON, "PBS_NODEFILE": str(tmp_path / "nodes")}
    job = pool(2, 8, environ=environ)
    assert (job.find(), job.source) == ((Host("a", 2), Host("b", 1)), "PBS")
    assert pool(2, 8, environ=environ, hosts="c:2").find() == (Host("c", 2),)
    assert pool(8, 8, environ=environ, ppn=4).find() == (Host("a", 4), Host("b", 4))
    assert pool(1, 2, hosts="a:4").find() == (Host("a", 4),)  # more than are used
    assert pool(1, 2, hosts="a:999999999").find() == (Host("a", 4),)
    assert pool(1, 3).find() == (Host("localhost", 3),)


def test_a_discovery_script_is_run_each_time(tmp_path: Path) -> None:
    script = program(tmp_path / "hosts.sh", f"cat {tmp_path}/hosts")
    (tmp_path / "hosts").write_text("")
    job = pool(1, 4, script=script)
    assert job.find() == ()  # none yet
    (tmp_path / "hosts").write_text("a:2\nb\nc slots=3\n")
    assert job.find() == (Host("a", 2), Host("b", 1), Host("c", 3))
    (tmp_path / "hosts").unlink()
    with pytest.raises(HvdtrainError, match=r"ended with code 1: .*No such file"):
        job.find()
    with pytest.raises(UsageError, match="ended with code 3: broken"):
        pool(1, 2, script=program(tmp_path / "a.sh", "echo broken; exit 3"))
    with pytest.raises(UsageError, match="line 1: 'a:b:c'"):
        pool(1, 2, script=program(tmp_path / "b.sh", "echo a:b:c"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--elastic --max 2", "--min N and --max M"),
        ("--elastic --min 3 --max 2", "--min 3 is more than --max 2"),
        ("--elastic --min 0 --max 2", "0 is not a whole number of 1 or more"),
        ("-n 2 --elastic --min 1 --max 2", "-n N, or --elastic"),
        ("", "-n N, or --elastic"),
        ("-n 2 --max 2", "require --elastic"),
        ("--elastic --min 1 --max 2 --tag", "--elastic does not support --tag"),
        ("--elastic --min 1 --max 2 --launcher torchrun --tag", "torchrun does not support --tag"),
        (
            "--elastic --min 1 --max 2 --launcher torchrun --discovery x",
            "--discovery does not support --launcher",
        ),
        ("--elastic --min 3 --max 2 --launcher torchrun", "--min 3: more than --max 2"),
        ("--elastic --min 3 --max 4 --launcher torchrun --hosts a:2", "the 2 slots"),
        ("--elastic --min 3 --max 4 --hosts a:1,b:1", "--min 3: --hosts has 2 slots"),
        ("--elastic --min 1 --max 2 --discovery no.sh", "--discovery no.sh: no such file"),
        ("--elastic --min 1 --max 2 --discovery LICENSE", "chmod +x LICENSE"),
        ("--elastic --min 1 --max 2 --discovery x --hosts a", "cannot be combined with --hosts"),
    ],
)
def test_wrong_use(words: str, message: str, refused: Callable[..., str]) -> None:
    assert message in refused("launch", *words.split(), "--", "sh", "-c", "true")


def test_horovod_must_be_built_with_gloo(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run `hvdtrain install-horovod`"):
        check_gloo([None, None])
    library = tmp_path / "mpi_lib_v2.so"
    library.write_bytes(b"\0HOROVOD_CONTROLLER\0")
    with pytest.raises(UsageError, match=f"{library}.*HOROVOD_WITH_GLOO=1"):
        check_gloo([None, library])
    library.write_bytes(b"\0" + GLOO + b"\0")
    check_gloo([library, None])


def test_variables_of_a_rank() -> None:
    assert variables(["5", "8", "1", "4", "1", "2"]) == {
        "HOROVOD_RANK": "5",
        "HOROVOD_SIZE": "8",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "4",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
    }


# Other hosts, with a script as ssh


def test_the_remote_shell_passes_all_words_and_variables_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "ssh", 'for last; do :; done; eval "$last"')  # as sshd's shell does
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    words = (f"$(touch {tmp_path}/evil)", "a b", "'", '"; exit 3', "`id`", "*", "\n", "", "-n")
    show = "import os, sys; print([os.environ['HVDTRAIN_X'], *sys.argv[1:]])"
    command = Command((sys.executable, "-c", show, *words), {"HVDTRAIN_X": words[0]})
    done = run_command(on_host("elsewhere", command, {"HVDTRAIN_Y": words[0]}))
    assert (done.exit_code, ast.literal_eval(done.output)) == (0, [words[0], *words])
    assert not (tmp_path / "evil").exists()


def test_a_host_is_excluded_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program(tmp_path / "ssh", f'[ -e {tmp_path}/$3 ] || {{ echo "no route to $3"; exit 255; }}')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    caplog.set_level("INFO", logger="hvdtrain")
    (tmp_path / "node1").touch()
    reachable = Reachable(pause=0.01)
    hosts = ("node1", "node2", "localhost")
    assert reachable.among(hosts) == {"node1", "localhost"}
    (tmp_path / "node2").touch()
    until(lambda: reachable.among(hosts) == set(hosts))
    (tmp_path / "node1").unlink()
    reachable.doubt("node1")
    reachable.doubt("node1")  # by each of its ranks
    assert reachable.among(hosts) == {"node2", "localhost"}
    # Otherwise its thread would run ssh again and again during all other tests.
    (tmp_path / "node1").touch()
    until(lambda: reachable.among(hosts) == set(hosts))
    messages = [record.getMessage() for record in caplog.records]
    assert "node2 is excluded" in messages[0]
    assert "no route to node2" in messages[0]
    assert "node2 answers" in messages[1]


def test_the_end_of_the_job_is_exported_to_all_hosts(tmp_path: Path) -> None:
    program(tmp_path / "ssh", f'echo "$3" >> {tmp_path}/$2')
    program(tmp_path / "qstat", 'echo " Resource_List.walltime = 01:00:00"')
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    line = ["launch", "-n", "2", "--hosts=a,b", "--launcher=torchrun", "--", "true"]
    outcome = run([str(BIN / "hvdtrain"), *line], PATH=path, PBS_JOBID="7.server")
    assert outcome.code == 0, outcome.err
    for host in "ab":
        assert " HVDTRAIN_WALLTIME_ENDS=" in (tmp_path / host).read_text()
