"""``hvdtrain launch``: start N ranks with the options of the installed MPI."""
