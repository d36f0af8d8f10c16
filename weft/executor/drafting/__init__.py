"""A second, smaller model on the device, which guesses the next tokens."""
