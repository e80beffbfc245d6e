"""``hvdtrain submit``: write a job script and submit it to PBS or Slurm."""
