"""KV in the memory of the host, the store of `--cache-host-gb`: `store.py` is what the engine
calls, `copier.py` is the thread."""
