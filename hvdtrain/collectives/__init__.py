"""Collectives over all ranks, one module per library."""
