"""The tasks for one process: model, data and loss. No word of ranks in here."""
