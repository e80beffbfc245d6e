"""No batch system: the same script, to be run with bash."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.batch.dialect import Dialect, Query
from hvdtrain.batch.job import Job
from hvdtrain.batch.site import Site
from hvdtrain.launch.run import Command


class Local(Dialect):
    """One machine without a batch system."""

    name, suffix = "none", ".sh"
    shebang = "#!/bin/bash"
    change = "NAME=VALUE bash SCRIPT"
    nodes = "1"
    in_job = False

    def directives(self, job: Job, site: Site) -> list[str]:
        """See ``Dialect``: there are none."""
        return []

    def submit(self, script: str, log: str, *, array: str | None, after: str | None) -> Command:
        """See ``Dialect``: what a user has to type."""
        return Command(("bash", script))

    def read_id(self, output: str) -> str | None:
        """See ``Dialect``: there is none."""
        return None

    def queries(self, job_id: str) -> Sequence[Query]:
        """See ``Dialect``: there is nobody to ask."""
        return ()

    def delete(self, job_ids: Sequence[str]) -> Command:
        """See ``Dialect``."""
        return Command(("true",))
