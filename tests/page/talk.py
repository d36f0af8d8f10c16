"""Chats of a page with answers that a test writes, as a server would stream them."""

from __future__ import annotations

import json
from typing import Any

from tests.page.browser import Watched

CHAT = "**/v1/chat/completions"
# Markdown of all kinds.
RICH = """# Ships

| name | tons |
|:-----|-----:|
| *Vasa* | 1,210 |
| `Mary` \\| Rose | 500 |

1. first
   - inner ~~old~~
     1. deepest
2. second

- [x] done
- [ ] open

> said <b>he</b> &amp; she

See [the docs](https://example.org/a?b=1&c=2), https://example.com and [bad](javascript:alert(1)).
![a chart](https://example.org/chart.png)

```python
def f(x):
    return "text" + str(x)  # why
```

Inline $e^{i\\pi}+1=0$ costs $5 and $6, and
$$\\frac{a}{b}$$
"""


def say(page: Watched, text: str) -> None:
    """Write a message and send it by the keyboard."""
    page.page.fill("#text", text)
    page.page.press("#text", "Enter")


def answers(
    page: Watched, *deltas: dict[str, Any], end: str = "stop", usage: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Let the page's next requests get these deltas. Returns the list of their bodies,
    which grows."""
    events: list[dict[str, Any]] = [{"choices": [{"delta": delta}]} for delta in deltas]
    events.append({"choices": [{"delta": {}, "finish_reason": end}]})
    if usage is not None:
        events.append({"choices": [], "usage": usage})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    asked: list[dict[str, Any]] = []

    def fulfill(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.page.unroute(CHAT)
    page.page.route(CHAT, fulfill)
    return asked


def reload(page: Watched) -> None:
    """Load the page again, when all that it keeps is on the disk."""
    page.page.locator("html:not([data-saving])").wait_for(state="attached")
    page.page.reload()


def refused(page: Watched, status: int, words: str) -> None:
    """Let the page's next requests end with this error."""
    body = json.dumps({"error": {"message": words}})
    page.page.route(
        CHAT, lambda route: route.fulfill(status=status, content_type="application/json", body=body)
    )


def call(name: str, args: dict[str, Any], id: str = "call-1") -> dict[str, Any]:
    """A delta with a tool call."""
    function = {"name": name, "arguments": json.dumps(args)}
    return {"tool_calls": [{"index": 0, "id": id, "type": "function", "function": function}]}
