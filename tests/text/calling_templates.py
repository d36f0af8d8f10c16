"""Chat templates with the constructs of families that write calls in ways of their own.

The templates are written for these tests: each writes the calls of the history as its family's
does, and little else.
"""

from __future__ import annotations

from typing import NamedTuple


class CallingTemplate(NamedTuple):
    """A template, and the formats that it shows."""

    tools: str
    reasoning: str | None
    source: str


_LOOP = "{%- for message in messages -%}<|turn_of|>{{ message.role }}\n"
_CALLS = "{%- for call in message.tool_calls or [] -%}{%- set call = call.function -%}"
_END = "{%- endfor -%}{{ '<|end_of_turn|>' }}{%- endfor -%}"

QWEN3_CODER = (
    _LOOP
    + "{{ message.content }}"
    + _CALLS
    + """{{ '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in call.arguments|items -%}
    {{ '<parameter=' + key + '>\\n' }}
    {{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
    {{- '\\n</parameter>\\n' }}
{%- endfor -%}
{{ '</function>\\n</tool_call>' }}"""
    + _END
)
GLM45 = (
    _LOOP
    + "{{ '<think></think>' }}{{ message.content }}"
    + _CALLS
    + """{{ '\\n<tool_call>' + call.name }}
{% for key, value in call.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value | tojson if value is not string else value }}</arg_value>
{% endfor %}
</tool_call>"""
    + _END
)
MINIMAX_M2 = (
    _LOOP
    + "{{ message.content }}{% if message.tool_calls %}{{ '\\n<minimax:tool_call>\\n' }}"
    + _CALLS
    + """{{ '<invoke name="' + call.name + '">\\n' }}
{%- for key, value in call.arguments|items -%}
    {{ '<parameter name="' + key + '">' }}
    {{- value | tojson if value is not string else value }}
    {{- '</parameter>\\n' }}
{%- endfor -%}
{{ '</invoke>\\n' }}{%- endfor -%}{{ '</minimax:tool_call>' }}{%- endif -%}{{ '<|end_of_turn|>' }}{%- endfor -%}"""
)
KIMI_K2 = (
    _LOOP
    + """{% if message.role == 'tool' %}## Return of {{ message.tool_call_id }}
{% endif %}{{ '<think></think>' if message.role == 'assistant' }}{{ message.content }}
{%- if message.tool_calls -%}<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor -%}<|tool_calls_section_end|>{%- endif -%}{{ '<|end_of_turn|>' }}{%- endfor -%}"""
)
GPT_OSS = """{%- for message in messages -%}
{%- if message.role == 'assistant' and message.tool_calls -%}
    {%- set call = message.tool_calls[0].function -%}
    {%- if message.content and message.thinking -%}
        {{- raise_exception('content or thinking, but not both') }}
    {%- elif message.content -%}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
    {%- elif message.thinking -%}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
    {%- endif -%}
    {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
    {{- call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' -%}
    {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else -%}
    {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"""
FUNCTION_GEMMA = (
    """{%- macro write(value) -%}
{%- if value is string -%}<escape>{{ value }}<escape>
{%- elif value is boolean -%}{{ 'true' if value else 'false' }}
{%- elif value is mapping -%}{
{%- for key in value -%}{{ key }}:{{ write(value[key]) }}{{ ',' if not loop.last }}{%- endfor -%}}
{%- elif value is sequence -%}[
{%- for one in value -%}{{ write(one) }}{{ ',' if not loop.last }}{%- endfor -%}]
{%- else -%}{{ value }}
{%- endif -%}
{%- endmacro -%}"""
    + _LOOP
    + "{{ message.content }}"
    + _CALLS
    + "<start_function_call>call:{{ call.name }}{{ write(call.arguments) }}<end_function_call>"
    + _END
)
PHI4 = (
    "{%- for tool in tools or [] -%}<|tool|>{{ tool | tojson }}<|/tool|>{%- endfor -%}"
    + _LOOP
    + "{{ message.content }}"
    + _CALLS
    + "{{ '<|tool_call|>' + call | tojson + '<|/tool_call|>' }}"
    + _END
)
GRANITE = (
    "{% if tools %}Respond only with <|tool_call|> followed by a JSON list of tools used.{% endif %}"
    "{# Here is my thought process: Here is my response: #}"
    + _LOOP
    + "{{ message.content }}{% if message.tool_calls %}{{ '<|tool_call|>[' }}"
    + _CALLS
    + "{{ call | tojson }}{{ ', ' if not loop.last }}{%- endfor -%}]{%- endif -%}"
    "{{ '<|end_of_turn|>' }}{%- endfor -%}"
)

CALLING_TEMPLATES = {
    "Qwen 3 Coder": CallingTemplate("qwen3_coder", None, QWEN3_CODER),
    "GLM 4.5": CallingTemplate("glm45", "qwen3", GLM45),
    "MiniMax M2": CallingTemplate("minimax_m2", None, MINIMAX_M2),
    "Kimi K2": CallingTemplate("kimi_k2", "kimi_k2", KIMI_K2),
    "gpt-oss": CallingTemplate("gpt_oss", "gpt_oss", GPT_OSS),
    "FunctionGemma": CallingTemplate("functiongemma", None, FUNCTION_GEMMA),
    "Phi-4-mini": CallingTemplate("phi4", None, PHI4),
    "Granite": CallingTemplate("granite", "granite", GRANITE),
}
