"""*How* the eight steps are done: one framework and one strategy each."""
