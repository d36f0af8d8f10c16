"""What `weft bench` runs: loads, the measurement of their steps, and tables of figures.
Knows nothing of the command line.

What compares weft with other engines, or needs a GPU, is not shipped: `benchmarks/`.
"""
