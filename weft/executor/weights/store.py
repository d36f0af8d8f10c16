"""Operations on weights and memory between steps: updates of weights, reading their values,
releasing and resuming memory.

All new weights are checked before the first one is loaded: their names, shapes, types and values.
They overwrite the old weights. If loading fails all the same, for example because a file has
disappeared, the last folder is loaded again. If that fails too, the weights count as released, and
no step is computed with them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from weft.config.model import BadCheckpoint, ModelConfig, ModelError
from weft.executor.passes.experts import ExpertCounts, ExpertError, ExpertRecorder
from weft.executor.weights.groups import UpdateGroups
from weft.executor.weights.same_model import quantization_in, require_same_model
from weft.models.layers.weight import Weight, Weights
from weft.models.registry import DecoderModel, EncoderModel
from weft.models.transformers_backend.model import TransformersModel
from weft.models.vision.tower import Tower
from weft.observe.log import EventLog
from weft.parallel.update_group import GroupError
from weft.plan.device import (
    KV_CACHE,
    TAGS,
    WEIGHTS,
    DeviceReply,
    DeviceRequest,
    GetWeight,
    JoinGroup,
    LeaveGroup,
    LoadAdapter,
    MeetOthers,
    ReadAdapter,
    ReceiveWeights,
    RecordExperts,
    ReleaseMemory,
    ResumeMemory,
    UnloadAdapter,
    UpdateFromDisk,
    UpdateFromTensors,
)
from weft.weights import release
from weft.weights.contents import open_contents
from weft.weights.load import load_weights, randomize, unread_of
from weft.weights.origin import WeightOrigin, digest_of, origin_of
from weft.weights.pieces import NOT_FINITE, is_finite
from weft.weights.root import WeightsRoot
from weft.weights.safetensors import BytesContent
from weft.weights.scales import FLOATS
from weft.weights.stream import (
    WeightMatch,
    matched,
    put_all,
    put_tensor,
    require_finite,
)

MAX_VALUES = 4_000_000  # values of a weight in one reply

log = EventLog("engine")


def _pieces_of(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[bytes | memoryview]:
    """Names, types, shapes and bytes of tensors, for a digest."""
    for name, tensor in named:
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.cpu().view(torch.uint8).numpy().data


def _sizes(found: Sequence[WeightMatch]) -> list[int]:
    return [match.stored.num_bytes for match in found]


class Refused(Exception):
    """The request cannot be carried out; the message gives the reason. Nothing has changed."""


class LoadedAdapters(Protocol):
    """The adapters of a model, by adapter slot."""

    def read(self, path: str, uid: str) -> int:
        """Read the adapter with this uid in advance, for `load`. May run on another thread while
        steps are computed. Returns the bytes of its tensors. Raises ModelError; then nothing has
        changed."""
        ...

    def load(self, adapter_slot: int, path: str, uid: str) -> int:
        """Put the adapter with this uid into a slot. Reads it first unless `read` has done so.
        Returns the bytes of its tensors. Raises ModelError; then nothing has changed."""
        ...

    def unload(self, adapter_slot: int) -> None:
        """Remove the adapter of a slot, if there is one."""
        ...


@dataclass(frozen=True)
class ModelMemory:
    """A model and the tensors that store its weights and KV."""

    model: DecoderModel | EncoderModel
    config: ModelConfig
    weights: Sequence[Tensor]
    kv_cache: Sequence[Tensor]
    device: torch.device
    tower: Tower | None = None  # the media encoder of the model, if it has one
    on_new_weights: Callable[[], None] | None = None  # called when weights have changed

    def all_weights(self) -> Weights:
        """All weights of the model and its tower."""
        yield from self.model.weights()
        if self.tower is not None:
            yield from self.tower.weights()

    def note_new_weights(self) -> None:
        if self.on_new_weights is not None:
            self.on_new_weights()


class WeightStore:
    """Carries out device requests, one at a time, on the thread that also runs the steps. Only
    `ReadAdapter` runs on another thread, at the same time."""

    def __init__(
        self,
        memory: ModelMemory,
        source: Path | None,
        root: WeightsRoot,
        experts: ExpertRecorder | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        """`source`: the folder of the weights; None if they are random. `experts`: counts the
        chosen experts; None: the model has no experts. `adapters`: the adapters of the model; None:
        it can have none."""
        self.kv_cache = memory.kv_cache
        self._memory = memory
        self.origin = origin_of(source)
        # Whether weights from the network update the origin, which costs the time of a digest.
        self.follows_origin = False
        self._source = source
        self._root = root
        self._experts = experts
        self._adapters = adapters
        self._weights: dict[str, Weight] = {weight.name: weight for weight in memory.all_weights()}
        self._groups = UpdateGroups(memory.device)
        self._released: set[str] = set()

    @torch.inference_mode()
    def do(self, request: DeviceRequest) -> DeviceReply:
        """Carry out a request. Raises nothing: the reply contains errors."""
        try:
            return self._HANDLERS[type(request)](self, request)
        except (Refused, ModelError, GroupError) as exc:
            log.info("device_request_refused", request=type(request).__name__, reason=exc)
            return self._reply(ok=False, message=str(exc))
        except Exception as exc:
            log.exception("device_request_failed", request=type(request).__name__)
            return self._reply(
                ok=False, message=f"the device failed with {type(exc).__name__}", status=500
            )

    # New weights

    def _update_from_disk(self, request: UpdateFromDisk) -> DeviceReply:
        folder = self._root.folder(request.folder)
        try:
            with ExitStack() as stack:
                paths = self._root.weight_files(folder)
                require_same_model(folder, self._memory.config)
                origin = origin_of(folder)
                if isinstance(self._memory.model, TransformersModel):
                    return self._update_by_library(self._memory.model, origin)
                files = open_contents(stack, paths)
                found = matched(
                    self._weights,
                    files,
                    f"the weights in {folder} do not fit the model",
                    quantization=quantization_in(folder, self._memory.config),
                    unread=unread_of(self._memory.config),
                )
                require_finite(found)
                return self._put(lambda: put_all(found), _sizes(found), origin)
        except ModelError as exc:
            # The reply contains the requested name of the folder, never its real path.
            message = str(exc).replace(str(folder), request.folder[:200])
            raise Refused(message) from exc

    def _update_from_tensors(self, request: UpdateFromTensors) -> DeviceReply:
        self._require_weights()
        content = BytesContent(request.content, "what was sent")
        found = matched(
            self._weights,
            [content],
            "the tensors do not fit the model",
            quantization=self._memory.config.stored,
            whole=False,
        )
        if not found:
            raise Refused("there is no tensor")
        require_finite(found)
        origin = self._added([request.content])
        return self._put(lambda: put_all(found), _sizes(found), origin)

    def _receive_weights(self, request: ReceiveWeights) -> DeviceReply:
        """Receive all weights before the first one is loaded, so that a sender that fails leaves
        the model unchanged."""
        self._require_weights()
        group = self._groups.of(request.group)
        wanted = self._announced(request)
        tensors = []
        try:
            for name, (weight, dtype) in wanted.items():
                tensors.append(
                    torch.empty(
                        weight.shape,
                        dtype=dtype,
                        device=group.device,
                    )
                )
                group.broadcast(tensors[-1])
                if not is_finite(tensors[-1]):
                    raise Refused(f"{name} has {NOT_FINITE}")
        except (GroupError, Refused):
            # The sender and this receiver may be at different tensors.
            self._groups.leave(group.name)
            raise

        def put() -> None:
            for (weight, _), tensor in zip(wanted.values(), tensors, strict=True):
                put_tensor(weight, tensor)

        origin = self._added(_pieces_of(zip(wanted, tensors, strict=True)))
        return self._put(put, [tensor.nbytes for tensor in tensors], origin)

    def _added(self, pieces: Iterable[bytes | memoryview]) -> WeightOrigin:
        """The origin after an update with these bytes; unchanged unless `follows_origin`."""
        if not self.follows_origin:
            return self.origin
        return self.origin.with_added(digest_of(pieces))

    def _announced(self, request: ReceiveWeights) -> dict[str, tuple[Weight, torch.dtype]]:
        """The weights that the request announces, in order, with their types. Raises Refused."""
        types = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}
        if not request.names or len(set(request.names)) < len(request.names):
            raise Refused("names must have at least one weight, and no weight twice")
        if not len(request.names) == len(request.dtypes) == len(request.shapes):
            raise Refused("names, dtypes and shapes must be of one length")
        wanted = {}
        for name, dtype, shape in zip(request.names, request.dtypes, request.shapes, strict=True):
            weight = self._weight(name)
            if shape != weight.shape:
                raise Refused(
                    f"{name} is announced as {list(shape)} instead of {list(weight.shape)}"
                )
            if dtype.removeprefix("torch.") not in types:
                raise Refused(
                    f"{name} is announced as {dtype[:64]!r}; expected is one of {', '.join(types)}"
                )
            wanted[name] = (weight, types[dtype.removeprefix("torch.")])
        return wanted

    def _put(
        self,
        put: Callable[[], None],
        sizes: Sequence[int],
        origin: WeightOrigin,
    ) -> DeviceReply:
        """Load checked content into the model. `sizes`: the bytes of its tensors; `origin`: of all
        weights afterwards."""
        try:
            put()
            self._memory.note_new_weights()
        except Exception as exc:
            log.exception("update_broke_off")
            reason = f"the new weights broke off while they were put in ({type(exc).__name__})"
            return self._after_failure(reason)
        self.origin = origin
        if origin.folder is not None and not origin.added:
            self._source = origin.folder
            self._released.discard(WEIGHTS)
        return self._reply(
            kv_is_stale=True,
            num_tensors=len(sizes),
            num_bytes=sum(sizes),
        )

    def _after_failure(self, reason: str) -> DeviceReply:
        """Load the last folder again, because an update has left old and new weights mixed."""
        self._released.add(WEIGHTS)
        try:
            self._reload()
        except Exception:
            log.exception("reload_failed")
            message = (
                f"{reason}, and the last folder cannot be loaded either; "
                "update_weights_from_disk with valid weights repairs this"
            )
            return self._reply(
                ok=False,
                message=message,
                status=500,
                kv_is_stale=True,
            )
        message = f"{reason}; those of the last folder are in use again"
        return self._reply(
            ok=False, message=message, status=500, kv_is_stale=True, is_reloaded=True
        )

    def _reload(self) -> None:
        """Load the weights from the last folder again, or the random ones. Raises ModelError, and
        errors of the device."""
        self.origin = origin_of(self._source)
        if self._source is None:
            randomize(iter(self._weights.values()), self._memory.device)
        elif isinstance(self._memory.model, TransformersModel):
            self._memory.model.load(self._source)
        else:
            load_weights(iter(self._weights.values()), self._source, unread_of(self._memory.config))
        self._memory.note_new_weights()
        self._released.discard(WEIGHTS)

    def _update_by_library(self, model: TransformersModel, origin: WeightOrigin) -> DeviceReply:
        """Let the transformers library read a folder, because it knows the renamed and merged
        tensors of its checkpoints. Meanwhile the weights are in memory twice."""
        assert origin.folder is not None
        module = model.read(origin.folder)
        sizes: list[int] = []
        for name, parameter in module.named_parameters():
            if not is_finite(parameter.data):
                raise BadCheckpoint(f"{name} has {NOT_FINITE}")
            sizes.append(parameter.nbytes)
        return self._put(lambda: model.adopt(module), sizes, origin)

    # Adapters

    def _read_adapter(self, request: ReadAdapter) -> DeviceReply:
        num_bytes = self._adapter_table.read(request.path, request.uid)
        return self._reply(num_bytes=num_bytes)

    def _load_adapter(self, request: LoadAdapter) -> DeviceReply:
        num_bytes = self._adapter_table.load(request.adapter_slot, request.path, request.uid)
        return self._reply(num_bytes=num_bytes)

    def _unload_adapter(self, request: UnloadAdapter) -> DeviceReply:
        self._adapter_table.unload(request.adapter_slot)
        return self._reply()

    @property
    def _adapter_table(self) -> LoadedAdapters:
        if self._adapters is None:
            raise Refused("this engine has no room for adapters: it was started without them")
        return self._adapters

    # Groups

    def _join_group(self, request: JoinGroup) -> DeviceReply:
        self._groups.join(request)
        return self._reply()

    def _leave_group(self, request: LeaveGroup) -> DeviceReply:
        self._groups.leave(request.name)
        return self._reply()

    # Values

    def _get_weight(self, request: GetWeight) -> DeviceReply:
        self._require_weights()
        weight = self._weight(request.name)
        num_rows = min(request.num_rows, weight.shape[0])
        row_size = weight.shape[1] if len(weight.shape) == 2 else 1
        if num_rows * row_size > MAX_VALUES:
            raise Refused(f"{num_rows:,} rows of {row_size:,} are more than {MAX_VALUES:,} values")
        # Only matrices can be read in part.
        rows = weight.get(0, num_rows) if len(weight.shape) == 2 else weight.get()[:num_rows]
        values = rows.float().cpu().contiguous()
        return self._reply(shape=tuple(values.shape), values=values.numpy().tobytes())

    def _weight(self, name: str) -> Weight:
        if name in self._weights:
            return self._weights[name]
        near = (
            difflib.get_close_matches(name[:200], self._weights, n=3, cutoff=0.5)
            or list(self._weights)[:3]
        )
        raise Refused(f"there is no weight {name[:200]!r}; there are {', '.join(near)}, and others")

    def _require_weights(self) -> None:
        if WEIGHTS in self._released:
            raise Refused("the memory of the weights is released")

    # Experts

    def _record_experts(self, request: RecordExperts) -> DeviceReply:
        experts = self._experts
        if experts is None:
            raise Refused(f"{self._memory.config.name} has no experts")
        try:
            if request.action == "start":
                experts.start()
            elif request.action == "stop":
                experts.stop()
            elif request.action == "look":
                return self._counts(experts.look(), is_recording=experts.is_on)
            else:
                return self._counts(experts.dump(), is_recording=experts.is_on)
        except ExpertError as exc:
            raise Refused(str(exc)) from exc
        return self._reply()

    def _counts(self, found: ExpertCounts, *, is_recording: bool) -> DeviceReply:
        return self._reply(
            shape=found.counts.shape,
            values=found.counts.tobytes(),
            layers=found.layers,
            file=found.file,
            is_recording=is_recording,
        )

    # Memory

    def _release_memory(self, request: ReleaseMemory) -> DeviceReply:
        _check_tags(request.tags)
        if not release.is_offered(self._memory.device):
            raise Refused("memory can only be released on a CPU under Linux")
        tensors = {WEIGHTS: self._memory.weights, KV_CACHE: self._memory.kv_cache}
        num_bytes = 0
        for tag in request.tags:
            self._released.add(tag)
            num_bytes += release.give_back(tensors[tag])
        return self._reply(num_bytes=num_bytes)

    def _resume_memory(self, request: ResumeMemory) -> DeviceReply:
        _check_tags(request.tags)
        reloads = WEIGHTS in request.tags and WEIGHTS in self._released
        if reloads:
            try:
                self._reload()
            except ModelError as exc:
                log.error("reload_failed", reason=exc)
                raise Refused(
                    "the weights cannot be loaded again from where they came; the log says why"
                ) from exc
        self._released -= set(request.tags)
        return self._reply(is_reloaded=reloads)

    def _reply(self, *, ok: bool = True, **values: Any) -> DeviceReply:
        return DeviceReply(
            ok=ok,
            released=tuple(sorted(self._released)),
            **values,
        )

    _HANDLERS: ClassVar[dict[type, Callable[[WeightStore, Any], DeviceReply]]] = {
        UpdateFromDisk: _update_from_disk,
        UpdateFromTensors: _update_from_tensors,
        JoinGroup: _join_group,
        ReceiveWeights: _receive_weights,
        LeaveGroup: _leave_group,
        GetWeight: _get_weight,
        RecordExperts: _record_experts,
        ReleaseMemory: _release_memory,
        ResumeMemory: _resume_memory,
        ReadAdapter: _read_adapter,
        LoadAdapter: _load_adapter,
        UnloadAdapter: _unload_adapter,
        # The pass around the steps has waited for them.
        MeetOthers: lambda store, request: store._reply(),
    }


def _check_tags(tags: Sequence[str]) -> None:
    for tag in tags:
        if tag not in TAGS:
            raise Refused(f"the tag {tag[:64]!r} is unknown; {', '.join(TAGS)} are allowed")
