"""The commands of `weft ctl`."""

from __future__ import annotations

import dataclasses
import json

from weft.cli.ctl.answers import experts, profile, traces, tree, weight_version
from weft.cli.ctl.command import (
    HELP,
    Argument,
    CtlCommand,
    assignment,
    content,
    seconds_or_off,
    switch,
)
from weft.cli.models_table import loaded_table, models_table
from weft.cli.why import causes
from weft.messages.control import AbortRequest, PauseGeneration, SetPolicy, StartProfile
from weft.messages.weights import (
    DestroyWeightsUpdateGroup,
    GetWeightsByName,
    InitWeightsUpdateGroup,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
)

RID = Argument("rid", "name of the request, as the client gave it")
SESSION = Argument("session_id", "its name")
VERSION = Argument("--weight-version", HELP["weight_version"])
ABORT_ALL = Argument(
    "--abort-all", "end open requests instead of computing them again", None, "abort_all_requests"
)
TAGS = Argument("tags", "weights, kv_cache; all if none is given", many=True, optional=True)
ADAPTER = Argument("lora_name", "the name by which requests select it")
PINNED = Argument("--pinned", "it keeps a slot, and is never unloaded for another one", None)
PREFIX = Argument("--prefix", "prefix of the name of the trace", field="profile_prefix")

RAMP_S = Argument("--ramp-s", "seconds in which the rate grows", float, sent_in="query")

MODEL = Argument("model", "its name")

