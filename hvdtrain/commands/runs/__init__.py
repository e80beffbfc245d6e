"""Runs of a command and their summaries, for scaling, compare and report."""
