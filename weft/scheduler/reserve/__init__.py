"""Memory that a pass keeps for the output of requests, where an expectation is not enough."""
