"""Why requests were slow, as lines: what `weft ctl why` prints of a server's answer, and
`weft replay --why` of a journal. Token ids stand for texts where there is no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.config.numbers import counted
from weft.json_types import JsonObject


def causes(answer: Any) -> Iterator[str]:
    """Why requests were slow: why not more of their prompts came from the cache, and where all of
    their time went."""
    for one in answer["requests"]:
        cached = f"{one['cached_tokens']:,} of {counted(one['prompt_tokens'], 'prompt token')}"
        yield f"{one['rid']} (request {one['id']}): {cached} were cached"
        yield from cause_lines(one.get("cache_cause"))
        if one.get("elsewhere"):
            yield f"  route: {one['elsewhere']}"
        if one.get("times"):
            total_s = one.get("total_s", one["stages"]["total_s"])
            yield f"  time: {total_s:.3f} s"
            yield from (f"    {line}" for line in time_lines(one["times"]))
        gap = one.get("longest_gap")
        if gap is not None:
            yield f"  longest gap: {gap['seconds']:.3f} s, {gap['at_s']:.3f} s in: {gap['what']}"
        if one["state"] == "finished" and one["cache_cause"] is None and one["timeline"]:
            yield f"  {one['timeline'][-1]['what']}"


def time_lines(times: Any) -> Iterator[str]:
    """A line for each part of a request's time."""
    width = max(len(one["part"]) for one in times)
    for one in times:
        line = f"{one['part']:<{width}}  {one['seconds']:9.3f} s"
        if one.get("detail"):
            line += f"  {one['detail']}"
        yield line


def cause_lines(cause: JsonObject | None) -> Iterator[str]:
    if cause is None:
        return
    yield f"  cache: {cause['cause']}: {cause['words']}"
    if cause["missed_tokens"]:
        cost = counted(cause["missed_tokens"], "token")
        if cause["missed_s"] is not None:
            cost += f", {cause['missed_s']:.2f} s"
        yield f"  cost: {cost}"
    # Without a text here nothing parts: the whole prompt is there, under another name or no more.
    ours = cause.get("ours_text", cause["ours"])
    theirs = cause.get("theirs_text", cause["theirs"])
    if cause["missed_tokens"] and ours and theirs:
        yield f"  here: {ours!r}"
        yield f"  earlier: {theirs!r}"
    if cause["advice"]:
        yield f"  advice: {cause['advice']}"
