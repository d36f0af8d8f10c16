"""What crosses the seam between scheduler and executor: plans, results, requests to the device."""
