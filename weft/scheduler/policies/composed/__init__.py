"""Policies composed of several: `priority > fair(key) > lpm`, from the coarsest to the finest.

`language.py` parses the text, `build.py` makes the policy. The other modules are the parts:
classes, an order that another one refines, and a second policy beside the first without effect
(`--shadow-policy`).
"""
