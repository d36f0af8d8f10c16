"""Which models of a server are in memory, decided from facts alone: no clock, no I/O, no thread.

`Residency` gets facts: a request came, an engine is ready, memory is free again. `step(now_s)`
returns what to do. The launcher does it and tells the result. The rules:

1. What is loaded, is loading or is still being unloaded never has more bytes than the budget; at
   most `max_models` at a time.
2. A model with open requests, or a pinned one, is never unloaded and keeps its KV.
3. Models that requests wait for are loaded in the order of their oldest request. The first of them
   that does not fit keeps all later ones from being loaded: nobody overtakes it into the memory
   that it needs.
4. Room is made by those that nobody uses, the least recently used first: the KV of idle models if
   that is enough, else all of them.
5. If all that is not enough, a model in use must leave once its *stay* is over and the other has
   waited for `patience_s`: its open requests end, new ones wait, then it is unloaded. So no flood
   keeps a model from being loaded. A model that finds `k` others in the queue is ready within
   `L + (k + 1) * (max(patience_s, stay) + D + U + L)`, if no request takes longer than `D`, no
   unload longer than `U` and no load longer than `L`, and nobody kills or unloads models meanwhile.
6. A stay lasts `stay_loads` times as long as the load took, at least `least_stay_s`. A model that
   comes back soon after it had to leave keeps its stay even while it is idle: two models in the
   memory of one do not spend all their time loading (the *thrash guard*).

`tests/residency/` checks the rules after each event of random servers in virtual time.
"""
