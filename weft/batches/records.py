"""What is known of a file and of a batch, as it is stored."""

from __future__ import annotations

import msgspec

from weft.json_types import JsonObject

# A batch goes through these in this order, and ends in one of the last four.
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
ENDED = ("completed", "failed", "expired", "cancelled")


class StoredFile(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A file of one key. Times are Unix times."""

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: float
    expires_s: float | None = None  # None: it stays until it is deleted


class BatchRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A batch of one key. Times are Unix times, by the name of the status that begins then."""

    id: str
    owner: str
    form: str  # name of its API, in `forms/`
    path: str  # of the route that all lines ask
    input_file: str
    created_s: float
    expires_s: float
    window: str = "24h"  # as the client wrote it
    metadata: JsonObject = {}
    results_expire_s: float | None = None  # seconds after its end; None: they stay
    status: str = "validating"
    times: dict[str, float] = {}
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_invalid: int = 0  # of the failed ones, those that were never asked
    num_cancelled: int = 0
    num_expired: int = 0
    output_file: str | None = None  # once it has lines and the batch has ended
    error_file: str | None = None
    failure: str = ""  # why the batch has failed as such

    @property
    def is_open(self) -> bool:
        return self.status in OPEN
