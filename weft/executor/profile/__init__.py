"""The profiler of the device."""
