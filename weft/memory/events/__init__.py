"""Who is notified of changes of the prefix cache. A server without KV events uses
`NoCacheEvents`."""
