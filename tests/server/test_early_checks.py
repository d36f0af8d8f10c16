"""Parameters are checked before the work on a prompt, and once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.fake import HANG_S, MODEL, RunningServer, running
from tests.text.tokens import infill_tokenizer
from weft.messages.sampling import SamplingParams
from weft.server.chat import conversation
from weft.text.tokenizer import Tokenizer

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
GAP = {"input_prefix": "a", "input_suffix": "b", "n_predict": 4}
# Of which the range of single numbers, checked when a body is read, says nothing.
WRONG: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT, {"min_tokens": 9}, "min_tokens is 9"),
    ("/v1/chat/completions", CHAT, {"logit_bias": {"99999999": 1}}, "99999999"),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 4}, {"min_tokens": 9}, "min_tokens is 9"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, {"stop": [""]}, "stop string"),
    ("/infill", GAP, {"min_tokens": 9}, "min_tokens is 9"),
]


@pytest.fixture(scope="module")
def coder() -> Iterator[RunningServer]:
    tokenizer = infill_tokenizer(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|fim_pad|>"
    )
    with running(tokenizer=tokenizer) as server:
        yield server


@pytest.mark.parametrize(("path", "body", "wrong", "message"), WRONG)
def test_a_wrong_parameter_is_refused_before_the_prompt_is_rendered_or_tokenized(
    server: RunningServer,
    coder: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    wrong: dict[str, Any],
    message: str,
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise AssertionError("work for a request that is refused")

    monkeypatch.setattr(conversation, "chat_text", fail)
    for work in ("encode", "encode_async", "encode_prompts", "encode_within"):
        monkeypatch.setattr(Tokenizer, work, fail)
    one = server if "messages" in body else coder
    given = {"model": MODEL, **body, **wrong}
    answer = httpx.post(f"{one.url}{path}", json=given, timeout=HANG_S)
    assert answer.status_code == 400, answer.text
    assert message in answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 4}),
        ("/infill", GAP),
    ],
)
def test_right_parameters_are_checked_once(
    server: RunningServer,
    coder: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    num_checks = 0
    check = SamplingParams.check

    def counted(params: SamplingParams, vocab_size: int) -> None:
        nonlocal num_checks
        num_checks += 1
        check(params, vocab_size)

    monkeypatch.setattr(SamplingParams, "check", counted)
    one = server if "messages" in body else coder
    answer = httpx.post(f"{one.url}{path}", json={"model": MODEL, **body}, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    assert num_checks == 1
