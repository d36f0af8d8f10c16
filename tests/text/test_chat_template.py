from __future__ import annotations

from typing import Any

import pytest

from tests.text.tokens import CHAT_TEMPLATE
from weft.text.templates.chat_template import ChatTemplate, TemplateError

USER = {"role": "user", "content": "Hi"}


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<bos>"}).render(
        messages or [USER], **options
    )


def test_conversation_ends_with_the_generation_prompt() -> None:
    assert render(CHAT_TEMPLATE) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHAT_TEMPLATE, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_final_message_is_left_open_to_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "end "}]
    text = render(CHAT_TEMPLATE, messages, continue_final_message=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nend "


def test_only_the_assistant_can_be_continued() -> None:
    with pytest.raises(TemplateError, match="assistant"):
        render(CHAT_TEMPLATE, continue_final_message=True)
    with pytest.raises(TemplateError, match="leaves out"):
        render("nothing", [{"role": "assistant", "content": "x"}], continue_final_message=True)


MACRO = "{% macro show(x) %}{% for part in x %}<{{ part.text }}>{% endfor %}{% endmacro %}"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_text_parts_are_put_together_for_templates_that_want_a_text() -> None:
    assert "user\na\nb<|im_end|>" in render(CHAT_TEMPLATE, [{"role": "user", "content": PARTS}])


@pytest.mark.parametrize(
    "source",
    [
        "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}",
        "{% for part in messages[0]['content'] %}<{{ part['text'] }}>{% endfor %}",
        "{% set text = messages[0].get('content') %}"
        "{% for part in text %}<{{ part.text }}>{% endfor %}",
        "{% set a = messages[0].content or '' %}{% set b = a %}"
        "{% for part in b %}<{{ part.text }}>{% endfor %}",
        MACRO + "{{ show(messages[0].content) }}",
        MACRO + "{{ show(x=messages[0].content) }}",
        "{{ messages[0].content | map(attribute='text') | map('replace', 'a', '<a><') | join }}>",
    ],
)
def test_parts_stay_a_list_for_templates_that_read_lists(source: str) -> None:
    assert render(source, [{"role": "user", "content": PARTS}]) == "<a><b>"


def test_lines_of_a_text_are_no_parts() -> None:
    source = "{% for line in messages[0].content.split('a') %}[{{ line }}]{% endfor %}"
    assert render(source, [{"role": "user", "content": PARTS}]) == "[][\nb]"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ 'null' if messages[0].content is none else 'text' }}", "null"),
        ("{{ 'text' if messages[0]['content'] is not none else 'null' }}", "null"),
        ("{{ 'null' if messages[0]['content'] == None else 'text' }}", "null"),
        ("{% set c = messages[0].content %}{{ c is none }}", "True"),
        ("{{ messages[0].content }}|", "|"),
        ("{{ messages[0].content + '|' }}", "|"),
        ("{{ messages[0].name is none }}{{ messages[0].content }}", "False"),
    ],
)
@pytest.mark.parametrize("message", [{"content": None}, {}])
def test_content_beside_calls_stays_null_for_templates_that_look_at_it(
    source: str, told: str, message: dict[str, Any]
) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    assert render(source, [{"role": "assistant", "tool_calls": [call], **message}]) == told


def test_a_last_message_in_parts_is_left_open_too() -> None:
    source = "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}"
    assert (
        render(source, [{"role": "assistant", "content": PARTS}], continue_final_message=True)
        == "<a><b"
    )


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video", None])
def test_other_parts_are_refused(kind: str | None) -> None:
    with pytest.raises(TemplateError, match=f"type '{kind}', which this model does not") as caught:
        render(CHAT_TEMPLATE, [USER, {"role": "user", "content": [{"type": kind, "text": "a"}]}])
    assert caught.value.param == "messages[1].content[0]"


