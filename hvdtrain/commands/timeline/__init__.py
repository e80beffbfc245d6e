"""Horovod's timeline files: read as a stream, analysed, reported, shown and repaired."""
