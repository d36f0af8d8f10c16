"""What was decided about each request, and why."""
