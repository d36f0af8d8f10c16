"""KV of cached prefixes in a folder: it outlives the process. Plain files, read and written by
threads; nothing here knows a scheduler, or a tensor."""
