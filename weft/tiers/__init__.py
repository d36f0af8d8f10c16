"""KV of cached prefixes outside of the pool: in host memory, or in a folder, where it outlives the
process. Threads copy, read and write it; this package knows no scheduler and no tensor."""
