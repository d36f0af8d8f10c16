"""Who is told of changes of the prefix cache. A server without KV events imports the twin alone."""
