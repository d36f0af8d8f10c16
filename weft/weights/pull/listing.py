"""What a repository on the hub holds, and why the hub refuses an answer. The library
`huggingface_hub` asks and knows the errors; this module waits when the hub says so."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from weft.config.model import ModelNotFound

T = TypeVar("T")

MAX_TRIES = 5
MAX_WAIT_S = 300.0  # a hub that wants more is told of instead
MAX_PATH_LEN = 512
BUSY = (429, 500, 502, 503, 504)
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


class PullError(ModelNotFound):
    """A model cannot be pulled; the message gives the reason, and what helps."""


class Unreachable(PullError):
    """There is no connection to the hub, or the user wants none."""


class HubFile(NamedTuple):
    path: str  # in the repository
    num_bytes: int
    etag: str  # SHA-256 of a large file, or git's SHA-1 of a small one: the name of its content


class Listing(NamedTuple):
    repo: str
    commit: str
    files: tuple[HubFile, ...]


def list_files(repo: str, revision: str, told: Callable[[str], None]) -> Listing:
    """The files of a repository at a revision ("": the main branch). `told` gets a line while the
    hub makes this wait. Raises PullError."""
    from huggingface_hub import HfApi

    def ask() -> Any:
        return HfApi().model_info(repo, revision=revision or None, files_metadata=True)

    info = asked(ask, repo, told)
    commit = str(info.sha or "")
    if not _COMMIT.fullmatch(commit):
        raise PullError(f"the hub names no commit of {repo}")
    found = []
    for sibling in info.siblings or ():
        etag = str(sibling.lfs["sha256"] if sibling.lfs else sibling.blob_id or "")
        size = sibling.size if sibling.size is not None else -1
        if not _is_safe(sibling.rfilename) or not _ETAG.fullmatch(etag) or size < 0:
            raise PullError(
                f"{repo} has a file {sibling.rfilename[:200]!r} that weft does not fetch: its "
                "name, size or digest is none"
            )
        found.append(HubFile(sibling.rfilename, int(size), etag))
    return Listing(repo, commit, tuple(found))


def asked(ask: Callable[[], T], repo: str, told: Callable[[str], None]) -> T:
    """The answer of the hub, asked again while it is busy. Raises PullError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    for number in range(1, MAX_TRIES + 1):
        try:
            return ask()
        except HfHubHTTPError as exc:
            status = getattr(exc.response, "status_code", 0)
            if status not in BUSY or number == MAX_TRIES:
                raise PullError(refusal(repo, status, exc)) from exc
            wait_s = wait_of(exc.response.headers.get("retry-after"), number)
            if wait_s > MAX_WAIT_S:
                raise PullError(
                    f"the hub refuses more requests for {wait_s:,.0f} s (status {status})"
                ) from exc
            told(f"the hub is busy (status {status}), asked again in {wait_s:.0f} s")
            time.sleep(wait_s)
        except HFValidationError as exc:
            raise PullError(f"{repo} cannot be the name of a repository: {exc}") from exc
        except Exception as exc:  # of the library's HTTP client, which its versions differ in
            raise Unreachable(f"the hub cannot be reached: {first_line(exc)}") from exc
    raise AssertionError("the last try returns or raises")


def wait_of(retry_after: str | None, number: int) -> float:
    """Seconds to wait before try `number` + 1: those that the server asks for, else 1, 2, 4 .."""
    try:
        return max(float(retry_after or ""), 0.0)
    except ValueError:
        return float(2 ** (number - 1))


def refusal(repo: str, status: int, exc: Exception) -> str:
    """What a status of the hub means for the user."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError

    token = "hf auth login, or HF_TOKEN, gives a token"
    if isinstance(exc, GatedRepoError):
        advice = token if not get_token() else "the account of the token has no access"
        return (
            f"{repo} is gated: its makers want you to accept their terms on the page of the model "
            f"(status {status}; {advice})"
        )
    if isinstance(exc, RevisionNotFoundError):
        return f"{repo} has no such revision on the hub"
    if status == 401:
        advice = "the token is not valid" if get_token() else token
        return f"there is no {repo} on the hub, or it is private (status 401; {advice})"
    if status == 403:
        return f"the hub does not let this account read {repo} (status 403)"
    if status == 404:
        return f"there is no {repo} on the hub (status 404)"
    if status == 429:
        return "the hub has had too many requests from here (status 429); try again later"
    return f"the hub has failed (status {status}): {first_line(exc)}"


def first_line(exc: BaseException) -> str:
    return next(iter(str(exc).strip().splitlines()), type(exc).__name__)


def _is_safe(path: str) -> bool:
    """Whether a path in a repository stays below its folder."""
    parts = path.split("/")
    is_inside = all(part not in ("", ".", "..") for part in parts)
    return is_inside and path.isprintable() and "\\" not in path and len(path) <= MAX_PATH_LEN
