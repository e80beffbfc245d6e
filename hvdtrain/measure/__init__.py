"""How fast a training is, at which scale, against what; and the plots of it."""
