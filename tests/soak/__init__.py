"""Random load with faults on a real server, always followed by the same audit: nothing is left
over, nobody forgotten.

`scripts/soak --minutes 20 --seed 1` runs it. Read in this order: driver, phases, behaviour,
traffic, ledger, audit, report.
"""
