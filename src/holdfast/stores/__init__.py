"""A folder per store. Read ``memory`` first: it is the rules of admission and nothing else."""
