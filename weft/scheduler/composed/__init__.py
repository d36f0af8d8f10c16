"""Policies made of several: `priority > fair(key) > lpm`, from the coarsest to the finest.

`language.py` reads the text, `build.py` makes a policy of it. The others are the parts: classes,
the order within a tenant, and an order that another one refines.
"""
