"""What `weft bench` can measure, one file each; `cli/bench.py` lists them."""
