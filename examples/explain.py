"""Why did my request wait? The server tells what the scheduler decided about it."""

import json
import os
import urllib.request

URL = os.environ.get("WEFT_URL", "http://127.0.0.1:30000")


def call(path: str, body: dict[str, object] | None = None) -> dict[str, object]:
    """The JSON answer to a POST of `body`, or to a GET if there is none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json"})
    key = os.environ.get("WEFT_ADMIN_API_KEY") or os.environ.get("WEFT_API_KEY")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        decoded: dict[str, object] = json.load(answer)
    return decoded


def main() -> None:
    call("/v1/completions", {"prompt": "import os\n", "max_tokens": 8, "rid": "example-1"})
    trace = call("/requests/example-1")
    print(json.dumps(trace, indent=2))


if __name__ == "__main__":
    main()
