"""Framework-independent part of the eight steps, as plain functions."""
