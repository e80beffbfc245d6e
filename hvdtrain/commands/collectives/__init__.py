"""``python -m hvdtrain.collectives``: demonstrate, time and study collectives."""
