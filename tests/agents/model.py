"""A scripted model for coding agents: a front on a loopback port that says what a script says.

The chat template is one of a family that thinks, has calls in JSON, and puts results of tools into
the user's turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

import tests.server.fake as fake
from tests.server.fake import RunningServer, as_bytes, running
from tests.text.tokens import byte_backend
from weft.config.server import ServerConfig
from weft.text.tokenizer import Tokenizer

CONTEXT = 2_000_000  # tokens, which are bytes here
TEMPLATE = """
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif -%}
# Functions
<functions>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</functions>
Write each call as JSON with name and arguments between <tool_call> and </tool_call>.<|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- set ns = namespace(question=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'system' and loop.first -%}
{%- elif m.role == 'system' -%}
LATE
{%- elif m.role == 'user' -%}
<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' -%}
<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.question %}<think>
{{ m.reasoning_content.strip('\\n') }}
</think>

{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] -%}
{%- if m.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
TAKES_LATE = "<|im_start|>system\n{{ m.content }}<|im_end|>\n"
REFUSES_LATE = "{{ raise_exception('a system message must come first') }}"
RESULT = "<tool_response>\n"


@contextlib.contextmanager
def scripted_model(
    say: Callable[[str], str],
    *,
    port: int = 0,
    context: int = CONTEXT,
    told: int = 0,
    late: str = TAKES_LATE,
) -> Iterator[tuple[RunningServer, list[str]]]:
    """The server, and the prompts that it gets. `say(prompt)` is what the model writes. `told`: the
    context that clients are told, if it is another."""
    prompts: list[str] = []

    def script(ids: list[int]) -> list[int]:
        prompt = bytes(id for id in ids if id < 256).decode(errors="replace")
        prompts.append(prompt)
        return as_bytes(say(prompt))

    config = ServerConfig(drain_s=1.0, tool_call_parser="hermes", reasoning_parser="qwen3")
    tokenizer = Tokenizer(byte_backend(), {}, {"default": TEMPLATE.replace("LATE\n", late)})
    ready = msgspec.structs.replace(
        fake.READY, context_length=context, max_prompt_tokens=context - 1, kv_tokens=2 * context
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake, "CONTEXT", told or context)
        patch.setattr(fake, "READY", ready)
        options: dict[str, Any] = {"port": port} if port else {}
        with running(config, tokenizer=tokenizer, **options) as server:
            server.engine.script = script
            yield server, prompts
