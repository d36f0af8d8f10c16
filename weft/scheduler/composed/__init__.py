"""Policies made of several: `priority > fair(key) > lpm`, from the coarsest to the finest.

`language.py` reads the text, `build.py` makes a policy of it. The others are the parts: classes,
and an order that another one refines.
"""
