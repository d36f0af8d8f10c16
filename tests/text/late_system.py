"""Chat templates that take a system message late, or refuse it."""

from __future__ import annotations

# As Qwen 3.5 and others: the system speaks first, or not at all.
STRICT = """{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('the system speaks first') }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
BLOCK = "<system>\nIt is late.\n</system>"
