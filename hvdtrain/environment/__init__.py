"""What a training stands on: building Horovod for this machine, and checking the machine."""
