"""Models: tokens in, hidden states and logits out. They know nothing of requests, batches or the
storage of KV."""
