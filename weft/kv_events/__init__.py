"""KV events as vLLM and SGLang publish them. A server without `--kv-events-config` imports nothing
of this."""
