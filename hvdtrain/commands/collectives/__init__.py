"""``python -m hvdtrain.collectives``: demonstrate and time collectives."""
