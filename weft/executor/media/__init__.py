"""The vectors of pictures, videos and sounds, kept as long as requests need them."""
