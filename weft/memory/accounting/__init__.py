"""Looking after the accounts: who owns each page, and whether the sums hold."""
