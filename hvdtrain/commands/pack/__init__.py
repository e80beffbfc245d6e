"""Gather the files of a data set in few: ``workloads/data/packed.py`` tells what they are like."""
