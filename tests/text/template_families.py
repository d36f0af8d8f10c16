"""Chat templates with the constructs of well-known families, and conversations of all kinds, for
comparisons.

The templates are written for these tests. Each does what makes its family's own one hard: white
space control, macros, namespaces, loops over parts, content that is none, calls before and behind
the text, errors of its own.
"""

from __future__ import annotations

from typing import Any

LLAMA_2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set rest = messages[1:] %}
    {%- set before = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{%- else %}
    {%- set rest = messages %}
    {%- set before = '' %}
{%- endif %}
{%- for m in rest %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('turns of user and assistant take turns') }}
    {%- endif %}
    {%- set text = before + m['content'] if loop.index0 == 0 else m['content'] %}
    {%- if m['role'] == 'user' %}
        {{- bos_token + '[INST] ' + text.strip() + ' [/INST]' }}
    {%- elif m['role'] == 'assistant' %}
        {{- ' ' + text.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""

LLAMA_3 = """
{%- for m in messages %}
{%- set piece = '<|h|>' + m['role'] + '<|/h|>\\n\\n' + m['content'] | trim + '<|eot|>' %}
{%- if loop.first %}{% set piece = bos_token + piece %}{% endif %}
{{- piece }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|h|>assistant<|/h|>\\n\\n' }}{% endif %}"""

LLAMA_3_2 = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools_in_user is defined %}{% set tools_in_user = true %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- system + '<|eot_id|>' }}
{%- if tools_in_user and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content'] | trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception('there is no first message of the user for the tools') }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL_1 = """{{ bos_token }}{% for m in messages %}
{%- if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}
{%- else %}{{ raise_exception('only user and assistant speak here') }}{% endif %}
{%- endfor %}"""

MISTRAL_3 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in turns %}
    {%- if not (m.role == 'tool' or (m.tool_calls is defined and m.tool_calls is not none)) %}
        {%- if (m['role'] == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m['role'] == 'user' %}
        {%- if tools is not none and (m == users[-1]) %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for t in tools %}
                {%- set t = t.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in t.items() if key != 'return' %}
                    {%- if value is string %}{{ '"' + key + '": "' + value + '"' }}
                    {%- else %}{{ '"' + key + '": ' + value | tojson }}{% endif %}
                    {%- if not loop.last %}{{ ', ' }}{% endif %}
                {%- endfor %}
                {{- '}}' }}{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' }}{% endif %}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{ '[INST] ' + system + '\\n\\n' + m['content'] + '[/INST]' }}
        {%- else %}{{ '[INST] ' + m['content'] + '[/INST]' }}{% endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{ ', ' }}{% else %}{{ ']' + eos_token }}{% endif %}
        {%- endfor %}
    {%- elif m['role'] == 'assistant' %}
        {{- ' ' + m['content'] | trim + eos_token }}
    {%- elif m['role'] == 'tool' %}
        {%- if m.content is defined and m.content.content is defined %}{% set content = m.content.content %}
        {%- else %}{% set content = m.content %}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('there is no such role') }}{% endif %}
{%- endfor %}"""

MISTRAL_SMALL = """
{%- set today = '2026-01-01' %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{% set system = messages[0]['content'] %}
    {%- else %}{% set system = messages[0]['content'][0]['text'] %}{% endif %}
    {%- set turns = messages[1:] %}
{%- else %}{% set system = 'It is ' + today %}{% set turns = messages %}{% endif %}
{{- '[SYSTEM]' + system + '[/SYSTEM]' }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if message['content'] is string %}{{ '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}{{ block['text'] }}
                {%- else %}{{ raise_exception('blocks are text') }}{% endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
            {%- endfor %}
        {%- elif message['content'] is string %}{{ message['content'] }}
        {%- else %}{{ message['content'][0]['text'] }}{% endif %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}{{ '[RESULT]' + message.content + '[/RESULT]' }}
    {%- else %}{{ raise_exception('there is no such role: ' + message['role']) }}{% endif %}
{%- endfor %}"""

QWEN_2_5 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}{{ 'You help.' }}{% endif %}
    {{- '\\n\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools> in <tool_call></tool_call>\\n<|im_end|>\\n' }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{ tool_call.name }}{{ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != 'tool') %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' }}{{ message.content }}{{ '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN_3 = """
{%- set ns = namespace(looking=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.looking and message.role == 'user' and message.content is string and not (message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.looking = false %}{% set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}{% set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{ '<|im_start|>assistant\\n' + content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{ call.function.arguments }}
            {%- else %}{{ call.function.arguments | tojson }}{% endif %}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

DEEPSEEK_R1 = """
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(first=false, tool=false, after_tool=false, system='') %}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{% set ns.tool = false %}{{ '<U>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and message['content'] is none %}
        {%- set ns.tool = false %}
        {%- for tool in message['tool_calls'] %}
            {%- if not ns.first %}
                {{- '<A><calls><call>' + tool['type'] + '<sep>' + tool['function']['name'] + '\\n```json\\n' }}
                {{- tool['function']['arguments'] | tojson }}{{ '\\n```<end>' }}
                {%- set ns.first = true %}
            {%- else %}
                {{- '\\n<call>' + tool['type'] + '<sep>' + tool['function']['name'] }}
                {{- tool['function']['arguments'] | tojson }}{{ '<end>' }}
            {%- endif %}
        {%- endfor %}
        {{- '</calls>' + eos_token }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- if ns.after_tool %}{{ '</out>' + message['content'] + eos_token }}{% set ns.after_tool = false %}
        {%- else %}
            {%- set content = message['content'] %}
            {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
            {{- '<A>' + content + eos_token }}
        {%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- set ns.after_tool = true %}
        {{- '<out>' + message['content'] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.after_tool %}{{ '<A><think>\\n' }}{% endif %}"""

CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

GEMMA = """
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{% set prefix = messages[0]['content'] + '\\n\\n' %}
    {%- else %}{% set prefix = messages[0]['content'][0]['text'] + '\\n\\n' %}{% endif %}
    {%- set turns = messages[1:] %}
{%- else %}{% set prefix = '' %}{% set turns = messages %}{% endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user, model, user, model') }}{% endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{ '<turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable %}
        {%- for item in message['content'] %}{% if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}
    {%- else %}{{ raise_exception('content has no known form') }}{% endif %}
    {{ '</turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}
"""

PHI_3 = """{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '<|end|>\\n' }}
{%- elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '<|end|>\\n' }}
{%- elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

HERMES = """
{%- macro as_type(spec) %}
    {%- set names = {'string': 'str', 'integer': 'int'} %}
    {%- if names[spec.type] is defined %}{{ names[spec.type] }}
    {%- elif spec.type == 'array' %}{{ 'list[' + as_type(spec['items']) + ']' }}
    {%- else %}{{ 'Any' }}{% endif %}
{%- endmacro %}
{{- bos_token }}
{{- '<|im_start|>system\\n<tools> ' }}
{%- for tool in tools or [] %}
    {%- if tool.function is defined %}{% set tool = tool.function %}{% endif %}
    {{- tool.name + '(' }}
    {%- for name, spec in (tool.parameters or {}).get('properties', {}).items() %}
        {{- name + ': ' + as_type(spec) }}{% if not loop.last %}{{ ', ' }}{% endif %}
    {%- endfor %}
    {{- ') ' + (tool.parameters or {}) | tojson }}
{%- endfor %}
{{- ' </tools> <tool_call><|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' }}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- {'arguments': tool_call.arguments, 'name': tool_call.name} | tojson }}{{ '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>tool\\n' }}{% endif %}
        {{- '<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response>\\n' if not loop.last else '\\n</tool_response>' }}
        {%- if not loop.last and loop.nextitem.role != 'tool' %}{{ '<|im_end|>' }}{% elif loop.last %}{{ '<|im_end|>' }}{% endif %}
    {%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

COMMAND_R = """{{ bos_token }}
{%- macro written(value, indent) %}{{ value | tojson(indent=indent, sort_keys=true) }}{% endmacro %}
{%- set names = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM', 'tool': 'SYSTEM'} %}
{%- for message in messages if message.role in names %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<TURN><CHATBOT>Action: ```json\\n[' }}
        {%- for call in message.tool_calls %}
            {{- written({'tool_name': call.function.name, 'parameters': call.function.arguments}, 4) | indent(4, first=true) }}
            {%- if not loop.last %}{{ ',\\n' }}{% endif %}
        {%- endfor %}
        {{- ']```<END>' }}
    {%- else %}
        {{- '<TURN><' ~ names[message.role] ~ '>' ~ message.content ~ '<END>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<TURN><CHATBOT>' }}{% endif %}"""

PARTS = """
{%- macro shown(content, is_system) %}
    {%- if content is string %}{{ content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if 'text' in item %}{{ item.text }}{% else %}{{ raise_exception('an item is no text') }}{% endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}{{ '' }}
    {%- else %}{{ raise_exception('content has no known form') }}{% endif %}
{%- endmacro %}
{%- for message in messages %}
    {%- set content = shown(message.content, message.role == 'system') | trim %}
    {%- generation %}{{ '<' + message.role + '>' + content }}{% endgeneration %}
    {%- for call in message.tool_calls | default([], true) %}
        {%- for name, value in call.function.arguments | items %}
            {{- '<' + name + '=' + (value | tojson | safe if value is mapping or value is sequence and value is not string else value | string) + '>' }}
        {%- endfor %}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""

FAMILIES = {
    "Llama 2": LLAMA_2,
    "Llama 3": LLAMA_3,
    "Llama 3.2": LLAMA_3_2,
    "Mistral 1": MISTRAL_1,
    "Mistral 3": MISTRAL_3,
    "Mistral Small": MISTRAL_SMALL,
    "Qwen 2.5": QWEN_2_5,
    "Qwen 3": QWEN_3,
    "DeepSeek R1 distilled": DEEPSEEK_R1,
    "ChatML": CHATML,
    "Gemma": GEMMA,
    "Phi 3": PHI_3,
    "Hermes": HERMES,
    "Command R": COMMAND_R,
    "macros over parts": PARTS,
}

Message = dict[str, Any]
USER: Message = {"role": "user", "content": " How is it in Zürich? 🎉 "}
SYSTEM: Message = {"role": "system", "content": "Be brief.\n"}
ANSWER: Message = {"role": "assistant", "content": "Fine.\n"}
TEXTS = [{"type": "text", "text": "How is "}, {"type": "text", "text": "it?"}]


def _call(id: str, **arguments: Any) -> Message:
    return {"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


def _asks(*calls: Message, **fields: Any) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


ONE = _call("abcdef123", city="Zürich", days=3)
OTHER = _call("abcdef124", city="a \"b\" <c> & 'd'", at={"x": [1, None]})
RESULT: Message = {
    "role": "tool",
    "tool_call_id": "abcdef123",
    "name": "weather",
    "content": '{"sun": true}',
}
OTHER_RESULT: Message = {**RESULT, "tool_call_id": "abcdef124", "content": "rain"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <now> & \"here\", in 'ö'",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "news", "description": "", "parameters": {"type": "object"}},
    },
]

CONVERSATIONS: dict[str, list[Message]] = {
    "one question": [USER],
    "a system message": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, USER],
    "an answer last": [USER, ANSWER],
    "two of the user": [USER, USER],
    "an empty text": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, USER],
    "a call": [USER, _asks(ONE), RESULT],
    "a call and an answer": [SYSTEM, USER, _asks(ONE), RESULT, ANSWER, USER],
    "two calls": [USER, _asks(ONE, OTHER), RESULT, OTHER_RESULT, ANSWER],
    "a call behind a text": [USER, _asks(ONE, content="Let me see."), RESULT],
    "a call with an empty text": [USER, _asks(ONE, content=""), RESULT],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "Hm.\n"}, USER],
    "reasoning in the text": [USER, {**ANSWER, "content": "<think>\nHm.\n</think>\n\nFine."}, USER],
    "parts": [{"role": "system", "content": TEXTS[:1]}, {"role": "user", "content": TEXTS}],
}
