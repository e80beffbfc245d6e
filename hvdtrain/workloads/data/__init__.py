"""Datasets that belong to no single task: readers of files, and what loads them in batches."""
