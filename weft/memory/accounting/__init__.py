"""Audits of the accounts: the owner of each page, and the sums."""
