"""The adapters: the eight steps, implemented for one framework and one strategy each."""
