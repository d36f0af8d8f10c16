"""Administration: what changes or asks the running engine."""
