"""``hvdtrain submit``: write a job script and hand it to PBS or Slurm."""
