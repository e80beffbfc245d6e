"""The engine of a study, for ``scaling`` and ``compare``: run a command in variants, and resume."""
