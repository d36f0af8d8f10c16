"""Tenants under `fair`: their accounts, and whose request is next."""
