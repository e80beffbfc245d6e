"""``hvdtrain launch``: start N ranks with the options that the MPI here wants."""
