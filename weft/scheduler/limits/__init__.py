"""What ends or refuses a request: deadlines, sizes, a server that is closing."""