COMMANDS = (
    CtlCommand(
        "models list", "GET", "/models", "all models of the server, *: default", show=models_table
    ),
    CtlCommand(
        "models loaded", "GET", "/models", "the models in memory (also: weft ps)", show=loaded_table
    ),
    CtlCommand("models load", "POST", "/models/load", "load a model, and wait for it", (MODEL,)),
    CtlCommand(
        "models unload",
        "POST",
        "/models/unload",
        "unload a model after its open requests",
        (MODEL,),
    ),
    CtlCommand(
        "flush-cache",
        "POST",
        "/flush_cache",
        "empty the prefix cache, if nothing runs",
        (Argument("--timeout", "seconds to wait for that", float, sent_in="query"),),
    ),
    CtlCommand("cache show", "GET", "/cache", "what is cached, in memory and on disk"),
    CtlCommand("cache clear", "POST", "/cache/clear", "remove the files of cached KV"),
    CtlCommand(
        "cache save",
        "POST",
        "/cache/save",
        "write what is cached in memory",
        (Argument("--timeout", "seconds for that", float, sent_in="query"),),
    ),
    CtlCommand(
        "cache pin",
        "POST",
        "/cache/pin",
        "compute a prompt, and keep it in memory",
        (
            Argument("prompt", "the text", optional=True),
            Argument("--messages", "a conversation instead, as JSON", json.loads),
            Argument("--ttl", "seconds since its last use", float, "ttl_s"),
            Argument("--name", "name of the pin, for cache unpin"),
            Argument("--lora-path", "the adapter that it is for"),
            Argument("--tenant", "tenant whose --tenant-cache limits the pin"),
            Argument("--cache-salt", "cache_salt of the requests that can find it"),
        ),
    ),
    CtlCommand(
        "cache unpin",
        "DELETE",
        "/cache/pin/{name}",
        "remove a pin",
        (Argument("name", "name of the pin", sent_in="path"),),
    ),
    CtlCommand(
        "cache prefix",
        "GET",
        "/cache/prefix",
        "a node of the prefix tree of the last picture, and the requests that use it",
        (Argument("node", "its number", int, sent_in="query"),),
    ),
    CtlCommand(
        "cache tree",
        "GET",
        "/cache/tree",
        "the heaviest nodes of the prefix tree, with their texts and users",
        show=tree,
    ),
    CtlCommand(
        "cache forget",
        "POST",
        "/cache/forget",
        "drop a prefix from memory, and all sequences that continue it",
        (
            Argument("prompt", "its text", optional=True),
            Argument("--messages", "a conversation instead, as JSON", json.loads),
            Argument("--keep", "tokens at its beginning that stay", int),
            Argument("--cache-salt", "cache_salt of the requests that can find it"),
            Argument("--lora-path", "the adapter that they are for"),
        ),
    ),
    CtlCommand(
        "abort",
        "POST",
        "/abort_request",
        "abort requests by name, or all",
        (
            dataclasses.replace(RID, optional=True),
            Argument("--all", "every open request", None, "abort_all"),
        ),
        AbortRequest,
    ),
    CtlCommand(
        "pause",
        "POST",
        "/pause_generation",
        "run no step until weft ctl continue",
        body=PauseGeneration,
    ),
    CtlCommand(
        "continue",
        "POST",
        "/continue_generation",
        "continue after a pause",
        (RAMP_S,),
    ),
    CtlCommand("block", "POST", "/block", "hold back requests that arrive from now on"),
    CtlCommand(
        "unblock",
        "POST",
        "/unblock",
        "admit the requests that were held back",
        (RAMP_S,),
    ),
    CtlCommand(
        "set-policy",
        "POST",
        "/set_policy",
        "order waiting requests by another policy",
        body=SetPolicy,
    ),
    CtlCommand("audit", "POST", "/audit", "check who owns each page of KV memory"),
    CtlCommand(
        "state get", "GET", "/get_internal_state", "settings that can be changed, and numbers"
    ),
    CtlCommand(
        "state set",
        "POST",
        "/set_internal_state",
        "change settings: all of them, or none",
        (Argument("name=value", "setting and value", assignment, "server_args", many=True),),
    ),
    CtlCommand("state show", "GET", "/state", "what outlives the server: counts, bytes, ages"),
    CtlCommand(
        "state prune",
        "POST",
        "/state/prune",
        "remove stored responses and sessions that nobody has used for a time",
        (Argument("older_than_s", "seconds since their last use", float),),
    ),
    CtlCommand("state clear", "POST", "/state/clear", "remove stored responses and all sessions"),
    CtlCommand(
        "profile start",
        "POST",
        "/start_profile",
        "record the operations of the device",
        (PREFIX,),
        StartProfile,
    ),
    CtlCommand(
        "profile stop",
        "POST",
        "/stop_profile",
        "stop recording; print the operations with the most time",
        show=profile,
    ),
    CtlCommand(
        "experts start",
        "POST",
        "/start_expert_distribution_record",
        "begin to count the tokens of each expert",
    ),
    CtlCommand(
        "experts stop",
        "POST",
        "/stop_expert_distribution_record",
        "stop counting the tokens of experts",
    ),
    CtlCommand(
        "experts show",
        "GET",
        "/experts",
        "print the number of tokens of each expert so far",
        show=experts,
    ),
    CtlCommand(
        "experts dump",
        "POST",
        "/dump_expert_distribution_record",
        "print the number of tokens of each expert, and count again from zero",
        show=experts,
    ),
    CtlCommand(
        "slow-down",
        "POST",
        "/slow_down",
        "make every step take at least this time",
        (Argument("seconds", "a number of seconds, or off", seconds_or_off, "forward_sleep_time"),),
    ),
    CtlCommand("freeze-gc", "POST", "/freeze_gc", "freeze the garbage collectors"),
    CtlCommand(
        "logging",
        "POST",
        "/configure_logging",
        "change what is logged",
        (
            Argument("--log-level", "debug, info, warning, error"),
            Argument("--log-requests", "on or off: a line for each finished request", switch),
        ),
    ),
    CtlCommand("loads", "GET", "/v1/loads", "how busy the engine is"),
    CtlCommand(
        "sessions open",
        "POST",
        "/open_session",
        "open a session",
        (
            Argument("session_id", "its name; one is made up if not given", optional=True),
            Argument("--capacity", "tokens of all its turns together", int),
            Argument("--timeout", "seconds without a request, after which it is closed", float),
        ),
    ),
    CtlCommand("sessions close", "POST", "/close_session", "close a session", (SESSION,)),
    CtlCommand(
        "adapters load",
        "POST",
        "/load_lora_adapter",
        "load an adapter (LoRA)",
        (ADAPTER, Argument("lora_path", "its folder"), PINNED),
    ),
    CtlCommand("adapters unload", "POST", "/unload_lora_adapter", "unload an adapter", (ADAPTER,)),
    CtlCommand(
        "weights update",
        "POST",
        "/update_weights_from_disk",
        "load other weights of the same shape",
        (ABORT_ALL,),
        UpdateWeightsFromDisk,
    ),
    CtlCommand(
        "weights get",
        "POST",
        "/get_weights_by_name",
        "print the first values of a tensor",
        body=GetWeightsByName,
    ),
    CtlCommand(
        "weights version",
        "GET",
        "/model_info",
        "name of the weights that are in use",
        show=weight_version,
    ),
    CtlCommand(
        "weights send",
        "POST",
        "/update_weights_from_tensor",
        "replace the weights that are in a file",
        (
            Argument("file", "a safetensors file here", content, sent_in="content"),
            VERSION,
            ABORT_ALL,
        ),
    ),
    CtlCommand(
        "weights join",
        "POST",
        "/init_weights_update_group",
        "join a group of processes from which weights come",
        body=InitWeightsUpdateGroup,
    ),
    CtlCommand(
        "weights receive",
        "POST",
        "/update_weights_from_distributed",
        "receive the weights that rank 0 of the group broadcasts",
        (ABORT_ALL,),
        UpdateWeightsFromDistributed,
    ),
    CtlCommand(
        "weights leave",
        "POST",
        "/destroy_weights_update_group",
        "leave a group",
        body=DestroyWeightsUpdateGroup,
    ),
    CtlCommand(
        "memory release",
        "POST",
        "/release_memory_occupation",
        "give memory of the device back to the system",
        (TAGS,),
    ),
    CtlCommand("memory resume", "POST", "/resume_memory_occupation", "allocate it again", (TAGS,)),
    CtlCommand(
        "rpc",
        "POST",
        "/rpc",
        "make any control request by name",
        (Argument("method", "its name"), Argument("--params", "a JSON object", json.loads)),
    ),
    CtlCommand(
        "requests",
        "GET",
        "/requests",
        "the queue and the open requests",
        (Argument("--limit", "so many", int),),
    ),
    CtlCommand(
        "explain",
        "GET",
        "/requests/{rid}",
        "what happened to a request, and why",
        (dataclasses.replace(RID, sent_in="path"),),
        show=traces,
    ),
    CtlCommand(
        "why",
        "GET",
        "/requests/{rid}",
        "why a request was slow: its cache misses and their cost, and all of its time",
        (dataclasses.replace(RID, sent_in="path"),),
        show=causes,
    ),
)
