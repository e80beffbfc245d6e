"""``hvdtrain install-horovod``: build Horovod, cache the wheel, prove and install it."""
