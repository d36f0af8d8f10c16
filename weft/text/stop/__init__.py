"""Where an answer ends: strings and patterns."""
