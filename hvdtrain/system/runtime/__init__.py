"""This process in its job: who started it, how it ends, what it runs."""
