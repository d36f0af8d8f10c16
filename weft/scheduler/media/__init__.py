"""What prompts with pictures, videos and sounds need beyond those of text: work of the encoder,
room for its vectors, and positions of their own."""
