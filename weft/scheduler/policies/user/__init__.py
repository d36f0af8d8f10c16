"""Users' own policies: `load.py` finds them by name, `guarded.py` keeps their faults harmless."""
