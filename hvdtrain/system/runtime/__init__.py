"""Processes of a job: launcher detection, exit, failure detection, subprocesses."""
