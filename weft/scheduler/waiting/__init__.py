"""The requests that wait for a row: one order of them (`line`), and the queue of all lines
(`queue`)."""
