"""Messages between the ranks that share one model."""
