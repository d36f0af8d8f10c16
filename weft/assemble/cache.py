"""Builds the stores of `--cache-dir` and `--cache-host-gb`: their folder, memory and settings, and
the fingerprint of this engine's model."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.config.amounts import size
from weft.config.cache import has_host_tier, host_bytes, stores_kv
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.parallel import kept_together
from weft.config.resolve import kept_as
from weft.config.sizing import window_tokens
from weft.executor.cpu.kv_io import KvPages
from weft.executor.gpu.host_memory import HostMemory, page_bytes
from weft.executor.runner import TorchRunner
from weft.executor.weights.store import WeightStore
from weft.memory.tiers.protocol import Tiers
from weft.scheduler.settings import TierSettings
from weft.tiers.disk.store import DiskTiers
from weft.tiers.disk.writer import FLOOR_BYTES
from weft.tiers.host.store import HostTiers
from weft.tiers.keys import digest_of_files, fingerprint_of
from weft.version import __version__
from weft.weights.origin import WeightOrigin, files_of, origin_of

REMEMBERED = "weights.json"  # file in the folder with the digests of weights
# Increase it when the layout of files or the computation of K and V changes.
LAYOUT = "1"


def open_cache(config: EngineConfig) -> Path | None:
    """The folder of `--cache-dir`, created if it is missing; None without the option. Raises
    SettingsError."""
    if not config.cache_dir:
        return None
    folder = Path(config.cache_dir).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        files = os.statvfs(folder)
    except OSError as exc:
        raise SettingsError(f"--cache-dir: {folder} cannot be used: {exc.strerror}") from exc
    if status.st_uid != os.getuid():
        raise SettingsError(f"--cache-dir: {folder} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SettingsError(
            f"--cache-dir: other users may write into {folder}; chmod 700 prevents this"
        )
    if config.cache_write == "off":
        return folder
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(
            f"--cache-dir: {folder} cannot be written to (--cache-write off only reads)"
        )
    free_bytes = files.f_bavail * files.f_frsize
    if free_bytes <= FLOOR_BYTES:
        raise SettingsError(
            f"--cache-dir: only {size(free_bytes)} are free on the file system of {folder}; weft "
            f"always leaves {size(FLOOR_BYTES)} free, so it could write nothing"
        )
    return folder


def tier_settings(config: EngineConfig, model: ModelConfig) -> TierSettings | None:
    """The settings of the scheduler for the store of KV; None without a store."""
    if not stores_kv(config):
        return None
    has_host = has_host_tier(config)
    where = "disk"
    if has_host:
        where = "host memory"
    kept = kept_together(kept_as(config, model), config.tp_size)
    return TierSettings(
        block_len=config.cache_block,
        block_bytes=kept.kv_bytes_per_token * config.cache_block,
        wait_s=config.cache_wait_ms / 1_000,
        write=config.cache_write,
        saves_evicted=has_host and config.cache_write != "off",
        where=where,
    )


def make_tiers(
    config: EngineConfig,
    model: ModelConfig,
    folder: Path,
    cache_folder: Path | None,
    runner: TorchRunner,
    notify: Callable[[], None],
    others: Callable[[Sequence[Tensor]], Sequence[Sequence[Tensor]]] | None = None,
) -> Tiers:
    """Start the store of an engine that has loaded `model` from `folder`: on disk in
    `cache_folder`, in host memory, or in host memory with the disk below it. `others`: maps the KV
    pool of this process to those of the other ranks, whose K and V are stored with its own. Raises
    SettingsError."""
    store = weight_store(runner)
    if not has_host_tier(config):
        assert cache_folder is not None
        pools: list[Sequence[Tensor]] = [store.kv_cache]
        if others is not None:
            pools += others(store.kv_cache)
        pages, resume_states = memory_of(config, model, pools)
        return _on_disk(config, model, folder, cache_folder, runner, notify, pages, resume_states)
    memory = _host_memory(config, store.kv_cache)
    below = None
    if cache_folder is not None:
        pages = KvPages(memory.tensors, config.page_size)
        below = _on_disk(config, model, folder, cache_folder, runner, notify, pages, None)
    tiers = HostTiers(
        memory,
        page_size=config.page_size,
        block_len=config.cache_block,
        notify=notify,
        below=below,
    )
    tiers.start()
    return tiers


def _host_memory(config: EngineConfig, tensors: Sequence[Tensor]) -> HostMemory:
    """The host memory of `--cache-host-gb`. Raises SettingsError if it is too small or cannot be
    allocated."""
    num_bytes = host_bytes(config, sum(tensor.nbytes for tensor in tensors))
    page_size = config.page_size
    num_places = num_bytes // page_bytes(tensors, page_size)
    least = config.cache_block // page_size
    if num_places < least:
        needed = size(least * page_bytes(tensors, page_size))
        raise SettingsError(
            f"--cache-host-gb: {size(num_bytes)} is less than the size of a block of "
            f"{config.cache_block} tokens ({needed})"
        )
    try:
        return HostMemory(tensors, page_size, num_places)
    except RuntimeError as exc:
        reason = str(exc).partition("\n")[0]
        raise SettingsError(
            f"--cache-host-gb: {size(num_bytes)} cannot be allocated: {reason}"
        ) from exc


def _on_disk(
    config: EngineConfig,
    model: ModelConfig,
    folder: Path,
    cache_folder: Path,
    runner: TorchRunner,
    notify: Callable[[], None],
    pages: KvPages,
    resume_states: KvPages | None,
) -> DiskTiers:
    store = weight_store(runner)
    described = [LAYOUT, __version__, repr(model), kernels_of(config, runner)]
    described.append(f"pages of {config.page_size}, blocks of {config.cache_block}")
    if config.tp_size > 1:
        described.append(f"{config.tp_size} ranks that meet by {config.dist_backend}")
    if config.load_format != "dummy" and not files_of(folder):
        raise SettingsError(f"--cache-dir: there is no file of weights in {folder}")
    store.follows_origin = True

    def weights() -> Callable[[], bytes]:
        """A function that computes the fingerprint of the weights in use now."""
        return partial(_identify, described, store.origin, cache_folder / REMEMBERED)

    tiers = DiskTiers(
        cache_folder,
        pages,
        page_size=config.page_size,
        block_len=config.cache_block,
        max_bytes=int(config.cache_disk_gb * 1e9),
        weights=weights,
        notify=notify,
        resume_states=resume_states,
    )
    tiers.start()
    return tiers


def memory_of(
    config: EngineConfig, model: ModelConfig, pools: Sequence[Sequence[Tensor]]
) -> tuple[KvPages, KvPages | None]:
    """The memory of pages, and the memory of resume states (states, or pages of windows) if the
    model has them. `pools`: the tensors of each rank's KV pool: K and V and their scales layer by
    layer, then the states."""
    page_size = config.page_size
    num_layers = model.num_layers
    num_of_tokens = num_layers * (4 if model.kv_dtype == "int8" else 2)
    has_windows = window_tokens(config) > 0
    in_pages: list[Tensor] = []
    in_windows: list[Tensor] = []
    states: list[Tensor] = []
    for tensors in pools:
        states += tensors[num_of_tokens:]
        for number, tensor in enumerate(tensors[:num_of_tokens]):
            if has_windows and model.window(number % num_layers):
                in_windows.append(tensor)
            else:
                in_pages.append(tensor)
    pages = KvPages(in_pages, page_size)
    if states:
        return pages, KvPages(states, 1)
    if has_windows:
        return pages, KvPages(in_windows, page_size)
    return pages, None


def weight_store(runner: TorchRunner) -> WeightStore:
    """The store with the model's weights and KV pool."""
    assert isinstance(runner.store, WeightStore)
    return runner.store


