"""Capacity planning: from what a machine costs, and what users ask for, to settings and numbers of
users.

Reading order: machine (what was measured), workload (what users ask), trial (one simulation), knee
(the most users within the bounds), axes and search (settings), limits (what is the bottleneck),
fleet (several machines), answer. Nothing here measures, prints, reads a file or a clock:
`weft/cli/capacity` does.
"""
