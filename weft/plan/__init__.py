"""What crosses the seam between scheduler and executor: plans and results, requests to the device."""
