"""Texts as models of today write them, by the format: calls, what is no call, and messages with
reasoning."""

from __future__ import annotations

from typing import Any, NamedTuple

NAMES = frozenset({"f", "g"})
SCHEMA_OF_F: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {}},
        "o": {"$ref": "#/$defs/point"},
        "b": {"type": "boolean"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "s": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"point": {"type": "object"}},
}
SCHEMAS = {"f": SCHEMA_OF_F, "g": {"type": "object", "properties": {}}}

Call = tuple[str, dict[str, Any]]


class Written(NamedTuple):
    """A text, and what is in it."""

    format: str
    text: str
    around: str  # what is no call
    calls: list[Call]


CITY = ("f", {"s": "Oslo", "n": 3})
ALL = (
    "f",
    {
        "s": 'a "b"\n<c> \\ 5',
        "n": -7,
        "x": 1.5,
        "b": True,
        "a": [1, {"k": "}"}],
        "o": {"y": None},
        "maybe": None,
    },
)

CALLS = [
    Written(
        "generic",
        'Well.\n<tool_call>\n{"name": "f", "arguments": {"s": "Oslo", "n": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\nBye',
        "Well.\nBye",
        [CITY, ("g", {})],
    ),
    Written(
        "generic",
        '<answer>Well. <tool_call>[{"name": "f", "arguments": {"s": "Oslo", "n": 3}}, '
        '{"name": "g"}]</tool_call>',
        "Well. ",
        [CITY, ("g", {})],
    ),
    Written("generic", "<answer>\nSay </answer> to end.</answer>\n", "\nSay </answer> to end.", []),
    Written("generic", 'Hm <answer>So:</answer> <tool_call>{"name": "g"}', "Hm So:", [("g", {})]),
    Written(
        "qwen3_coder",
        "Well.\n<tool_call>\n<function=f>\n<parameter=s>\nOslo\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>\nBye",
        "Well.\nBye",
        [CITY],
    ),
    Written(
        "qwen3_coder",
        '<tool_call>\n<function=f>\n<parameter=s>\na "b"\n<c> \\ 5\n</parameter>\n'
        "<parameter=n>\n-7\n</parameter>\n<parameter=x>\n1.5\n</parameter>\n"
        "<parameter=b>\nTrue\n</parameter>\n<parameter=a>\n[1, {'k': '}'}]\n</parameter>\n"
        '<parameter=o>\n{"y": null}\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "",
        [ALL, ("g", {})],
    ),
    # Qwen 3 Coder leaves the outer tag out, now and then.
    Written(
        "qwen3_coder",
        "Well. <function=g>\n</function>\n</tool_call>",
        "Well. ",
        [("g", {})],
    ),
    Written(
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\n\n two lines\n\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [("f", {"s": "\n two lines\n"})],
    ),
    Written(
        "seed_oss",
        "<seed:tool_call>\n<function=f>\n<parameter=s>Oslo</parameter>\n"
        "<parameter=n>3</parameter>\n</function>\n</seed:tool_call>",
        "",
        [CITY],
    ),
    Written(
        "glm45",
        "Ok\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
        "Ok\n",
        [CITY, ("g", {})],
    ),
    Written(
        "glm45",
        '<tool_call>f<arg_key>s</arg_key><arg_value>a "b"\n<c> \\ 5</arg_value>'
        "<arg_key>n</arg_key><arg_value>-7</arg_value><arg_key>x</arg_key><arg_value>1.5"
        "</arg_value><arg_key>b</arg_key><arg_value>true</arg_value><arg_key>a</arg_key>"
        '<arg_value>[1, {"k": "}"}]</arg_value><arg_key>o</arg_key><arg_value>{"y": null}'
        "</arg_value><arg_key>maybe</arg_key><arg_value>null</arg_value></tool_call>",
        "",
        [ALL],
    ),
    Written(
        "minimax_m2",
        'So:\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">Oslo</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n'
        "</minimax:tool_call>",
        "So:\n",
        [CITY, ("g", {})],
    ),
    Written(
        "minimax_m1",
        '<tool_calls>\n{"name": "f", "arguments": {"s": "Oslo", "n": 3}}\n'
        '{"name": "g", "arguments": {}}\n</tool_calls> Bye',
        "Bye",
        [CITY, ("g", {})],
    ),
    Written(
        "deepseek_v32",
        'Ok\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="s" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="q" string="true">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Ok\n",
        [("f", {"s": "Oslo", "n": 3, "q": "5"}), ("g", {})],
    ),
    Written(
        "step3",
        "Ok<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="f">\n<steptml:parameter name="s">Oslo</steptml:parameter>\n'
        '<steptml:parameter name="n">3</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>",
        "Ok",
        [CITY],
    ),
    Written(
        "lfm2",
        'Ok <|tool_call_start|>[f(s="Oslo", n=3), g()]<|tool_call_end|>Bye',
        "Ok Bye",
        [CITY, ("g", {})],
    ),
    Written(
        "hunyuan_a13b",
        '<tool_calls>[{"name": "f", "arguments": {"s": "Oslo", "n": 3}}, {"name": "g"}]</tool_calls>',
        "",
        [CITY, ("g", {})],
    ),
    Written(
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", '
        '"parameters": {"s": "Oslo", "n": 3}},\n    {"tool_call_id": "1", "tool_name": "g", '
        '"parameters": {}}\n]<|END_ACTION|>',
        "",
        [CITY, ("g", {})],
    ),
    Written(
        "apertus",
        'Ok <|tools_prefix|>[{"f": {"s": "Oslo", "n": 3}}, {"g": {}}]<|tools_suffix|>Bye',
        "Ok Bye",
        [CITY, ("g", {})],
    ),
    Written(
        "olmo3",
        'Ok\n<function_calls>\nf(s="Oslo", n=3)\ng()\n</function_calls>',
        "Ok\n",
        [CITY, ("g", {})],
    ),
    Written(
        "olmo3",
        "<function_calls>f(s='a \"b\"\\n<c> \\\\ 5', n=-7, x=1.5, b=true, "
        "a=[1, {'k': '}'}], o={'y': null}, maybe=None)",
        "",
        [ALL],
    ),
    Written(
        "kimi_k2",
        "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"s": "Oslo", "n": 3}<|tool_call_end|><|tool_call_begin|>g:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "Ok.",
        [CITY, ("g", {})],
    ),
    Written(
        "gpt_oss",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"s": "Oslo", "n": 3}<|call|>',
        "",
        [CITY],
    ),
    # The recipient makes the call, on whatever channel, and may stand behind the role.
    Written(
        "gpt_oss",
        ' to=functions.f<|channel|>analysis code<|message|>{"s": "Oslo", "n": 3}<|call|>'
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}<|end|>",
        "",
        [CITY, ("g", {})],
    ),
    Written(
        "gpt_oss",
        "Plan<|start|>assistant<|channel|>commentary to=functions.g<|message|><|call|>",
        "Plan",
        [("g", {})],
    ),
    Written(
        "gpt_oss",
        "<|start|>assistant<|start|>assistant<|channel|>commentary to=functions.g<|message|>{}",
        "<|start|>assistant",
        [("g", {})],
    ),
    Written(
        "functiongemma",
        "<start_function_call>call:f{n:3,s:<escape>Oslo<escape>}<end_function_call>"
        "<start_function_call>call:g{}<end_function_call>",
        "",
        [CITY, ("g", {})],
    ),
    Written(
        "gemma4",
        'Ok <|tool_call>call:f{a:[1,{k:<|"|>}<|"|>}],b:true,maybe:null,n:-7,o:{y:null},'
        's:<|"|>a "b"\n<c> \\ 5<|"|>,x:1.5}<tool_call|>',
        "Ok ",
        [ALL],
    ),
    Written(
        "gemma4", "<|tool_call>call:f{s:5,n:5,q:hm}", "", [("f", {"s": "5", "n": 5, "q": "hm"})]
    ),
    Written(
        "phi4",
        'Hm <|tool_call|>{"name": "f", "arguments": {"s": "Oslo", "n": 3}}<|/tool_call|>',
        "Hm ",
        [CITY],
    ),
    Written(
        "phi4",
        'functools[{"name": "f", "arguments": {"s": "Oslo", "n": 3}}, {"name": "g", "arguments": {}}]',
        "",
        [CITY, ("g", {})],
    ),
    Written(
        "granite",
        '<|tool_call|>[{"name": "f", "arguments": {"s": "Oslo", "n": 3}}, {"name": "g"}]',
        "",
        [CITY, ("g", {})],
    ),
    Written("granite", '[{"name": "g", "arguments": {}}]', "", [("g", {})]),
    Written(
        "granite_20b",
        '<function_call> {"name": "g", "arguments": {}}\n<function_call> {"name": "f", '
        '"arguments": {"s": "Oslo", "n": 3}}',
        "",
        [("g", {}), CITY],
    ),
]

