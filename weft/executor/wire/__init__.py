"""What goes between the ranks that hold one model together."""
