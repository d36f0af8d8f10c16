"""How long a step takes, and how much a step may hold so that it does not take longer than
allowed."""
