"""One model in several processes: the one that decides, and those that follow."""
