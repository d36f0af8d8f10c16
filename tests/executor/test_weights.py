"""New weights for a runner that runs, values out of it, and its memory back and forth."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from tests.executor.checkpoints import LARGE, checkpoint, write
from tests.executor.driver import MODEL, Driver, Turn, make_driver
from weft.assemble.cache import weights_digest
from weft.config.model import BadCheckpoint
from weft.executor.weights import store
from weft.models.registry import make_model
from weft.ops.plain import PlainOps
from weft.plan.device import (
    DeviceReply,
    DeviceRequest,
    GetWeight,
    JoinGroup,
    LeaveGroup,
    ReceiveWeights,
    ReleaseMemory,
    ResumeMemory,
    UpdateFromDisk,
    UpdateFromTensors,
)
from weft.weights import stream
from weft.weights.load import randomize

NORM = "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"
HEAD = "lm_head.weight"


@pytest.fixture(
    params=[{}, {"quantize": "int8"}, {"quantize": "int4"}, {"kernels": "auto"}], ids=str
)
def driver(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A runner with weights from `old`; `new` lies beside it."""
    write(tmp_path / "new", checkpoint(1.5))
    driver = make_driver(folder=write(tmp_path / "old", checkpoint()), **request.param)
    yield driver
    driver.runner.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Driver]:
    write(tmp_path / "new", checkpoint(1.5))
    driver = make_driver(folder=write(tmp_path / "old", checkpoint()))
    yield driver
    driver.runner.close()


def ask(driver: Driver, request: DeviceRequest) -> DeviceReply:
    return driver.runner.control(request).result()


def logits(driver: Driver) -> torch.Tensor:
    driver.slots.clear()
    return driver.run(Turn(0, [1, 2, 3, 4]))


def kept(driver: Driver) -> dict[str, torch.Tensor]:
    return {weight.name: weight.get() for weight in driver.steps._model.weights()}


def addresses(driver: Driver) -> list[int]:
    return [tensor.data_ptr() for tensor in driver.runner.store._memory.weights]


def test_new_weights_from_disk_are_put_where_the_old_ones_were(driver: Driver) -> None:
    before = logits(driver)
    places = addresses(driver)
    reply = ask(driver, UpdateFromDisk("new"))
    assert (reply.ok, reply.kv_is_stale, reply.num_tensors) == (True, True, len(checkpoint())), (
        reply.message
    )
    assert reply.num_bytes == sum(tensor.nbytes for tensor in checkpoint().values())
    assert addresses(driver) == places
    assert not torch.allclose(logits(driver), before, atol=1e-3)
    assert ask(driver, UpdateFromDisk("old")).ok
    assert torch.equal(logits(driver), before)


