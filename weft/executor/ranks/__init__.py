"""One model in several processes: rank 0, which decides, and the ranks that follow."""
