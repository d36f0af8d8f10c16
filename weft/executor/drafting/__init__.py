"""A second, smaller model on the device, which guesses what comes next."""
