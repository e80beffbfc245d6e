"""*When* the eight steps happen: one training loop for all workloads, frameworks and strategies."""
