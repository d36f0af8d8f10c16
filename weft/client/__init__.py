"""The front's side of the engine: requests go out, outputs come back."""
