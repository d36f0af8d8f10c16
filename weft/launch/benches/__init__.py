"""What `weft bench` can measure, one file each; `launch/bench.py` lists them."""
