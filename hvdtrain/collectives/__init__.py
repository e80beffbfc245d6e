"""Collectives over all ranks, each library once."""
