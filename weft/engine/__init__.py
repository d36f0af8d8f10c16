"""The parts of the engine process around the scheduler."""
