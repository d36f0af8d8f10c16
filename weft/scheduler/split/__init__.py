"""Prefills that are split by layers (SGLang: SPLIT_PREFILL), so that running requests decode
between the pieces. A scheduler without `--split-prefill-layers` does not use this package."""
