"""KV that goes from one server to another over TCP, by plain sockets and one thread. This package
knows no scheduler and no tensor."""