def spoiled(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        tensors = checkpoint(1.5)
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return spoil


def set_last(value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[HEAD][-1].fill_(value)


def cut(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-4])


def lie(folder: Path) -> None:
    """The header says that a tensor has more rows than there are bytes."""
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(
        whole.replace(b'"shape":[61,16]', b'"shape":[99,16]')
    )


def as_fifo(name: str) -> Callable[[Path], object]:
    def replace_by_fifo(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return replace_by_fifo


def as_link_out(name: str) -> Callable[[Path], object]:
    def replace_by_link(folder: Path) -> None:
        outside = folder.parents[1] / f"outside-{name}"
        outside.write_bytes(b"{}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside)

    return replace_by_link


def write_config(folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "vocab_size": 61,
    }
    config |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "rms_norm_eps": 1e-5,
    }
    config |= {"max_position_embeddings": 128, "rope_theta": 500_000.0}
    (folder / "config.json").write_text(json.dumps(config))


BAD = {
    "missing": (spoiled(lambda tensors: tensors.pop(UP)), f"1 missing: {UP}"),
    "unknown": (
        spoiled(lambda tensors: tensors.update(other=torch.ones(1))),
        "1 unexpected: other",
    ),
    "shape": (
        spoiled(lambda tensors: tensors.update({UP: torch.ones(24, 17)})),
        r"\[24, 17\] instead of \[24, 16\]",
    ),
    "type": (
        spoiled(lambda tensors: tensors.update({UP: torch.ones(24, 16).int()})),
        "I32 instead of one of",
    ),
    "nan": (spoiled(set_last(float("nan"))), f"{HEAD} has values that are not finite"),
    "infinite": (spoiled(set_last(float("-inf"))), f"{HEAD} has values that are not finite"),
    "large": (spoiled(set_last(-3.4e38)), f"{HEAD} has values that are .* too large for bfloat16"),
    "cut": (cut, "not downloaded to its end"),
    "lying": (lie, r"has [\d,]+ bytes, but \[99, 16\] of \w+ take [\d,]+"),
    "empty file": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        "0 bytes without a header",
    ),
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "fifo": (as_fifo("model.safetensors"), "model.safetensors is not a regular file"),
    "fifo as config": (as_fifo("config.json"), "config.json is not a regular file"),
    "fifo as index": (as_fifo("model.safetensors.index.json"), "index.json is not a regular file"),
    "link out": (as_link_out("model.safetensors"), "model.safetensors is a link out of"),
    "config out": (as_link_out("config.json"), "config.json is a link out of"),
    "other model": (write_config, "config.json in new is of another model: rope is"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_weights_change_nothing(tmp_path: Path, what: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    driver = make_driver(folder=write(root / "old", checkpoint()))
    before = logits(driver)
    spoil, expected = BAD[what]
    spoil(write(root / "new", checkpoint(1.5)))
    reply = ask(driver, UpdateFromDisk("new"))
    assert (reply.ok, reply.status, reply.kv_is_stale) == (False, 400, False)
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(reply.message)
    assert str(tmp_path) not in reply.message
    assert torch.equal(logits(driver), before)
    driver.runner.close()


@pytest.mark.parametrize(
    "name",
    ["", "..", "../..", "new/../../old", "/", "/etc", "nowhere", "way-out", "a\0b", "x" * 5_000],
)
def test_nothing_outside_of_the_root_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "root").mkdir()
    driver = make_driver(folder=write(tmp_path / "root" / "old", checkpoint()))
    write(tmp_path / "old", checkpoint(1.5))
    (tmp_path / "root" / "way-out").symlink_to(tmp_path / "old")
    reply = ask(driver, UpdateFromDisk(name))
    assert (reply.ok, reply.status) == (False, 400)
    assert str(tmp_path) not in reply.message
    driver.runner.close()


def test_the_root_can_be_set_and_an_absolute_name_below_it_is_as_good(tmp_path: Path) -> None:
    new = write(tmp_path / "elsewhere", checkpoint(1.5))
    old = write(tmp_path / "old", checkpoint())
    driver = make_driver(folder=old, weights_root=str(new))
    assert not ask(driver, UpdateFromDisk(str(old))).ok
    assert ask(driver, UpdateFromDisk(".")).ok
    assert ask(driver, UpdateFromDisk(str(new))).ok
    driver.runner.close()


def test_an_update_that_breaks_off_brings_the_last_weights_back(
    plain: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logits(plain)
    places = addresses(plain)

    def break_off(matches: list[stream.WeightMatch]) -> None:
        stream.put_all(matches[:3])
        raise BadCheckpoint("the file is gone")

    monkeypatch.setattr(store, "put_all", break_off)
    reply = ask(plain, UpdateFromDisk("new"))
    assert (reply.ok, reply.status, reply.kv_is_stale, reply.is_reloaded) == (
        False,
        500,
        True,
        True,
    )
    assert reply.released == ()
    assert addresses(plain) == places
    assert torch.equal(logits(plain), before)


def test_if_they_cannot_come_back_nothing_is_computed_until_an_update_mends_it(
    plain: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logits(plain)
    old = (tmp_path / "old" / "model.safetensors").rename(tmp_path / "away")
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_all", lambda matches: 1 / 0)
        reply = ask(plain, UpdateFromDisk("new"))
    assert (reply.ok, reply.released) == (False, ("weights",))
    assert not ask(plain, UpdateFromTensors(save({NORM: torch.ones(16)}))).ok
    old.rename(tmp_path / "old" / "model.safetensors")
    reply = ask(plain, UpdateFromDisk("old"))
    assert (reply.ok, reply.released) == (True, ())
    assert torch.equal(logits(plain), before)


# Tensors


def test_tensors_replace_just_the_weights_that_they_name(plain: Driver) -> None:
    before = kept(plain)
    new = {UP: torch.full((24, 16), 0.5, dtype=torch.bfloat16), NORM: torch.full((16,), 2.0)}
    reply = ask(plain, UpdateFromTensors(save(new)))
    assert (reply.ok, reply.num_tensors, reply.num_bytes, reply.kv_is_stale) == (
        True,
        2,
        24 * 16 * 2 + 64,
        True,
    )
    after = kept(plain)
    assert after[UP].eq(0.5).all()
    assert after[NORM].eq(2).all()
    assert all(torch.equal(after[name], before[name]) for name in before if name not in new)


def test_the_origin_of_weights_says_whether_they_are_the_same(
    plain: Driver, tmp_path: Path
) -> None:
    store = plain.runner.store
    store.follows_origin = True
    first = store.origin
    digests = [weights_digest(first, None)]
    for request in (
        UpdateFromDisk("new"),
        UpdateFromTensors(save({NORM: torch.full((16,), 2.0)})),
        UpdateFromTensors(save({NORM: torch.full((16,), 3.0)})),
    ):
        assert ask(plain, request).ok
        digests.append(weights_digest(store.origin, None))
    assert len(set(digests)) == 4
    assert ask(plain, ReleaseMemory(("weights",))).ok
    assert ask(plain, ResumeMemory(("weights",))).is_reloaded
    assert weights_digest(store.origin, None) == digests[1]
    assert ask(plain, UpdateFromDisk("old")).ok
    assert store.origin == first
    assert weights_digest(store.origin, None) == digests[0]
    write(tmp_path / "old", checkpoint(2.0))
    with pytest.raises(OSError, match="were changed since they were loaded"):
        weights_digest(first, None)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {NORM: torch.ones(16), "model.norm.wait": torch.ones(16)},
            "1 unexpected: model.norm.wait",
        ),
        ({NORM: torch.ones(16), UP: torch.ones(24, 15)}, "of another shape"),
        ({NORM: torch.ones(16), UP: torch.full((24, 16), float("inf"))}, "not finite"),
        ({}, "there is no tensor"),
    ],
)
def test_of_tensors_all_are_taken_or_none(
    plain: Driver, tensors: dict[str, torch.Tensor], message: str
) -> None:
    before = logits(plain)
    reply = ask(
        plain, UpdateFromTensors(save({name: tensor * 3 for name, tensor in tensors.items()}))
    )
    assert (reply.ok, reply.status) == (False, 400)
    assert message in reply.message
    assert torch.equal(logits(plain), before)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff" * 8,
        b"no json here...",
        b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
        b'{"a":1}',
        b"[1]",
        b"[" * 100_000,
    ],
)
def test_bytes_that_lie_are_refused_before_memory_is_taken(plain: Driver, header: bytes) -> None:
    reply = ask(plain, UpdateFromTensors(len(header).to_bytes(8, "little") + header + bytes(4)))
    assert (reply.ok, reply.status) == (False, 400)
    assert "what was sent is damaged" in reply.message


