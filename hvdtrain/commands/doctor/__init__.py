"""``hvdtrain doctor``: what keeps a training from running well on these machines."""
