"""The scheduler without a device: what it decides, in virtual time, and what deciding costs,
in real time.

Reading order: trace (what arrives), cost (a Runner that only counts time), run (the clock), report;
then synthetic and files (where traces come from), compare, fit (the cost model from measured
steps), overhead (real time). No torch.
"""
