"""What the prefix cache compares of pictures, videos and sounds, and where prompts with some may
be cut."""
