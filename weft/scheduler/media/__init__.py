"""What prompts with pictures, videos and sounds take besides those of text: work of the encoder,
room for what it made, and positions of their own."""
