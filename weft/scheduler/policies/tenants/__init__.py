"""Tenants under `fair`: their accounts, and the choice of the next request."""
