"""The tasks for one process: model, data and loss, without ranks."""
