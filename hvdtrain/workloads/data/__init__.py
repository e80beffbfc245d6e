"""Datasets shared by several tasks: readers of files, and batch loaders."""
