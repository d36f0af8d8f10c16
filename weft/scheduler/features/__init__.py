"""What some requests use and most do not. Each module is one `Feature` (`scheduler/feature.py`)."""
