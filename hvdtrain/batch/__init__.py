"""Who gave me nodes: job scripts, PBS and Slurm, and how long a job may still run."""
