"""KV in the files of a folder, the store of `--cache-dir`: `store.py` is what the engine calls,
`reader.py` and `writer.py` are the threads."""
