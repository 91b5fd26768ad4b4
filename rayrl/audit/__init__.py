"""What the records of a run prove: checks over what is on disk, and nothing else."""
