"""Loading and unloading adapters (LoRA) while the engine serves: the slot of each adapter, which
adapter is unloaded for another, and unloads that wait for open requests.

    load    ─▶ the adapter is read while steps run
            ─▶ a free slot, or that of the least recently used adapter
            ─▶ device job: it is loaded, instead of the other one ─▶ reply
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
    """An adapter that is being read."""

    message: LoadLoraAdapter
    pending: Pending


class Chosen(NamedTuple):
    """The slot for an adapter that has been read."""

    adapter_slot: int
    victim: LoadedAdapter | None  # has the slot until the new adapter is loaded


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
        # By uid, the slot; None while the adapter is being read.
        self._loading: dict[str, int | None] = {}
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
        if self._choose_slot() is None:
            return self._without_slot(message.call)
        self._loading[uid] = None
        self._num_pinned += message.pinned
        pending = self._runner.control(ReadAdapter(message.lora_path, uid))
        self._reading.append(Reading(message, pending))
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
        message = reading.message
        reply = reading.pending.result()
        if not reply.ok:
            self._end_load(message)
            self._core.send(_of_device(message.call, reply))
            return
        # Only now, because the adapter might not have been valid, and the other one be lost.
        chosen = self._choose_slot()
        if chosen is None:
            self._end_load(message)
            self._core.send(self._without_slot(message.call))
            return
        self._loading[message.uid] = chosen.adapter_slot
        if chosen.victim is not None:
            chosen.victim.is_leaving = True

        def answer(result: JobResult) -> AdapterReply:
            return self._loaded(message, chosen, result.reply)

        request = LoadAdapter(chosen.adapter_slot, message.lora_path, message.uid)
        self._jobs.submit(DeviceJob(request, answer))

    def _choose_slot(self) -> Chosen | None:
        """A free slot, or that of the least recently used adapter; None if there is none."""
        feature = self.feature
        reserved = {
            adapter_slot for adapter_slot in self._loading.values() if adapter_slot is not None
        }
        adapter_slot = feature.free_slot(reserved)
        if adapter_slot is not None:
            return Chosen(adapter_slot, None)
        victim = feature.least_used()
        return None if victim is None else Chosen(victim.adapter_slot, victim)

    def _without_slot(self, call: int) -> AdapterReply:
        message = (
            f"{self.feature.num_adapter_slots} adapters are loaded (--max-loaded-loras), and all "
            "are pinned or in use: unload one first"
        )
        return AdapterReply(call=call, success=False, message=message, status=409)

    def _loaded(self, message: LoadLoraAdapter, chosen: Chosen, reply: DeviceReply) -> AdapterReply:
        """The adapter has been loaded or cannot be loaded: returns the reply to the call."""
        self._end_load(message)
        evicted: list[str] = []
        victim = chosen.victim
        if victim is not None:
            victim.is_leaving = False
        if reply.ok:
            if victim is not None:
                self.feature.forget(victim.uid)
                evicted.append(victim.uid)
            adapter = LoadedAdapter(
                message.uid, chosen.adapter_slot, message.lora_name, is_pinned=message.pinned
            )
            self.feature.add(adapter)
        return _of_device(message.call, reply, evicted=evicted)

    def _end_load(self, message: LoadLoraAdapter) -> None:
        del self._loading[message.uid]
        self._num_pinned -= message.pinned

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

            self._jobs.submit(DeviceJob(UnloadAdapter(adapter.adapter_slot), answer))
        if not (self._leaving or self._reading):
            self._core.hooks.detach(self)

    def _why_not(self, message: LoadLoraAdapter) -> AdapterReply | None:
        feature = self.feature
        if not feature.num_adapter_slots:
            return _refused(400, "this server takes no adapters; start it with --enable-lora")
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
