"""How fast is it: batching, offline, serving. They drive an engine or a server from outside, and know only messages.

What the scheduler alone costs is `weft/sim/overhead.py`.
"""
