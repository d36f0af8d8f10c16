"""`weft help TOPIC`: a screen for a question, with the commands that answer it and the page that
says more. Knows only texts."""

from __future__ import annotations

from typing import NamedTuple


class Topic(NamedTuple):
    about: str
    text: str
    page: str  # below docs/ of the sources


TOPICS = {
    "models": Topic(
        "which models weft serves, and how to name them",
        """\
weft serve                            SmolLM2-135M-Instruct where it is installed, else weft-nano
weft serve ORG/REPO                   an id on the Hugging Face hub; weft pull fetches it
weft serve ORG/REPO-GGUF:Q4_K_M       one type of a repository with GGUF files
weft serve ./folder  ./model.gguf     config.json, tokenizer.json, *.safetensors; or a GGUF file
weft serve A B C --memory 16          several models behind one address, loaded by request
weft list, show, rm, cp               the models of this machine
weft doctor MODEL                     whether it can be served, and fits, without loading it""",
        "start/your-model.md",
    ),
    "files": Topic(
        "where models, caches and settings are",
        """\
~/.cache/huggingface/hub              models of the hub (HF_HOME moves it)
~/.cache/weft                         what is cached by weft; WEFT_CACHE stands for ~/.cache
--config FILE, WEFT_CONFIG            settings: a TOML file whose keys are options with underscores
WEFT_KV_TOKENS=4096                   each option is also an environment variable
weft list                             shows what is there, and what it takes""",
        "guides/files.md",
    ),
    "memory": Topic(
        "what takes memory, and how to take less",
        """\
weft doctor MODEL                     weights, KV cache, and how many requests fit
--quantize int8, --quantize int4      smaller weights
--kv-dtype int8                       a smaller KV cache
--context-length N                    shorter requests
--kv-tokens N                         the KV cache in tokens; 0 takes a part of what is free""",
        "guides/memory.md",
    ),
    "speed": Topic(
        "why something is slow, and what can be changed",
        """\
weft ctl why ID                       where the time of one request went, and which option helps
weft bench roofline                   what this machine reaches with a model
weft tune                             which settings of a running server should change
weft plan                             how many users this machine serves""",
        "guides/tuning.md",
    ),
    "keys": Topic(
        "who may ask a server, and who may control it",
        """\
WEFT_API_KEY=...                      requests need it: Authorization: Bearer ...; /health does not
WEFT_ADMIN_API_KEY=...                the routes of administration need this one (weft ctl)
--host 0.0.0.0                        listens on all addresses: set a key first""",
        "guides/security.md",
    ),
    "errors": Topic(
        "what a message means, and what helps",
        """\
weft doctor                           checks the machine, the installation and the model
WEFT_LOG_LEVEL=debug weft COMMAND     shows where an error came from
GET /requests/ID                      why a request waited, and how it ended""",
        "guides/troubleshooting.md",
    ),
}


def topic(name: str) -> str:
    """The screen of one topic. Raises KeyError if there is none of this name."""
    found = TOPICS[name]
    return f"{found.about}\n\n{found.text}\n\nMore: docs/{found.page} of the sources of weft."


def topics() -> str:
    """One line for each topic."""
    return "\n".join(f"  {name:10} {found.about}" for name, found in TOPICS.items())
