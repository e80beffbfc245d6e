"""Proving that each of the eight steps took effect: one module a step, what it measures and judges.

A step's module has ``measure(bench)``, which every rank calls and which returns JSON values, and
``judge(everyone)``, a pure function of what all ranks measured, by rank. What a row claims is
computed by other means than the step itself: closed forms, plain framework code, a look at files.
"""
