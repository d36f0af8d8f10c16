"""The answers that `weft ctl` prints in formats of their own; others are printed by
`cli/readable.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from weft.cli.why import cause_lines, refusal_lines
from weft.config.numbers import counted


def weight_version(answer: Any) -> Iterator[str]:
    yield answer["weight_version"]


def traces(answer: Any) -> Iterator[str]:
    """The traces of requests as text."""
    for one in answer["requests"]:
        if "prompt_tokens" not in one:  # its model is not loaded yet
            yield from (f"{one['rid']}: {line}" for line in one["text"])
            continue
        queue_position = ""
        if one.get("position") is not None:
            queue_position = f", {one['position']} before it"
        service = ", in the background" if one.get("service") == "background" else ""
        yield f"{one['rid']} (request {one['id']}): {one['state']}{service}{queue_position}"
        yield (
            f"  {counted(one['prompt_tokens'], 'prompt token')}, {one['cached_tokens']:,} of them "
            f"cached; {counted(one['output_tokens'], 'output token')}; "
            f"retractions: {one['retractions']}"
        )
        for line in one["text"]:
            yield f"  {line}"
        yield from cause_lines(one.get("cache_cause"))
    yield from refusal_lines(answer)


def experts(answer: Any) -> Iterator[str]:
    """One line per layer: (token, expert) assignments, and the experts with the most."""
    for layer, prefill, decode in zip(
        answer["layers"], answer["prefill"], answer["decode"], strict=True
    ):
        total = [one + other for one, other in zip(prefill, decode, strict=True)]
        best = sorted(range(len(total)), key=total.__getitem__, reverse=True)[:4]
        most = ", ".join(f"{expert}: {total[expert]:,}" for expert in best if total[expert])
        yield f"layer {layer}: prefill {sum(prefill):,}, decode {sum(decode):,}; most {most or '-'}"
    if answer.get("file"):
        yield answer["file"]
    if "recording" in answer:
        yield "they are counted" if answer["recording"] else "nothing is counted now"


def tree(answer: Any) -> Iterator[str]:
    """One line per node, indented by its depth: its number, its tokens, its users, its text."""
    for one in answer["nodes"]:
        line = f"{'  ' * one['depth']}node {one['node']}: {counted(one['tokens'], 'token')}"
        if one["below"] != one["tokens"]:
            line += f" ({one['below']:,} with those below)"
        for name in ("locks", "pins"):
            if one[name]:
                line += f", {name} {one[name]}"
        line += f", last used {counted(one['age'], 'use')} ago"
        yield f"{line}  {json.dumps(one['text'], ensure_ascii=False)}"
    yield f"nodes visited: {answer['visited']:,}{'' if answer['whole'] else '; there are more'}"


def profile(answer: Any) -> Iterator[str]:
    trace = answer["trace"] or "none (no --profile-dir)"
    yield f"{counted(answer['num_steps'], 'step')} recorded; trace: {trace}"
    yield from answer["table"].splitlines()
