"""The benchmarks of `weft bench`: loads, the measurement of their steps, and tables of figures.
They know nothing of the command line.

Comparisons with other engines, and benchmarks that need a GPU, are not shipped: `benchmarks/`.
"""
