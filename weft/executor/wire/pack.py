"""Encodes messages between rank 0 and its followers. The bytes contain only values.

    plan, device request, reply   ─▶   msgpack: [name, field, field, ...], arrays as raw bytes

A name selects one of the classes in `NAMED`; no other objects can be created from received bytes,
and there is no pickle. The sender is trusted (`parallel/links.py`), so the lengths of arrays are
not compared here.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft.plan import device, inputs, outputs
from weft.plan.device import DeviceRequest
from weft.plan.step import (
    Drafting,
    ForwardMode,
    LayerSpan,
    Plan,
    Sampling,
    SlotCopies,
    StateSlots,
    TableWrites,
    WindowSlots,
)

ARRAY = 1  # code of arrays in msgpack: type, number of dimensions, dimensions, content
DTYPES = (np.bool_, np.int32, np.int64, np.float32, np.float64, np.uint8)
CODES = {np.dtype(dtype): code for code, dtype in enumerate(DTYPES)}
MAX_DIMENSIONS = 8

NAMED: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Plan, Sampling, TableWrites, SlotCopies, WindowSlots, StateSlots, Drafting, LayerSpan),
        *(inputs.InputVectors,),
        *(outputs.SampledLogprobsRequest, outputs.PoolingRequest),
        *(outputs.PromptLogprobsRequest, outputs.HiddenStatesRequest),
        *(device.UpdateFromDisk, device.UpdateFromTensors, device.JoinGroup),
        *(device.ReceiveWeights, device.LeaveGroup, device.GetWeight),
        *(device.ReleaseMemory, device.ResumeMemory, device.RecordExperts),
        *(device.ReadAdapter, device.LoadAdapter, device.UnloadAdapter),
        *(device.MeetOthers, device.DeviceReply),
    )
}
FIELDS = {kind: tuple(one.name for one in fields(kind)) for kind in NAMED.values()}

T = TypeVar("T")
REQUESTS: tuple[type[DeviceRequest], ...] = get_args(DeviceRequest)


class WireError(ValueError):
    """The bytes encode nothing that is sent here."""


def pack(value: object) -> bytes:
    """Encode a value of one of the classes in `NAMED`. Raises WireError for other values."""
    return _encoder.encode(_plain(value))


def unpack(data: bytes, kind: type[T]) -> T:
    """Decode a value of class `kind`. Raises WireError."""
    try:
        value = _value(_decoder.decode(data))
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError) as exc:
        raise WireError(f"{len(data):,} bytes that are no {kind.__name__}: {exc}") from exc
    if not isinstance(value, kind):
        raise WireError(f"a {type(value).__name__} came instead of a {kind.__name__}")
    return value


def unpack_request(data: bytes) -> DeviceRequest:
    """Decode a device request. Raises WireError."""
    value: object = unpack(data, object)
    if not isinstance(value, REQUESTS):
        raise WireError(f"a {type(value).__name__} came instead of a request to the device")
    return value


def _plain(value: object) -> object:
    """The value as plain lists and scalars."""
    if isinstance(value, np.ndarray):
        return _packed_array(value)
    names = FIELDS.get(type(value))
    if names is not None:
        return [type(value).__name__, *[_plain(getattr(value, name)) for name in names]]
    if isinstance(value, tuple):
        return ["", *[_plain(one) for one in value]]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise WireError(f"a {type(value).__name__} cannot be sent to another rank")


def _value(plain: Any) -> Any:
    if not isinstance(plain, list):
        return plain
    if not plain or not isinstance(plain[0], str):
        raise WireError("a list without a name")
    name, *values = plain
    if not name:
        return tuple(_value(one) for one in values)
    kind = NAMED.get(name)
    if kind is None:
        raise WireError(f"an unknown name: {name[:64]!r}")
    names = FIELDS[kind]
    if len(names) != len(values):
        raise WireError(f"{len(values)} fields of a {name} instead of {len(names)}")
    found = {field: _value(one) for field, one in zip(names, values, strict=True)}
    if kind is Plan:
        found["mode"] = ForwardMode(found["mode"])
    return kind(**found)


def _packed_array(array: NDArray[Any]) -> msgspec.msgpack.Ext:
    code = CODES.get(array.dtype)
    if code is None or array.ndim > MAX_DIMENSIONS:
        raise WireError(f"an array of {array.dtype} cannot be sent to another rank")
    shape = np.array(array.shape, dtype="<u8").tobytes()
    return msgspec.msgpack.Ext(ARRAY, bytes((code, array.ndim)) + shape + array.tobytes())


def _read_array(code: int, data: memoryview) -> NDArray[Any]:
    if code != ARRAY or len(data) < 2 or data[0] >= len(DTYPES) or data[1] > MAX_DIMENSIONS:
        raise WireError("an array of a kind that is not sent here")
    begin = 2 + 8 * data[1]
    shape = tuple(int(size) for size in np.frombuffer(data[2:begin], dtype="<u8"))
    dtype = np.dtype(DTYPES[data[0]])
    if len(shape) != data[1] or math.prod(shape) * dtype.itemsize != len(data) - begin:
        raise WireError("an array whose length is not what its shape says")
    # A copy, because torch needs memory that can be written.
    return np.frombuffer(data[begin:], dtype=dtype).reshape(shape).copy()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ext_hook=_read_array)
