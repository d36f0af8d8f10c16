"""Names of fields that APIs and their other servers have, and weft does not.

There is one rule for the fields of all APIs. A field is served; or it is refused by name, because
its answer would be another than the client asked for; or it is ignored, because it asks for nothing
that a server of one model could do, and other servers ignore it too. Any other field is unknown: it
is ignored and counted.
"""

from __future__ import annotations

# Refused, unless the value has no effect.
REFUSED = frozenset(
    {"suffix", "functions", "function_call", "guided_whitespace_pattern"}
    | {"session_params", "watermark"}
    | {"prompt_logprobs", "token_ids_logprob", "logprob_token_ids"}
    | {"use_beam_search", "length_penalty", "beam_width"}
    | {"return_hidden_states", "return_routed_experts", "return_prompt_token_ids", "return_entropy"}
    | {
        "documents",
        "chat_template",
        "prompt_embeds",
        "input_embeds",
        "image_data",
        "video_data",
        "audio_data",
    }
    | {"return_sampling_mask", "return_cached_tokens_details", "custom_labels"}
    | {"return_input_ids_in_sglext", "return_output_ids_in_sglext"}
    | {"is_async", "load_format"}
    | {"start_step", "profile_by_stage", "profile_stages", "merge_profiles"}
    | {
        "audio",
        "modalities",
        "kv_transfer_params",
        "bootstrap_host",
        "bootstrap_room",
        "repetition_detection",
    }
    # Other numbers than float32, other cuts and other documents than those of vectors and scores:
    | {"embed_dtype", "endianness", "late_chunking", "max_tokens_per_doc", "max_chunks_per_doc"}
    | {"rank_fields", "return_embeddings", "return_multivector"}
    # Bodies of requests are never logged or dumped:
    | {"log_requests_format", "log_requests_target", "crash_dump_folder"}
    | {"dump_requests_folder", "dump_requests_threshold", "dump_requests_exclude_meta_keys"}
    # What other servers than this one would have to keep or to do:
    | {"conversation", "thread", "compaction"}
    | {"web_search_options", "mcp_servers", "container", "moderation"}
)
# Ignored, and not counted.
IGNORED = frozenset(
    # Names, bills and places of a provider's customers.
    {"metadata", "store", "safety_identifier", "user_profile_id", "workspace_id"}
    | {"billing_policy", "fallback_credit_token", "access_programs"}
    | {"inference_geo", "speed", "betas", "diagnostics", "background_options"}
    # Hints about the cache, which finds every prefix by itself.
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    # Wishes about a context that is never changed here, and about models that are not here.
    | {"context_management", "fallbacks", "image", "verbosity"}
    # How long Ollama keeps a model.
    | {"keep_alive"}
)
_NOTHING: tuple[object, ...] = (None, False, [], {}, "")
_HARMLESS = {
    "function_call": "none",
    "modalities": ["text"],
    "length_penalty": 1,
    "embed_dtype": "float32",
    "endianness": "native",
}
# What every API does by itself, so that only `false` would change it.
_BY_ITSELF = frozenset(
    {"add_generation_prompt", "parallel_tool_calls"}
    | {"include_reasoning", "separate_reasoning", "stream_reasoning"}
)


def asks_for_nothing(name: str, value: object) -> bool:
    """Whether the value of a refused field has no effect."""
    if value == _HARMLESS.get(name, ...):
        return True
    if name in _BY_ITSELF:
        return value in (None, True)
    if name in ("thinking", "web_search_options"):  # `{}` asks for a search with its defaults
        return value is None
    # 0 may have an effect, although it equals False.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return not is_number and value in _NOTHING
