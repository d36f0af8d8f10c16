"""Where the results of a batch are: files that grow while it is open, and become files of its key
when it has ended.

A server that was killed while it made files of them takes them back, and they grow again.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import NamedTuple

from weft.batches.files import StoredFiles
from weft.batches.forms.protocol import Form
from weft.batches.records import BatchRecord
from weft.observe.log import EventLog
from weft.state.store import StateStore

KINDS = ("output", "error")
AWAY_S = 1.0  # between two looks for a folder that was moved away

log = EventLog("batches")


class GrowingFiles(NamedTuple):
    """The files of an open batch; the same for an API with one file."""

    output: Path
    errors: Path


def growing(files: StoredFiles, batch: BatchRecord, form: Form) -> GrowingFiles:
    output = files.path_of(f"{batch.id}-output")
    if not form.has_error_file:
        return GrowingFiles(output, output)
    return GrowingFiles(output, files.path_of(f"{batch.id}-errors"))


def grow_again(files: StoredFiles, batch: BatchRecord, found: GrowingFiles) -> None:
    """Take back what a server that was killed had made files of."""
    files.take_back(_id_of(batch, "output"), found.output)
    files.take_back(_id_of(batch, "error"), found.errors)


def keep(files: StoredFiles, batch: BatchRecord, form: Form) -> None:
    """Make files of what was written. Raises OSError."""
    found = growing(files, batch, form)
    batch.output_file = _kept(files, batch, found.output, "output")
    if form.has_error_file:
        batch.error_file = _kept(files, batch, found.errors, "error")


async def until_back(state: StateStore | None, batch: BatchRecord) -> None:
    """Wait while the folder for state is moved away: the results are in it."""
    while state is not None:
        gone = state.why_gone()
        if not gone:
            return
        log.seldom("results_wait", batch=batch.id, reason=gone)
        await asyncio.sleep(AWAY_S)


def ids(batch: BatchRecord) -> set[str]:
    """The ids of all contents that an open batch may have."""
    return {f"{batch.id}-output", f"{batch.id}-errors", *(_id_of(batch, kind) for kind in KINDS)}


def _kept(files: StoredFiles, batch: BatchRecord, path: Path, kind: str) -> str | None:
    if not path.exists() or not path.stat().st_size:
        path.unlink(missing_ok=True)
        return None
    id = _id_of(batch, kind)
    os.replace(path, files.path_of(id))
    name = f"{batch.id}_{kind}.jsonl"
    return files.add(id, batch.owner, name, "batch_output", batch.results_expire_s).id


def _id_of(batch: BatchRecord, kind: str) -> str:
    return f"file-{batch.id.rpartition('_')[2]}-{kind}"
