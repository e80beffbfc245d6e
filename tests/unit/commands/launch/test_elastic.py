"""``hvdtrain launch --elastic``: the request, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.commands.launch.elastic import GLOO, Pool, check_gloo, make_pool
from hvdtrain.commands.launch.hosts import Host
from hvdtrain.commands.launch.prepare import Request
from hvdtrain.commands.launch.worker import variables
from hvdtrain.errors import HvdtrainError, UsageError

ENVIRON = {"PATH": "/bin:/usr/bin"}
WORDS = ["sh", "-c", "true"]


def request(**options: object) -> Request:
    return Request(1, WORDS, **options)  # type: ignore[arg-type]


def program(file: Path, text: str) -> Path:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_without_hosts_this_machine_has_the_slots() -> None:
    pool = make_pool(request(), 1, 3, None, ENVIRON)
    assert pool.find() == (Host("localhost", 3),)


def test_hosts_are_those_of_launch(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\n")
    environ = {**ENVIRON, "PBS_NODEFILE": str(tmp_path / "nodes")}
    pool = make_pool(request(), 2, 8, None, environ)
    assert (pool.find(), pool.source) == ((Host("a", 2), Host("b", 1)), "PBS")
    assert make_pool(request(hosts="c:2"), 2, 8, None, environ).find() == (Host("c", 2),)
    assert make_pool(request(ppn=4), 8, 8, None, environ).find() == (Host("a", 4), Host("b", 4))


def test_a_discovery_script_is_run_each_time(tmp_path: Path) -> None:
    script = program(tmp_path / "hosts.sh", f"cat {tmp_path}/hosts")
    (tmp_path / "hosts").write_text("")
    pool = make_pool(request(), 1, 4, script, ENVIRON)
    assert pool.find() == ()  # none yet
    (tmp_path / "hosts").write_text("a:2\nb\nc slots=3\n")
    assert pool.find() == (Host("a", 2), Host("b", 1), Host("c", 3))
    (tmp_path / "hosts").unlink()
    with pytest.raises(HvdtrainError, match=r"ended with code 1: .*No such file"):
        pool.find()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--elastic --max 2", "--min N and --max M"),
        ("--elastic --min 3 --max 2", "--min 3 is more than --max 2"),
        ("--elastic --min 0 --max 2", "'0' is not a whole number of 1 or more"),
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
def test_wrong_use(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["launch", *words.split(), "--", "sh", "-c", "true"]
    try:
        code = cli.main(line)
    except SystemExit as stop:  # of argparse
        code = stop.code if isinstance(stop.code, int) else 1
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_script_that_fails_or_names_no_hosts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ended with code 3: broken"):
        make_pool(request(), 1, 2, program(tmp_path / "a.sh", "echo broken; exit 3"), ENVIRON)
    with pytest.raises(UsageError, match="line 1: 'a:b:c'"):
        make_pool(request(), 1, 2, program(tmp_path / "b.sh", "echo a:b:c"), ENVIRON)


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


def test_a_pool_may_have_more_slots_than_are_used() -> None:
    assert Pool(1, 2, (Host("a", 4),), "--hosts").find() == (Host("a", 4),)
