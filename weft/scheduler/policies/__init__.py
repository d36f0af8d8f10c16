"""The larger policies. Each is a `Policy` (see `scheduler/policy.py`) and stands in `POLICIES`
there."""
