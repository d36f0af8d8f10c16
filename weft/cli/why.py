"""Why requests were slow, as lines: what `weft ctl why` prints of a server's answer, and
`weft replay --why` of a journal. Token ids stand for texts where there is no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.config.numbers import counted
from weft.json_types import JsonObject

SMALL_SHARE = 0.005  # of all the time: smaller parts have one line together
CLIENT_LEFT = 499  # the status of a request whose client left before its answer
SHORT_S = 1.0  # a shorter time is written in milliseconds


# What can be done about a part that takes much of the time.
LARGE_SHARE = 0.3
PART_ADVICE = {
    "front_busy": "the front has too much to do: more servers with weft route",
    "read": "the body came slowly: look at the client and its network",
    "load": "--model-ttl-s 0 keeps a model loaded until another one needs the memory",
    "tokenize": "shorter prompts, or more servers with weft route",
    "render": "the first chat after the start waits for the template; later ones do not",
    "share": "a larger --max-request-share, or fewer completions in one request",
    "engine_busy": "shorter steps: a smaller --chunked-prefill-size, or --max-step-ms",
    "grammar": "a grammar is compiled once: send the same schema again, and it is there",
    "queue": "what it waited for stands beside it; weft plan finds the settings for more users",
    "prefill_shared": "fewer prompts in a step: a smaller --chunked-prefill-size",
    "prefill_waits": "larger pieces of prompts: --chunked-prefill-size",
    "decode_mixed": "smaller pieces of prompts: --chunked-prefill-size, or --max-step-ms",
    "decode_stalled": "smaller pieces of prompts, between which others get tokens: --max-step-ms",
    "queue_again": "more KV memory, or a larger --schedule-conservativeness",
    "prefill_again": "more KV memory, or a larger --schedule-conservativeness",
    "sending": "the client reads slowly",
}


def causes(answer: Any) -> Iterator[str]:
    """Why requests were slow: why not more of their prompts came from the cache, and where all of
    their time went; and why some were refused."""
    for one in answer["requests"]:
        if "prompt_tokens" in one:
            yield from _request_lines(one)
        else:  # its model is not loaded yet
            yield from (f"{one['rid']}: {line}" for line in one["text"])
    yield from refusal_lines(answer)


def refusal_lines(answer: Any) -> Iterator[str]:
    """The requests that were answered with an error, and the time that took."""
    for one in answer.get("refused", ()):
        how = f"answered with {one['status']}"
        if one["status"] == CLIENT_LEFT:
            how = "was not answered"
        yield f"{one['rid']}: {one['path']} {how}, {one['ago_s']:.0f} s ago: {one['message']}"
        yield from time_lines(one["times"], one["total_s"])


def _request_lines(one: JsonObject) -> Iterator[str]:
    cached = f"{one['cached_tokens']:,} of {counted(one['prompt_tokens'], 'prompt token')}"
    yield f"{one['rid']} (request {one['id']}): {cached} were cached"
    yield from cause_lines(one.get("cache_cause"))
    if one["state"] != "finished":
        yield f"  now: {one['state']}" + (f": {one['why']}" if one["why"] else "")
    elif one["timeline"]:
        yield f"  {one['timeline'][-1]['what']}"
    if one.get("elsewhere"):
        yield f"  route: {one['elsewhere']}"
    if one.get("times"):
        total_s = one["stages"]["total_s"] if one.get("total_s") is None else one["total_s"]
        yield from time_lines(one["times"], total_s, one.get("first_token_s"))
    gap = one.get("longest_gap")
    if gap is not None:
        length = in_seconds(gap["seconds"], gap["seconds"])
        at = in_seconds(gap["at_s"], gap["at_s"])
        yield f"  longest gap: {length}, {at} after the engine had it: {gap['what']}"


def time_lines(times: Any, total_s: float, first_token_s: float | None = None) -> Iterator[str]:
    """All the time, and a line for each large part of it."""
    head = f"  time: {in_seconds(total_s, total_s)}"
    if first_token_s is not None:
        head += f", the first token after {in_seconds(first_token_s, total_s)}"
    yield head
    small = [one for one in times if one["seconds"] < SMALL_SHARE * total_s]
    large = [one for one in times if one not in small]
    if small:
        seconds = sum(one["seconds"] for one in small)
        names = ", ".join(dict.fromkeys(one["part"] for one in small))
        large.append({"part": "the rest", "seconds": seconds, "detail": names})
    width = max((len(one["part"]) for one in large), default=0)
    for one in large:
        share = one["seconds"] / total_s if total_s else 0.0
        line = f"    {one['part']:<{width}} {in_seconds(one['seconds'], total_s):>11} {share:4.0%}"
        if one.get("detail"):
            line += f"  {one['detail']}"
        yield line
    longest = max(times, key=_seconds, default=None)
    if longest is not None and longest["seconds"] >= LARGE_SHARE * total_s:
        advice = PART_ADVICE.get(longest["part"])
        if advice:
            yield f"  advice for {longest['part']}: {advice}"


def _seconds(part: JsonObject) -> float:
    return float(part["seconds"])


def in_seconds(seconds: float, total_s: float) -> str:
    """A part of a time, in the unit for all of it."""
    if total_s < SHORT_S:
        return f"{1_000 * seconds:.2f} ms"
    return f"{seconds:.3f} s"


def cause_lines(cause: JsonObject | None) -> Iterator[str]:
    if cause is None:
        return
    yield f"  cache: {cause['cause']}: {cause['words']}"
    if cause["missed_tokens"]:
        cost = counted(cause["missed_tokens"], "token")
        if cause["missed_s"] is not None:
            cost += f", {cause['missed_s']:.2f} s"
        yield f"  cost: {cost}"
    # Without a text here nothing parts: all of the prompt is there, under another name or no more.
    ours = cause.get("ours_text", cause["ours"])
    theirs = cause.get("theirs_text", cause["theirs"])
    if cause["missed_tokens"] and ours and theirs:
        yield f"  here: {ours!r}"
        yield f"  earlier: {theirs!r}"
    if cause["advice"]:
        yield f"  advice: {cause['advice']}"
