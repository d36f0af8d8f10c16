"""Parts of a runner that come from outside of weft (`--plugins`, `--attention-backend`)."""
