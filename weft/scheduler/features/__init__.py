"""What some requests use and most do not. Each module is one Part (see `scheduler/feature.py`)."""
