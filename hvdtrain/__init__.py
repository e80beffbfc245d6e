"""hvdtrain: Horovod training on an HPC cluster, in eight named steps, exact at any rank count."""

__version__ = "0.1.0"
