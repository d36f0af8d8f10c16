"""How long a step takes, and how many tokens a step may have so that it does not take too long."""
