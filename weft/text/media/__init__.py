"""Pictures, videos and sounds of requests: fetched, decoded, and prepared for a model."""
