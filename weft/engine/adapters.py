"""Loading and unloading adapters (LoRA) while the engine serves: which place each gets, which one
has to go for another, and what waits for open requests to end.

    load    ─▶ a free place, or that of the one not used for longest
            ─▶ it is read while steps go on ─▶ device job: it is put in ─▶ reply
    unload  ─▶ refuses new requests ─▶ the open ones end ─▶ device job ─▶ reply

Which requests may run together is decided in `scheduler/features/adapters.py`. No file is seen
here: what is wrong with one, the device says.
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
    """An adapter that is being read, and has its place."""

    message: LoadLoraAdapter
    place: int
    evicted: list[str]  # uids of those that went for it
    pending: Pending


class Unloading:
    """An adapter whose open requests have to end first."""

    __slots__ = ("call", "num_requests")

    def __init__(self, call: int, num_requests: int) -> None:
        self.call = call
        self.num_requests = num_requests


class AdapterService(Service):
    """Attached while an adapter is read, or waits for its requests to end."""

    name = "adapters"

    def __init__(
        self, core: EngineCore, runner: Runner, jobs: DeviceJobs, feature: AdaptersFeature
    ) -> None:
        self._core = core
        self._runner = runner
        self._jobs = jobs
        self.feature = feature
        self._loading: dict[str, int] = {}  # place by uid
        self._num_pinned = 0  # of these
        self._reading: deque[Reading] = deque()  # those of these that are not put in yet
        self._leaving: dict[str, Unloading] = {}  # by uid

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    def wake_at(self) -> float:
        return SOON if self._reading else math.inf

    def load(self, message: LoadLoraAdapter) -> AdapterReply | None:
        """Begin to load an adapter. Returns the reply if there is nothing to do, or nothing can
        be done."""
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
        """Let an adapter take no more requests, and unload it behind the open ones."""
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
        """Go on with those that have been read; they are in their order."""
        while self._reading and self._reading[0].pending.done():
            self._put_in(self._reading.popleft())
        if not self._reading:
            self._core.hooks.end_work(self)

    def _put_in(self, reading: Reading) -> None:
        """Put in one that has been read, or say why that cannot be."""
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
        """It is in its place now, or cannot be; the answer to who wanted it."""
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
    """Whoever asked for the place gets the reply to that."""


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
