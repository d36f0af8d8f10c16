"""KV of the layers with a sliding window: a pool of pages of its own. A row keeps the pages that
its next tokens can see, and the prefix cache keeps the pages that a resumed request needs."""
