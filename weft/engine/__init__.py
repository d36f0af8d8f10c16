"""The engine process: what surrounds the scheduler there."""
