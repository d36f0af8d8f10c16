"""What every HTTP request passes, and the protocol below it."""
