"""Pictures of the engine for the live page, made only while a client watches it."""
