"""Trainer options and the table of strategies."""
