"""Decides which requests run in each step. Pure: no I/O, no clock, no thread, no torch, no unseeded
random number.

Reading order: loop, scheduler, request, queue, policy, admission, planner, batch, commit; then
memory and executor.
"""