def _identify(described: list[str], origin: WeightOrigin, remembered: Path) -> bytes:
    return fingerprint_of(described, weights_digest(origin, remembered))


def weights_digest(origin: WeightOrigin, remembered: Path | None) -> bytes:
    """The digest of the weights of an origin. Reads all weights, unless the file `remembered` has
    their digest. Raises OSError, also if the files have changed since they were loaded."""
    base = b"dummy"
    if origin.folder is not None:
        base = digest_of_files(files_of(origin.folder), remembered)
        if origin_of(origin.folder).files != origin.files:
            raise OSError("their files were changed since they were loaded")
    return with_added(base, origin)


def with_added(base: bytes, origin: WeightOrigin) -> bytes:
    """The digest of the weights of `origin`, whose checkpoint has the digest `base`."""
    if not origin.added:
        return base
    return hashlib.sha256(base + origin.added).digest()


def kernels_of(config: EngineConfig, runner: TorchRunner) -> str:
    """A description of the kernels that compute: different kernels give different bits."""
    torch_is = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    kernels = runner.kernels
    if config.device == "cuda":
        torch_is += f", {torch.cuda.get_device_name()}"
    if kernels is None:
        return f"{torch_is}, {config.threads} threads, {config.attention_backend}"
    return f"{torch_is}, {kernels.path.name}, {kernels.instruction_set}"