def test_missing_content_is_refused_but_for_tool_calls() -> None:
    with pytest.raises(TemplateError, match="no content"):
        render(CHAT_TEMPLATE, [{"role": "user", "content": None}])
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": [1, "ö"]}'}}
    source = "{{ messages[0].tool_calls[0].function.arguments.x[1] }}"
    assert render(source, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == "ö"


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_an_answer_and_a_result_may_have_no_content(role: str) -> None:
    assert render("[{{ messages[0].content }}]", [{"role": role, "content": None}]) == "[]"


NO_OBJECTS = ['{"a": ', "[1]", "null", "42", '"x"', "", "not JSON", None, [1], 42]


@pytest.mark.parametrize("arguments", NO_OBJECTS)
def test_arguments_that_are_no_object_do_not_end_a_conversation(arguments: Any) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    in_call = "messages[1].tool_calls[0].function.arguments"
    walked = f"{{% for key in {in_call}.items() %}}{{{{ key }}}}{{% endfor %}}."
    assert render(walked, messages) == "."
    as_text = f"{{{{ {in_call} if {in_call} is string else {in_call} | tojson }}}}"
    shown = arguments if isinstance(arguments, str) else "{}"
    assert render(as_text, messages) == ("{}" if arguments in ("", "null") else shown)


@pytest.mark.parametrize("function", ["f", [], 3])
def test_a_call_without_a_function_is_named(function: Any) -> None:
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
    with pytest.raises(TemplateError, match=r"messages\[1\].tool_calls\[0\].function is "):
        render(CHAT_TEMPLATE, messages)


def test_a_prompt_has_no_half_of_a_surrogate_pair() -> None:
    call = {"function": {"name": "f", "arguments": r'{"a": "\ud83d", "b": "\ud83d\ude00"}'}}
    messages = [{"role": "assistant", "content": "\ud83d", "tool_calls": [call]}]
    source = "{{ messages[0].content }}{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert render(source, messages) == '\ufffd{"a": "\ufffd", "b": "\U0001f600"}'


def test_environment_is_that_of_hugging_face() -> None:
    source = """
    {%- for n in range(9) %}
        {%- if n == 2 %}{% continue %}{% endif %}
        {%- if n == 4 %}{% break %}{% endif %}
        {{- n }}
    {%- endfor %}
    {%- set ns = namespace(a=1) %}
    {%- set ns.a = 5 %}
    {{- ns.a }}
    {%- generation %}G{{ bos_token }}{% endgeneration %}
    {{- {"k": "ö<"} | tojson }}{{ "%d-%s" | format(7, "x") }}{{ "{:>3}".format(7) }}
    {{- strftime_now("%Y") | length }}{{ tools is none }}"""
    assert render(source) == '0135G<bos>{"k": "ö<"}7-x  74True'


def test_blocks_leave_no_blank_lines() -> None:
    assert render("{% if true %}\na\n  {% endif %}\nb\n") == "a\nb"


def test_named_template_is_taken_when_there_are_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"}, {})
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[{"name": "f"}]) == "f"


def test_each_named_template_has_content_as_it_reads_it() -> None:
    lists = "{% for part in messages[0].content %}<{{ part.text }}>{% endfor %}"
    template = ChatTemplate({"default": "{{ messages[0].content }}", "tool_use": lists}, {})
    message = {"role": "user", "content": PARTS}
    assert template.render([message]) == "a\nb"
    assert template.render([message], tools=[{"type": "function"}]) == "<a><b>"


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    message = {"role": "developer", "content": "x"}
    assert render("{{ messages[0].role }}", [message]) == "system"
    assert render("{{ messages[0].role }}{# developer #}", [message]) == "developer"


def test_template_refuses_with_its_own_words() -> None:
    with pytest.raises(TemplateError) as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert str(caught.value) == "roles must alternate"


def test_errors_of_the_template_are_the_users_errors() -> None:
    for source in (
        "{{ nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].role }}",
        "{{ 'a' + 1 }}",
    ):
        with pytest.raises(TemplateError, match="cannot render"):
            render(source)


def test_broken_jinja_is_reported_at_start() -> None:
    with pytest.raises(TemplateError, match="not valid Jinja"):
        ChatTemplate({"default": "{% if %}"}, {})
    with pytest.raises(TemplateError, match="no default"):
        ChatTemplate({"rag": "x"}, {})


