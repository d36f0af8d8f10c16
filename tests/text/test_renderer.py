"""Templates in processes of their own: whatever a template does, this process loses no more than
the answer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from tests.text.tokens import CHAT_TEMPLATE
from weft.config.process import Child, ChildEnded
from weft.text.templates import chat_template, renderer
from weft.text.templates.chat_template import MAX_OWN_SOURCE_LEN, ChatTemplate, TemplateError
from weft.text.templates.renderer import Renderer

USER = {"role": "user", "content": "größe"}
DOUBLED = (
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = OPERATION %}{% endfor %}"
)
NESTED = (
    "{% set ns = namespace(x=[0]) %}"
    "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
)
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LONG = "'a' * 1000000"
BOMBS = {
    "nested lists as JSON": NESTED + "{{ ns.x | tojson }}",
    "nested lists as text": NESTED + "{{ ns.x | string | length }}",
    "replace": "{{ (" + LONG + ") | replace('a', " + LONG + ") }}",
    "the method replace": "{{ (" + LONG + ").replace('a', " + LONG + ") }}",
    "concatenation": DOUBLED.replace("OPERATION", "ns.x ~ ns.x"),
    "join": "{{ range(99999) | join(" + LONG + ") }}",
    "format": "{{ ('%s' * 100000) % tuple }}".replace("tuple", "([" + LONG + "] * 100000) | list"),
    "lists": (
        "{{ [[0] * 1000000] * 1000000 | list | length }}"
        "{{ ([0] * 1000000) | batch(1) | map('list') | list }}"
    ),
    "loops": LOOPS,
    "a long sum": "{{ ([" + LONG + "] * 100000) | sum(start='') }}",
}


@pytest.fixture
def ours() -> Iterator[Renderer]:
    renderer = Renderer(
        {"default": CHAT_TEMPLATE, "tool_use": "{{ tools | tojson }}"}, {"bos_token": "<bos>"}
    )
    yield renderer
    renderer.close()


def go(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def test_it_renders_what_the_template_says(ours: Renderer) -> None:
    template = ChatTemplate({"default": CHAT_TEMPLATE}, {"bos_token": "<bos>"})

    async def main() -> None:
        assert await ours.render([USER]) == template.render([USER])
        assert await ours.render([USER], add_generation_prompt=False) == template.render(
            [USER], add_generation_prompt=False
        )
        assert await ours.render([USER], tools=[{"größe": 10**30}]) == f'[{{"größe": {10**30}}}]'
        assert await ours.render([USER], source="{{ bos_token }}") == "<bos>"
        with pytest.raises(TemplateError, match="may not set messages") as caught:
            await ours.render([USER], kwargs={"messages": 1})
        assert caught.value.param == "chat_template_kwargs"

    go(main)


def test_no_template_is_compiled_or_run_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a template in the front")

    monkeypatch.setattr(chat_template, "_environment", never)
    renderer = Renderer({"default": CHAT_TEMPLATE}, {})

    async def main() -> None:
        assert await renderer.render([USER], source="{{ messages[0].content }}") == "größe"

    go(main)
    renderer.close()


def test_a_process_that_was_started_ahead_is_used() -> None:
    child = Child(renderer.MODULE)
    ours = Renderer({"default": CHAT_TEMPLATE}, {"bos_token": "<bos>"}, lambda: child)
    assert ours.processes[0].child is child
    template = ChatTemplate({"default": CHAT_TEMPLATE}, {"bos_token": "<bos>"})
    go_with(ours, template)
    ours.close()
    assert not child.is_alive


def go_with(ours: Renderer, template: ChatTemplate) -> None:
    async def main() -> None:
        assert await ours.render([USER]) == template.render([USER])

    go(main)


@pytest.mark.parametrize("failure", [TimeoutError(), ChildEnded(out_of_time=False)])
def test_a_process_that_others_end_or_stop_at_the_start_is_replaced(failure: Exception) -> None:
    """Or a model would be without its template until it is loaded again."""
    child = Mock(spec=Child, is_alive=True)
    child.ask.side_effect = failure
    ours = Renderer({"default": CHAT_TEMPLATE}, {"bos_token": "<bos>"}, lambda: child)
    child.close.assert_called()
    go_with(ours, ChatTemplate({"default": CHAT_TEMPLATE}, {"bos_token": "<bos>"}))
    ours.close()


def test_a_broken_template_is_reported_at_the_start() -> None:
    with pytest.raises(TemplateError, match="not valid Jinja"):
        Renderer({"default": "{% if %}"}, {})


def test_a_template_that_is_too_large_is_refused_before_anything_is_made_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renderer, "Helper", None)
    with pytest.raises(TemplateError, match="has 10,000,000 characters; at most 1,000,000"):
        Renderer({"default": "a" * 10 * MAX_OWN_SOURCE_LEN}, {})


def test_a_template_that_takes_too_long_to_compile_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renderer, "COMPILE_WORK_S", 0.1)
    with pytest.raises(TemplateError, match=r"longer than 0\.1 s"):
        Renderer({"default": "{{ a }}" * 100_000}, {})


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "NUM_PROCESSES", 1)


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.usefixtures("one_process")
def test_a_bomb_ends_its_own_process_and_the_next_conversation_is_rendered(
    ours: Renderer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "RENDER_WORK_S", 0.12)  # of processor time

    async def main() -> None:
        with pytest.raises(TemplateError):
            await ours.render([USER], source=BOMBS[name])
        assert "größe" in await ours.render([USER])

    go(main)


def test_a_process_that_is_killed_between_two_conversations_costs_neither_of_them(
    ours: Renderer,
) -> None:
    async def main() -> None:
        for _ in range(3):
            assert "größe" in await ours.render([USER])
            children = [one.child for one in ours.processes if one.child is not None]
            assert children
            for child in children:
                os.kill(child.pid, signal.SIGKILL)
                child._process.wait()

    go(main)


def test_no_process_is_left_behind(ours: Renderer) -> None:
    async def main() -> None:
        await asyncio.gather(*(ours.render([USER]) for _ in range(8)))

    go(main)
    children = [one.child for one in ours.processes if one.child is not None]
    assert len(children) == 2
    ours.close()
    assert not any(child.is_alive for child in children)


def test_templates_of_requests_leave_a_process_to_the_models_own(ours: Renderer) -> None:
    async def main() -> None:
        hostile = [asyncio.create_task(ours.render([USER], source=LOOPS)) for _ in range(4)]
        await asyncio.sleep(0)
        assert "größe" in await ours.render([USER])
        assert not any(task.done() for task in hostile)
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)

    go(main)