# What is no call: each text comes back as it is.
TEXTS = [
    ("generic", 'Say {"name": "f", "arguments": {}} to call.'),
    ("generic", '{"name": "f", "arguments": {}}'),
    ("generic", '<tool_call>\n{"name": "none", "arguments": {}}\n</tool_call>'),
    ("generic", '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'),
    ("generic", "write <tool_call> or </answer> or <answer"),
    ("qwen3_coder", "<tool_call>\n<function=none>\n</function>\n</tool_call>"),
    ("qwen3_coder", "a <function=f is no call"),
    ("qwen3_coder", "<tool_call>\n{}\n</tool_call>"),
    ("seed_oss", "<seed:tool_call>text</seed:tool_call>"),
    ("glm45", "<tool_call>none\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    ("glm45", "if a <tool_call and b"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="none">\n</invoke>\n</minimax:tool_call>'),
    ("minimax_m1", "<tool_calls>\nnone\n</tool_calls>"),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="none">\n</｜DSML｜invoke>'),
    ("step3", "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>none"),
    ("lfm2", "<|tool_call_start|>[h()]<|tool_call_end|>"),
    ("lfm2", "[g()]"),
    ("hunyuan_a13b", "<tool_calls>[]</tool_calls>"),
    ("cohere", '<|START_ACTION|>[{"tool_name": "none", "parameters": {}}]<|END_ACTION|>'),
    ("apertus", '<|tools_prefix|>[{"none": {}}]<|tools_suffix|>'),
    ("apertus", '<|tools_prefix|>[{"f": 5}]<|tools_suffix|>'),
    ("olmo3", "<function_calls>\ng()\nand so on\n</function_calls>"),
    ("olmo3", "<function_calls>\nh()\n</function_calls>"),
    ("olmo3", "a <function_calls> b"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    ("kimi_k2", "<|tool_call_begin|>none:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ("gpt_oss", "to=functions of x"),
    ("gpt_oss", "<|channel|>commentary to=functions.none <|constrain|>json<|message|>{}<|call|>"),
    ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>no JSON<|call|>"),
    ("gpt_oss", "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{}<|end|>"),
    ("gpt_oss", "<|channel|>" + "x" * 1_000 + "<|message|>{}"),
    ("functiongemma", "<start_function_call>call:none{}<end_function_call>"),
    ("functiongemma", "<start_function_call>call:f{a:}<end_function_call>"),
    ("functiongemma", "<start_function_call>call:f{a:1<end_function_call>"),
    ("gemma4", "<|tool_call>call:f{a:[1,]}}<tool_call|>"),
    ("gemma4", "<|tool_call>f(1)<tool_call|>"),
    ("phi4", "functools are tools, functools[1] too"),
    ("phi4", "<|tool_call|>print(1)"),
    ("granite", "[1, 2] is a list"),
    ("granite_20b", "<function_call> none"),
]

# A call that the text's end cuts off: the arguments that a stream has told until then.
CUT = [
    ("generic", '<tool_call>\n{"name": "f", "arguments": {"s": "Os', '{"s": "Os'),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\nOs", '{"s": "Os'),
    ("qwen3_coder", "<function=f>\n<parameter=n>\n3\n</parameter>\n<param", '{"n": 3'),
    ("glm45", "<tool_call>f\n<arg_key>s</arg_key><arg_value>Os</arg", '{"s": "Os</arg'),
    ("minimax_m2", '<invoke name="f"><parameter name="s">Os', '{"s": "Os'),
    ("kimi_k2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"s": "Os', '{"s": "Os'),
    ("gpt_oss", '<|channel|>commentary to=functions.f<|message|>{"s": "Os', '{"s": "Os'),
    ("cohere", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"s": "Os', '{"s": "Os'),
    ("apertus", '<|tools_prefix|>[{"f": {"s": "Os', '{"s": "Os'),
]


class Thought(NamedTuple):
    """A text with reasoning."""

    format: str
    prompt_end: str
    text: str
    reasoning: str
    answer: str


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
TO_F = '<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"n": 3}<|call|>'
THOUGHTS = [
    Thought(
        "gpt_oss", "<|start|>assistant", f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.<|return|>", "Hm.", "Yes."
    ),
    Thought("gpt_oss", "<|start|>assistant", f"{ANALYSIS}Hm.<|end|>{FINAL}Yes.", "Hm.", "Yes."),
    Thought("gpt_oss", f"<|start|>assistant{ANALYSIS}", f"Hm.<|end|>{FINAL}Yes.", "Hm.", "Yes."),
    Thought("gpt_oss", FINAL, "Yes.<|return|>", "", "Yes."),
    Thought("gpt_oss", "<|start|>assistant", '{"a": 1}', "", '{"a": 1}'),
    Thought(
        "gpt_oss",
        "<|start|>assistant",
        f"{ANALYSIS}One.<|end|><|start|>assistant{ANALYSIS}Two.<|end|>"
        f"<|start|>assistant<|channel|>commentary<|message|>Plan.<|end|>{FINAL}Yes.",
        "One.\nTwo.",
        "Plan.\nYes.",
    ),
    Thought("gpt_oss", "<|start|>assistant", f"{ANALYSIS}Hm.<|end|>{TO_F}", "Hm.", TO_F),
    # An end that is missing, a header without a message, one that the end cuts off.
    Thought("gpt_oss", "<|start|>assistant", f"{ANALYSIS}Hm.{FINAL}Yes.", "Hm.", "Yes."),
    Thought(
        "gpt_oss",
        "<|start|>assistant",
        f"<|channel|>analysis Hm.{FINAL}Yes.",
        "",
        "<|channel|>analysis Hm.Yes.",
    ),
    Thought("gpt_oss", "<|start|>assistant", f"{ANALYSIS}Hm.<|end|><|start|>assistant", "Hm.", ""),
    Thought("gpt_oss", "<|start|>assistant", f"{ANALYSIS}Hm.<|en", "Hm.<|en", ""),
    Thought(
        "cohere",
        "<|CHATBOT_TOKEN|>",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Hm.",
        "Yes.",
    ),
    Thought(
        "cohere",
        "<|CHATBOT_TOKEN|><|START_THINKING|>",
        "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
        "Hm.",
        "Yes.",
    ),
    Thought(
        "cohere",
        "<|START_THINKING|><|END_THINKING|>",
        "<|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "",
        "Yes.",
    ),
    Thought("cohere", "<|CHATBOT_TOKEN|>", "Yes.", "", "Yes."),
    Thought("apertus", "", "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", "Hm.", "Yes."),
    Thought("seed_oss", "", "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes."),
    Thought("gemma4", "<|turn>model\n", "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.\n", "Yes."),
    Thought("gemma4", "<|channel>thought\n<channel|>", "Yes.", "", "Yes."),
    Thought(
        "granite",
        "",
        "Here is my thought process:\nHm.\nHere's my response:\nYes.",
        "Hm.\n",
        "Yes.",
    ),
    Thought("granite", "", "Here is my response", "", "Here is my response"),
    Thought(
        "granite_33",
        "",
        "<think>Hm.</think>\n<response>Yes.</response>",
        "Hm.",
        "Yes.",
    ),
    Thought(
        "hunyuan_a13b",
        "",
        "<think>\nHm.\n</think>\n<answer>\nYes.</answer>",
        "Hm.\n",
        "Yes.",
    ),
    Thought("kimi_k2", "", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    Thought(
        "kimi_k2",
        "",
        "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>",
        "Hm.",
        "<|tool_calls_section_begin|><|tool_call_begin|>",
    ),
    Thought("qwen3", "", "<think>Hm.</thi", "Hm.</thi", ""),
]
