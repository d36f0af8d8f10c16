"""Loading and unloading adapters (LoRA) while the engine serves: the place of each adapter, which
adapter is unloaded for another, and unloads that wait for open requests.

    load    ─▶ a free place, or that of the least recently used adapter
            ─▶ the adapter is read while steps run ─▶ device job: it is loaded ─▶ reply
    unload  ─▶ refuses new requests ─▶ the open ones end ─▶ device job ─▶ reply

`scheduler/features/adapters.py` decides which requests may run together. This module reads no
files: the device reports errors in them.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from weft.engine.core import EngineCore
from weft.engine.device_jobs import DeviceJob, DeviceJobs, JobResult
from weft.engine.hooks import SOON, Service
from weft.messages.adapters import AdapterReply, LoadLoraAdapter, UnloadLoraAdapter
from weft.plan.device import DeviceReply, LoadAdapter, Pending, ReadAdapter, UnloadAdapter
from weft.plan.step import Runner
from weft.scheduler.features.adapters import AdaptersFeature, LoadedAdapter


class Reading(NamedTuple):
    """An adapter that is being read, and its place."""

    message: LoadLoraAdapter
    place: int
    evicted: list[str]  # uids of the adapters that were unloaded for it
    pending: Pending


class Unloading:
    """An adapter that will be unloaded after its open requests have ended."""

    __slots__ = ("call", "num_requests")

    def __init__(self, call: int, num_requests: int) -> None:
        self.call = call
        self.num_requests = num_requests


class AdapterService(Service):
    """Attached while an adapter is being read, or waits for its requests to end."""

    name = "adapters"

    def __init__(
        self, core: EngineCore, runner: Runner, jobs: DeviceJobs, feature: AdaptersFeature
    ) -> None:
        self._core = core
        self._runner = runner
        self._jobs = jobs
        self.feature = feature
        self._loading: dict[str, int] = {}  # place by uid
        self._num_pinned = 0  # number of pinned ones among these
        # of these, the adapters that are not read completely
        self._reading: deque[Reading] = deque()
        self._leaving: dict[str, Unloading] = {}  # by uid

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    def wake_at(self) -> float:
        return SOON if self._reading else math.inf

    def load(self, message: LoadLoraAdapter) -> AdapterReply | None:
        """Begin to load an adapter. Returns the reply if the adapter is loaded already or cannot be
        loaded."""
        feature = self.feature
        uid = message.uid
        why_not = self._why_not(message)
        if why_not is not None:
            return why_not
        known = feature.loaded.get(uid)
        if known is not None:
            known.is_pinned = message.pinned
            known.name = message.lora_name or known.name
            return AdapterReply(success=True)
        place = feature.free_place(set(self._loading.values()))
        evicted: list[str] = []
        if place is None:
            victim = feature.least_used()
            if victim is None:
                return _refused(
                    409,
                    f"{feature.num_places} adapters are loaded (--max-loaded-loras), and all are "
                    "pinned or in use: unload one first",
                )
            place = victim.place
            evicted.append(victim.uid)
            feature.forget(victim.uid)
            self._jobs.submit(DeviceJob(UnloadAdapter(place), _no_reply))
        self._loading[uid] = place
        self._num_pinned += message.pinned
        pending = self._runner.control(ReadAdapter(message.lora_path, uid))
        self._reading.append(Reading(message, place, evicted, pending))
        self._core.hooks.begin_work(self)
        self._put_in_read()
        return None

    def unload(self, message: UnloadLoraAdapter) -> AdapterReply | None:
        """Refuse new requests for an adapter, and unload it after the open ones have ended."""
        adapter = self.feature.loaded.get(message.uid)
        if adapter is None:
            return _refused(404, "the adapter is not loaded")
        if adapter.is_leaving:
            return _refused(409, f"the adapter {adapter.name!r} is being unloaded already")
        adapter.is_leaving = True
        self._leaving[message.uid] = Unloading(message.call, adapter.num_open)
        self._core.hooks.attach(self)
        self._unload_idle()
        return None

    def after_step(self, now: float) -> None:
        self._put_in_read()
        self._unload_idle()

    def _put_in_read(self) -> None:
        """Load the adapters that have been read, in order."""
        while self._reading and self._reading[0].pending.done():
            self._put_in(self._reading.popleft())
        if not self._reading:
            self._core.hooks.end_work(self)

    def _put_in(self, reading: Reading) -> None:
        """Load an adapter that has been read, or report why it cannot be loaded."""
        reply = reading.pending.result()
        if not reply.ok:
            self._core.send(self._loaded(reading, reply))
            return

        def answer(result: JobResult) -> AdapterReply:
            return self._loaded(reading, result.reply)

        message = reading.message
        request = LoadAdapter(reading.place, message.lora_path, message.uid)
        self._jobs.submit(DeviceJob(request, answer))

    def _loaded(self, reading: Reading, reply: DeviceReply) -> AdapterReply:
        """The adapter has been loaded or cannot be loaded: returns the reply to the call."""
        message = reading.message
        del self._loading[message.uid]
        self._num_pinned -= message.pinned
        if reply.ok:
            adapter = LoadedAdapter(
                message.uid, reading.place, message.lora_name, is_pinned=message.pinned
            )
            self.feature.add(adapter)
        return _of_device(message.call, reply, evicted=reading.evicted)

    def _unload_idle(self) -> None:
        """Unload the adapters whose requests have ended."""
        for uid, leaving in list(self._leaving.items()):
            adapter = self.feature.loaded[uid]
            if adapter.num_open:
                continue
            del self._leaving[uid]
            self.feature.forget(uid)
            call = leaving.call
            num_requests = leaving.num_requests

            def answer(
                result: JobResult, call: int = call, num_requests: int = num_requests
            ) -> AdapterReply:
                return _of_device(call, result.reply, num_requests=num_requests)

            self._jobs.submit(DeviceJob(UnloadAdapter(adapter.place), answer))
        if not (self._leaving or self._reading):
            self._core.hooks.detach(self)

    def _why_not(self, message: LoadLoraAdapter) -> AdapterReply | None:
        feature = self.feature
        if not feature.num_places:
            return _refused(400, "this server takes no adapters; it would with --enable-lora")
        if message.uid in self._loading:
            return _refused(409, f"the adapter {message.lora_name!r} is being loaded already")
        known = feature.loaded.get(message.uid)
        if known is not None and known.is_leaving:
            return _refused(409, f"the adapter {known.name!r} is being unloaded")
        most = feature.max_together - 1
        is_new = message.pinned and not (known is not None and known.is_pinned)
        if is_new and feature.num_pinned + self._num_pinned >= most:
            return _refused(
                400,
                f"{feature.num_pinned + self._num_pinned} adapters are pinned; of "
                f"{feature.max_together} that run together (--max-loras-per-batch) at most {most} "
                "may be",
            )
        return None


def _refused(status: int, why: str) -> AdapterReply:
    return AdapterReply(success=False, message=why, status=status)


def _no_reply(result: JobResult) -> None:
    """Unloading for another adapter has no reply of its own: the call to load gets one."""


def _of_device(
    call: int, reply: DeviceReply, *, evicted: list[str] | None = None, num_requests: int = 0
) -> AdapterReply:
    return AdapterReply(
        call=call,
        success=reply.ok,
        message=reply.message,
        status=200 if reply.ok else reply.status,
        evicted=evicted or [],
        num_requests=num_requests,
    )
