"""KV of the layers with a sliding window: a page space of its own, in which a row keeps what its
next tokens can see, and the prefix cache keeps what a resumed request needs."""
