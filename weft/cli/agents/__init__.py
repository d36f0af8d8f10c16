"""`weft launch`: starts coding agents against a weft server."""
