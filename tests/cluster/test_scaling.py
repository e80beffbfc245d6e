"""A sweep as jobs of a real batch system, one per size, and its report."""

from __future__ import annotations

import json

from tests.cluster.test_slurm import User, user  # noqa: F401 (fixtures)
from tests.conftest import BIN

TRAIN = ("python", "-m", "hvdtrain.mnist", "--model", "small", "--num-steps", "10")
OPTIONS = "--walltime 0:05:00 --ppn 2 --scheduler pbs"


def test_each_size_is_a_job_and_a_row_of_the_report(user: User) -> None:  # noqa: F811
    verb = (str(BIN / "hvdtrain"), "scaling")
    sweep = (*verb, "--ranks", "1,2", "--repeat", "1", "--submit", OPTIONS, "--json")
    jobs = json.loads(user.types(*sweep, "--", *TRAIN).out)["jobs"]
    assert [job["ranks"] for job in jobs] == [1, 2]
    # Concurrent jobs would disturb each other.
    assert user.job(jobs[1]["jobs"][0])["Dependency"].startswith(f"afterany:{jobs[0]['jobs'][0]}")
    for number in (job["jobs"][0].partition(".")[0] for job in jobs):
        assert user.ended(number)["JobState"] == "COMPLETED", user.log(number)
    report = json.loads(user.types(*verb, "--json").out)
    assert [(size["ranks"], size["runs"]) for size in report["sizes"]] == [(1, 1), (2, 1)]
    assert (user.directory / "scaling" / "scaling.png").is_file()
    second = json.loads(user.types(*sweep, "--", *TRAIN).out)
    assert second["jobs"] == []  # nothing is missing
