"""The scheduler without a device: its decisions, in virtual time.

Reading order: trace (arrivals), cost (a Runner that only counts time), run (the clock), report;
then synthetic and files (sources of traces), changes (comparison of two runs), fit (the cost model
from measured steps). No torch. The real time of the scheduler is measured in
`weft/bench/overhead.py`.
"""
