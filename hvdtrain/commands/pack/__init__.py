"""Packing of datasets into tar shards; the format is in ``workloads/data/packed.py``."""