# Groups: the trainer is another process, which makes its group as trainers do

TRAINER = """
    import sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world, rendezvous

    limit = timedelta(seconds=240)
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{sys.argv[1]}", 0, 2, timeout=limit))
    store = PrefixStore("trainer", store)
    group, _ = _new_process_group_helper(2, 0, [], "gloo", store, group_name="trainer", timeout=limit)
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    for line in sys.stdin:
        value, rows = line.split()
        dist.broadcast(torch.full((24, 16), float(value), dtype=torch.bfloat16)[: int(rows)], src=0, group=group)
        print("sent", flush=True)
"""


def free_port() -> int:
    """One of those that the system gives to nobody by itself, so that it stays free."""
    while True:
        port = random.SystemRandom().randint(15_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@pytest.fixture
def trainer() -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process, port
    process.kill()
    process.communicate()


def join(port: int, timeout_s: float = 240.0) -> JoinGroup:
    return JoinGroup(
        "trainer", "127.0.0.1", port, rank=1, world_size=2, backend="gloo", timeout_s=timeout_s
    )


def receive(
    name: str = UP, dtype: str = "bfloat16", shape: tuple[int, ...] = (24, 16)
) -> ReceiveWeights:
    return ReceiveWeights("trainer", (name,), (dtype,), (shape,))


def send(process: subprocess.Popen[str], value: float) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{value} 24\n")
    process.stdin.flush()


def test_a_trainer_in_another_process_sends_weights(
    plain: Driver, trainer: tuple[subprocess.Popen[str], int]
) -> None:
    process, port = trainer
    assert ask(plain, join(port)).ok
    assert "joined already" in ask(plain, join(port)).message
    for wrong in (receive("model.norm.wait"), receive(dtype="int8"), receive(shape=(16, 24))):
        assert ask(plain, wrong).status == 400  # and the group is not touched
    send(process, 0.25)
    reply = ask(plain, receive())
    assert (reply.ok, reply.kv_is_stale, reply.num_bytes) == (True, True, 24 * 16 * 2), (
        reply.message
    )
    assert kept(plain)[UP].eq(0.25).all()
    send(process, float("nan"))
    assert "not finite" in ask(plain, receive()).message
    assert kept(plain)[UP].eq(0.25).all()
    assert (
        "no group 'trainer' is joined" in ask(plain, LeaveGroup("trainer")).message
    )  # it has left already


def test_a_trainer_that_ends_or_never_comes_does_no_harm(
    plain: Driver, trainer: tuple[subprocess.Popen[str], int]
) -> None:
    before = logits(plain)
    reply = ask(plain, join(free_port(), timeout_s=0.3))
    assert (reply.ok, reply.message) == (
        False,
        "the group 'trainer' did not come together within 0.3 s",
    )
    process, port = trainer
    assert ask(plain, join(port)).ok
    process.kill()
    reply = ask(plain, receive())
    assert (reply.ok, reply.status, reply.kv_is_stale) == (False, 400, False)
    assert "broke" in reply.message
    assert torch.equal(logits(plain), before)


def test_groups_that_cannot_be_are_refused(plain: Driver) -> None:
    assert "gloo, nccl" in ask(plain, replace_backend("mpi")).message
    assert "computes on a CPU" in ask(plain, replace_backend("nccl")).message
    assert "no group" in ask(plain, receive()).message


def replace_backend(backend: str) -> JoinGroup:
    return JoinGroup("g", "127.0.0.1", 1, rank=1, world_size=2, backend=backend, timeout_s=1.0)


# Values


def test_values_are_those_that_are_kept(driver: Driver) -> None:
    reply = ask(driver, GetWeight(UP, 5))
    assert (reply.ok, reply.shape) == (True, (5, 16))
    values = np.frombuffer(reply.values, np.float32).reshape(5, 16)
    assert np.array_equal(values, kept(driver)[UP][:5].float().numpy())
    assert np.allclose(values, checkpoint()[UP][:5].numpy(), atol=0.01)
    assert ask(driver, GetWeight(NORM, 100)).shape == (16,)


def test_an_unknown_name_is_answered_with_near_ones(plain: Driver) -> None:
    reply = ask(plain, GetWeight("model.layers.1.mlp.up.weight", 5))
    assert (reply.ok, reply.status) == (False, 400)
    assert UP in reply.message


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes memory back")
@pytest.mark.parametrize("settings", [{}, {"quantize": "int8"}, {"kernels": "auto"}], ids=str)
def test_released_memory_goes_back_to_the_system_and_comes_again(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    model = make_model(LARGE, PlainOps(torch.float32, torch.device("cpu")))
    randomize(model.weights())
    save_file(
        {weight.name: weight.get() for weight in model.weights()}, tmp_path / "model.safetensors"
    )
    del model
    driver = make_driver(LARGE, folder=tmp_path, **settings)
    before = logits(driver)
    places = addresses(driver)
    kept_weights = driver.runner.store._memory.weights
    assert resident(kept_weights) > 0.9
    released = ask(driver, ReleaseMemory(("weights", "kv_cache")))
    assert (released.ok, released.released) == (True, ("kv_cache", "weights"))
    weights = sum(tensor.nbytes for tensor in driver.runner.store._memory.weights)
    assert weights > 20e6
    assert released.num_bytes > 0.95 * weights
    assert resident(kept_weights) < 0.1
    assert "is released" in ask(driver, GetWeight(NORM, 1)).message
    resumed = ask(driver, ResumeMemory(("weights",)))
    assert (resumed.ok, resumed.is_reloaded, resumed.released) == (True, True, ("kv_cache",))
    assert ask(driver, ResumeMemory(("kv_cache",))).released == ()
    assert addresses(driver) == places
    assert torch.equal(logits(driver), before)
    driver.runner.close()


def test_weights_that_cannot_be_loaded_again_stay_released(plain: Driver, tmp_path: Path) -> None:
    assert ask(plain, ReleaseMemory(("weights",))).ok
    (tmp_path / "old" / "model.safetensors").unlink()
    reply = ask(plain, ResumeMemory(("weights",)))
    assert (reply.ok, reply.released) == (False, ("weights",))
    assert ask(plain, UpdateFromDisk("new")).released == ()
    assert torch.equal(kept(plain)[UP], load_file(tmp_path / "new" / "model.safetensors")[UP])


def test_unknown_tags_are_named(plain: Driver) -> None:
    reply = ask(plain, ReleaseMemory(("weights", "cuda_graph")))
    assert (reply.ok, reply.released) == (False, ())
    assert "'cuda_graph' is unknown; weights, kv_cache are allowed" in reply.message


def resident(tensors: list[torch.Tensor]) -> float:
    """The part of their pages that lies in memory. Source: the kernel's documentation of
    /proc/pid/pagemap."""
    size = os.sysconf("SC_PAGE_SIZE")
    states = []
    with open("/proc/self/pagemap", "rb") as pagemap:
        for tensor in tensors:
            first, end = (
                -(-tensor.data_ptr() // size),
                (tensor.data_ptr() + tensor.nbytes) // size,
            )  # whole pages
            pagemap.seek(8 * first)
            states.append(
                np.frombuffer(pagemap.read(8 * max(end - first, 0)), np.uint64) >> np.uint64(62)
            )
    return float((np.concatenate(states) > 0).mean())  # in memory, or in swap


@pytest.mark.parametrize(
    "settings", [{}, {"quantize": "int8"}, {"quantize": "int4"}, {"kernels": "auto"}], ids=str
)
def test_pieces_make_the_same_weights_as_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    odd = replace(MODEL, vocab_size=301, intermediate_size=199, hidden_size=80, num_heads=10)
    model = make_model(odd, PlainOps(torch.float32, torch.device("cpu")))
    randomize(model.weights())
    save_file(
        {weight.name: weight.get() for weight in model.weights()}, tmp_path / "model.safetensors"
    )
    found = []
    for piece_bytes in (1, 8 << 20):
        monkeypatch.setattr("weft.weights.pieces.PIECE_BYTES", piece_bytes)
        driver = make_driver(odd, folder=tmp_path, **settings)
        found.append(kept(driver))
        rows = [
            weight.get(64, 130) for weight in driver.steps._model.weights() if weight.name == UP
        ]
        assert torch.equal(rows[0], found[-1][UP][64:130])
        driver.runner.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


LOADING = """
    import sys
    from pathlib import Path
    import torch
    from tests.executor.checkpoints import LARGE
    from weft.weights.load import load_weights
    from weft.models.registry import make_model
    from weft.ops.plain import PlainOps

    def peak():
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

    torch.set_num_threads(1)
    ops = PlainOps(torch.float32, torch.device("cpu"))
    model, before = make_model(LARGE, ops), peak()
    load_weights(model.weights(), Path(sys.argv[1]))
    print(peak() - before, sum(tensor.nbytes for tensor in ops.tensors))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are told by Linux")
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    model = make_model(LARGE, PlainOps(torch.bfloat16, torch.device("cpu")))
    randomize(model.weights())
    save_file(
        {weight.name: weight.get() for weight in model.weights()}, tmp_path / "model.safetensors"
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOADING), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    taken, weights = map(int, done.stdout.split())
    assert weights > 80e6
    assert taken < 1.2 * weights
