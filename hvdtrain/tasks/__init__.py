"""One update and one evaluation in one process: what a trainer asks of a task."""
