"""Handwritten digits: MNIST, its relatives of the same form, or the embedded digits."""
