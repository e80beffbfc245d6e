"""``hvdtrain compare``: the same training by every strategy, framework and precision."""
