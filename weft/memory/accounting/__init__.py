"""Looking after the books: who owns each page, and whether the sums hold."""
