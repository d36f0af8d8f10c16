"""Every module here is a scheduling policy: `dfs_weight.py` is the policy "dfs-weight"."""
