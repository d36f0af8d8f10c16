"""The middleware that every HTTP request passes, and the protocol below it."""
