"""Where the pieces of a build are done: in processes of this machine, as Ray tasks, or in jobs of SLURM."""
