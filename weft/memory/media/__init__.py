"""The cache keys of pictures, videos and sounds, and the places where prompts with such items may
be cut."""
