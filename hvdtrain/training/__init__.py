"""The trainer: one training loop for all workloads, frameworks and strategies."""
