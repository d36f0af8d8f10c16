"""An engine from settings: checked, loaded, put together."""
