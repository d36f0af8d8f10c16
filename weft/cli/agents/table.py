"""How each coding agent is pointed at a server: one row per agent.

A row sets variables, adds arguments, and perhaps writes files into a folder that exists only while
the agent runs. It never changes a file of the user's, and turns off what would leave the machine:
telemetry, updates, the provider's own services. This module starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from weft.json_types import JsonObject


class AgentTarget(NamedTuple):
    """What an agent talks to."""

    url: str  # of the server, without /v1
    model: str
    small_model: str  # for titles and summaries
    context_length: int
    folder: str  # the agent's files of this run
    key: str


class Setup(NamedTuple):
    arguments: tuple[str, ...] = ()  # before those of the user
    variables: Mapping[str, str] = {}
    files: Mapping[str, str] = {}  # contents by name, in `AgentTarget.folder`


class Agent(NamedTuple):
    command: str
    install: str  # the one command that installs it
    setup: Callable[[AgentTarget], Setup]


# What brings a program that installs agents, where it is missing.
INSTALLERS = {
    "npm": "npm comes with Node.js: https://nodejs.org, or the package npm of your system",
    "uv": "uv comes by pip install uv",
    "brew": "brew comes from https://brew.sh",
}
NO_KEY = "none"  # for clients that insist on a key, if the server wants none
MAX_ANSWER = 32_000  # tokens of one answer that is asked for
_LITELLM = "OPENAI_API_BASE"  # how LiteLLM, below several agents, calls the address


def _claude(to: AgentTarget) -> Setup:
    tiers = {f"ANTHROPIC_DEFAULT_{tier}_MODEL": to.model for tier in ("OPUS", "SONNET", "FABLE")}
    return Setup(
        variables={
            "ANTHROPIC_BASE_URL": to.url,
            "ANTHROPIC_AUTH_TOKEN": to.key,
            "ANTHROPIC_API_KEY": "",  # the user's own would be asked about
            "ANTHROPIC_MODEL": to.model,
            **tiers,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": to.small_model,
            "CLAUDE_CODE_SUBAGENT_MODEL": to.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(to.context_length),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(to.context_length),
            # The prompt and this must fit into the context; its default is 32,000.
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_answer_len(to)),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
    )


def _codex(to: AgentTarget) -> Setup:
    provider: JsonObject = {
        "name": "weft",
        "base_url": f"{to.url}/v1",
        "wire_api": "responses",
        "env_key": "WEFT_API_KEY",
        "stream_idle_timeout_ms": 3_600_000,
    }
    settings: dict[str, object] = {
        "model": to.model,
        "model_provider": "weft",
        "model_context_window": to.context_length,
        "model_auto_compact_token_limit": to.context_length * 8 // 10,
        "web_search": "disabled",
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        "feedback.enabled": False,
    }
    settings |= {f"model_providers.weft.{name}": value for name, value in provider.items()}
    # JSON's texts, numbers and truth values are TOML's.
    pairs = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    arguments = tuple(word for pair in pairs for word in ("-c", pair))
    return Setup(arguments, {"WEFT_API_KEY": to.key})


def _opencode(to: AgentTarget) -> Setup:
    limit = {"context": to.context_length, "output": _answer_len(to)}
    config: JsonObject = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "weft": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "weft",
                "options": {"baseURL": f"{to.url}/v1", "apiKey": "{env:WEFT_API_KEY}"},
                "models": {
                    to.model: {"name": to.model, "limit": limit, "tool_call": True},
                    to.small_model: {"name": to.small_model, "limit": limit, "tool_call": True},
                },
            }
        },
        "model": f"weft/{to.model}",
        "small_model": f"weft/{to.small_model}",
        "enabled_providers": ["weft"],
        "autoupdate": False,
        "share": "disabled",
    }
    return Setup(
        variables={
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "WEFT_API_KEY": to.key,
        }
    )


def _qwen(to: AgentTarget) -> Setup:
    settings = {
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "model": {"generationConfig": {"contextWindowSize": to.context_length}},
    }
    return Setup(
        ("--auth-type", "openai", "--model", to.model),
        {
            "OPENAI_BASE_URL": f"{to.url}/v1",
            "OPENAI_API_KEY": to.key,
            "OPENAI_MODEL": to.model,
            "QWEN_TELEMETRY_ENABLED": "false",
            "QWEN_CODE_SYSTEM_DEFAULTS_PATH": f"{to.folder}/defaults.json",
        },
        {"defaults.json": json.dumps(settings, indent=2)},
    )


def _crush(to: AgentTarget) -> Setup:
    model = {
        "id": to.model,
        "name": to.model,
        "context_window": to.context_length,
        "default_max_tokens": _answer_len(to),
    }
    chosen = {"provider": "weft", "model": to.model}
    config: JsonObject = {
        "$schema": "https://charm.land/crush.json",
        "providers": {
            "weft": {
                "type": "openai-compat",
                "base_url": f"{to.url}/v1",
                "api_key": "$WEFT_API_KEY",
                "models": [model],
            }
        },
        "models": {"large": chosen, "small": {**chosen, "model": to.small_model}},
        "options": {"disable_metrics": True, "disable_provider_auto_update": True},
    }
    return Setup(
        variables={
            "CRUSH_GLOBAL_CONFIG": to.folder,
            "CRUSH_DISABLE_METRICS": "1",
            "CRUSH_DISABLE_PROVIDER_AUTO_UPDATE": "1",
            "WEFT_API_KEY": to.key,
        },
        files={"crush.json": json.dumps(config, indent=2)},
    )


def _continue(to: AgentTarget) -> Setup:
    model = {
        "name": to.model,
        "provider": "openai",
        "model": to.model,
        "apiBase": f"{to.url}/v1",
        "apiKey": to.key,
        "useResponsesApi": False,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {
            "contextLength": to.context_length,
            "maxTokens": _answer_len(to),
        },
    }
    config = {"name": "weft", "version": "1.0.0", "schema": "v1", "models": [model]}
    return Setup(
        ("--config", f"{to.folder}/config.yaml"),
        {"CONTINUE_METRICS_ENABLED": "0"},
        {"config.yaml": json.dumps(config, indent=2)},  # JSON is YAML
    )


def _aider(to: AgentTarget) -> Setup:
    name = f"openai/{to.model}"
    facts = {
        name: {
            "max_input_tokens": to.context_length,
            "max_output_tokens": _answer_len(to),
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }
    return Setup(
        (
            *("--model", name, "--weak-model", f"openai/{to.small_model}"),
            *("--model-metadata-file", f"{to.folder}/models.json"),
            *("--no-check-update", "--no-show-release-notes", "--analytics-disable"),
            "--no-show-model-warnings",
        ),
        {
            _LITELLM: f"{to.url}/v1",
            "OPENAI_API_KEY": to.key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        {"models.json": json.dumps(facts, indent=2)},
    )


def _goose(to: AgentTarget) -> Setup:
    return Setup(
        variables={
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": to.model,
            "GOOSE_CONTEXT_LIMIT": str(to.context_length),
            "GOOSE_DISABLE_KEYRING": "1",
            "GOOSE_TELEMETRY_ENABLED": "false",
            "OPENAI_HOST": to.url,
            "OPENAI_API_KEY": to.key,
        }
    )


def _mini(to: AgentTarget) -> Setup:
    return Setup(
        ("--model", f"openai/{to.model}"),
        {
            _LITELLM: f"{to.url}/v1",
            "OPENAI_API_KEY": to.key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
    )


def _openhands(to: AgentTarget) -> Setup:
    return Setup(
        ("--override-with-envs",),
        {
            "LLM_BASE_URL": f"{to.url}/v1",
            "LLM_API_KEY": to.key,
            "LLM_MODEL": f"openai/{to.model}",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
            # It fetches skills from there at each start, and has no option against it.
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "url.file:///none.insteadOf",
            "GIT_CONFIG_VALUE_0": "https://github.com/OpenHands/extensions",
        },
    )


def _answer_len(to: AgentTarget) -> int:
    """Tokens of an answer: a quarter of the context, so that the prompt has room."""
    return min(MAX_ANSWER, max(to.context_length // 4, 1))


AGENTS: dict[str, Agent] = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
    "qwen": Agent("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
    "crush": Agent("crush", "npm install -g @charmland/crush", _crush),
    "continue": Agent("cn", "npm install -g @continuedev/cli", _continue),
    "aider": Agent("aider", "uv tool install aider-chat", _aider),
    "goose": Agent("goose", "brew install block-goose-cli", _goose),
    "mini": Agent("mini", "uv tool install mini-swe-agent", _mini),
    "openhands": Agent("openhands", "uv tool install openhands --python 3.12", _openhands),
}
