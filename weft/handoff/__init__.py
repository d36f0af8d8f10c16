"""KV that goes from one server to another over TCP. Plain sockets and one thread; nothing here
knows a scheduler, or a tensor."""
