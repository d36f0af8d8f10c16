"""Requests of all kinds, for texts that drafts guess well or badly."""

from __future__ import annotations

from typing import Any

from weft import Grammar

TEXT = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\n"
PROMPTS = [
    TEXT,
    TEXT + "def sub(a, b):\n",
    "import os\nimport sys\nimport os\nimport sys\n",
    "What does os.path.join do?",
]
RECORDS = """{"type": "array", "minItems": 3, "items": {"type": "object", "required": ["a", "b"],
  "properties": {"a": {"enum": ["def", "return", "import"]}, "b": {"type": "string"}}}}"""
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "top_k": 5, "top_p": 0.9, "seed": 4},
    {"temperature": 0.7, "min_p": 0.05, "frequency_penalty": 0.6, "presence_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.5, "min_new_tokens": 20, "logit_bias": {11: 2.0}, "seed": 5},
    {"temperature": 0.0, "bad_words": ("return", " a + b")},
    {"temperature": 0.0, "stop": ("return",)},
    {"temperature": 0.0, "grammar": Grammar("regex", "[ab ]{4,12}")},
    {"temperature": 0.7, "grammar": Grammar("json_schema", RECORDS), "seed": 7},
    {"temperature": 0.9, "n": 2, "seed": 6},
]
