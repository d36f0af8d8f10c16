"""The front's side of the engine: it sends requests and receives outputs."""
