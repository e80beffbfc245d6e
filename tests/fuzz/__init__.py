"""Fuzzing of everything that is read and that somebody else wrote: see ``targets``.

``python -m tests.fuzz TARGET --seconds N`` searches with coverage, by atheris where installed.
"""
