"""KV in a store from outside of weft (`--plugins tiers=module:Class`)."""