@pytest.mark.parametrize(
    "name", ["messages", "tools", "bos_token", "add_generation_prompt", "raise_exception"]
)
def test_arguments_cannot_shadow_what_is_ours(name: str) -> None:
    with pytest.raises(TemplateError, match=f"may not set {name}") as caught:
        render(CHAT_TEMPLATE, kwargs={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


def test_arguments_reach_the_template() -> None:
    assert render("{{ enable_thinking }}", kwargs={"enable_thinking": False}) == "False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ 'a' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 2 ** 10000000000 }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x\ny' | indent(10000000000) }}",
        "{{ messages | tojson(indent=10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10000000000) }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% for i in range(10000000000) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}"
        "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% include 'secret' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_sandbox_holds(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


IMAGE = {"type": "image"}
MARKS = {"image": "<image>"}
ONLY_LISTS = (
    "{% for m in messages %}{{ m['role'] }}:"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}<img>{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    ";{% endfor %}"
)
BOTH = (
    "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
    "{% for part in messages[0].content %}[{{ part.text or part.type }}]{% endfor %}{% endif %}"
)


def test_a_mark_stands_for_a_picture_where_a_template_reads_texts() -> None:
    content = [PARTS[0], IMAGE, PARTS[1]]
    text = render(CHAT_TEMPLATE, [{"role": "user", "content": content}], marks=MARKS)
    assert "user\na\n<image>\nb<|im_end|>" in text


def test_a_template_that_reads_lists_writes_pictures_itself() -> None:
    content = [PARTS[0], IMAGE]
    message = {"role": "user", "content": content}
    assert render(ONLY_LISTS, [message], marks=MARKS) == "user:<img>a;"
    assert render(BOTH, [message], marks=MARKS) == "[a][image]"


def test_a_template_that_reads_lists_alone_gets_a_text_as_a_list() -> None:
    """That of LLaVA 1.5 would walk through the letters of a text, and write none."""
    messages = [USER, {"role": "assistant", "content": "Hello"}]
    assert render(ONLY_LISTS, messages) == "user:Hi;assistant:Hello;"
    assert render(BOTH) == "Hi"
    assert render(ONLY_LISTS, messages, continue_final_message=True) == "user:Hi;assistant:Hello"


def test_a_picture_at_the_end_cannot_be_continued() -> None:
    messages = [{"role": "assistant", "content": [IMAGE]}]
    with pytest.raises(TemplateError, match="which cannot be continued"):
        render(ONLY_LISTS, messages, marks=MARKS, continue_final_message=True)


def test_pictures_are_refused_without_a_mark_of_their_kind() -> None:
    with pytest.raises(TemplateError, match="is of type 'image', which this model"):
        render(ONLY_LISTS, [{"role": "user", "content": [IMAGE]}])


def test_a_message_with_calls_cannot_be_continued() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    messages = [USER, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    with pytest.raises(TemplateError, match="has tool_calls, which come after") as caught:
        render(CHAT_TEMPLATE, messages, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


CALL_TURNS = """{%- for m in messages -%}
<{{ m.role }}>{{ TEXT }}{% for c in m.tool_calls or [] %}BETWEEN[{{ c.function.name }}]{% endfor %}
{%- endfor -%}"""


@pytest.mark.parametrize(
    ("text", "between", "content", "expected"),
    [
        ("m.content", "{{ '\\n' }}", "I look.\n", "I look.\n[f]"),
        ("m.content", "{{ '\\n' }}", "I look.\n\n", "I look.\n\n[f]"),
        ("m.content", "{{ '\\n\\n' }}", "I look.\n\n", "I look.\n\n[f]"),
        ("m.content", "{{ '\\n' }}", "I look.", "I look.\n[f]"),
        ("m.content", "", "I look.\n", "I look.\n[f]"),
        ("m.content | trim", "{{ '\\n' }}", "I look.\n", "I look.\n[f]"),
    ],
)
def test_line_breaks_between_a_text_and_its_calls_are_written_once(
    text: str, between: str, content: str, expected: str
) -> None:
    source = CALL_TURNS.replace("TEXT", text).replace("BETWEEN", between)
    template = ChatTemplate({"default": source}, {})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    found = template.render([{"role": "user", "content": "Hi"}, answer])
    assert found.endswith(f"<assistant>{expected}")


def test_a_template_that_takes_no_example_gets_the_text_as_it_is() -> None:
    source = "{% if messages[0].content != 'Hi' %}{{ raise_exception('no') }}{% endif %}" + (
        CALL_TURNS.replace("TEXT", "m.content").replace("BETWEEN", "{{ '\\n' }}")
    )
    template = ChatTemplate({"default": source}, {})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": "I look.\n", "tool_calls": [call]}
    found = template.render([{"role": "user", "content": "Hi"}, answer])
    assert found.endswith("I look.\n\n[f]")
