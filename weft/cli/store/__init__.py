"""The verbs of the store: pull, list, show, rm, cp."""
