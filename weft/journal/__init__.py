"""What entered the core, written down, and the same decisions made from it again."""
