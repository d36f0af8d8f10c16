"""Pictures, videos and sounds of requests: fetched, decoded, and made ready for a model."""
