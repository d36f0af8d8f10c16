"""The verb `doctor`: checks this machine, this installation and a model, and starts nothing.

    ok    cpu          AMD EPYC, 2 cores; avx2 avx512 avx512_bf16 avx512_vnni
    warn  port         30000 is taken by weft (pid 4711)
    FAIL  weights      2 tensors are missing: model.layers.3.mlp.up_proj.weight, ...

Every line is one check: a function that returns what it found, or raises an error. Exit status 1 if
any check failed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from weft.config.amounts import count, parameters, size, types
from weft.config.engine import EngineConfig
from weft.config.kv_transfer import with_kv_transfer_config
from weft.config.limits import Limits
from weft.config.lockstep import with_engines
from weft.config.machine import Machine, probe
from weft.config.model import ModelConfig, ModelError
from weft.config.numbers import counted
from weft.config.options import Command, SettingsError, asked_help
from weft.config.passes import own_passes
from weft.config.pooling import PoolingConfig
from weft.config.resolve import device_of, kept_as
from weft.config.server import ServerConfig
from weft.config.speculative_config import with_speculative_config
from weft.config.vision.spec import TowerSpec

ABOUT = (
    "Check this machine, this installation, and a model (the default one if none is named), "
    "without starting it."
)
CPU_FEATURES = {  # the kernel's name -> the feature in weft
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx512_vnni": "int8",
    "avx_vnni": "int8",
    "avx512_bf16": "bfloat16",
    "amx_bf16": "amx",
    "asimd": "neon",
    "asimddp": "int8",
    "bf16": "bfloat16",
    "sve": "sve",
}

LEAST_TORCH = [2, 11]
LEAST_CAPABILITY = 8  # major version of a GPU's compute capability

Check: TypeAlias = Callable[[], str]


class Caution(Exception):
    """A warning: the user should know it, but weft works."""


def doctor(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status."""
    command = Command("weft doctor", ABOUT, EngineConfig, ServerConfig, Limits, positional="model")
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    settings = command.read(argv, os.environ)
    machine = probe()
    server = settings.make(ServerConfig)
    engine = settings.make(EngineConfig)
    checks = [
        *machine_checks(machine, server),
        *installation_checks(machine, engine),
        *model_checks(engine, server, machine),
    ]
    num_failed = 0
    for name, check in checks:
        if not report(name, check):
            num_failed += 1
    if num_failed:
        print(f"{num_failed} failed")
        return 1
    print("everything is fine")
    return 0


def report(name: str, check: Check) -> bool:
    """Run one check and print its line. Returns False if it failed."""
    try:
        mark = "ok"
        text = check()
    except Caution as exc:
        mark = "warn"
        text = str(exc)
    except Exception as exc:  # any error is what the user wants to know
        known = isinstance(exc, SettingsError | ModelError)
        mark = "FAIL"
        text = str(exc) if known else f"{type(exc).__name__}: {exc}"
    print(f"{mark:<5} {name:<12} {text}", flush=True)
    return mark != "FAIL"


def machine_checks(machine: Machine, server: ServerConfig) -> Iterator[tuple[str, Check]]:
    yield "system", lambda: f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "cpu", lambda: _cpu(machine)
    yield "memory", lambda: f"{size(machine.free_bytes)} of {size(machine.total_bytes)} are free"
    yield "gpu", lambda: _gpu(machine)
    yield "port", lambda: _port(server)
    yield "sockets", _sockets
    yield "server", lambda: _server(server)
    yield "capacity", lambda: capacity_line(server)


def _cpu(machine: Machine) -> str:
    info = ""
    if Path("/proc/cpuinfo").exists():
        info = Path("/proc/cpuinfo").read_text()
    name = platform.processor() or "unknown"
    if named := re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE):
        name = named[1]
    words: set[str] = set()
    if flags := re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE):
        words = set(flags[1].split())
    units = dict.fromkeys(unit for word, unit in CPU_FEATURES.items() if word in words)
    cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
    text = f"{name}, {cores}; {' '.join(units) or 'no vector units'}"
    if words and not words & {"avx2", "asimd"}:
        raise Caution(f"{text}: without AVX2 it will be slow")
    return text


def _gpu(machine: Machine) -> str:
    if not machine.gpus:
        if machine.has_gpu_fault:
            raise Caution(f"none can be used: {machine.no_gpu_reason}")
        return f"none ({machine.no_gpu_reason})"
    return ", ".join(
        f"{gpu.name} ({size(gpu.free_bytes)} of {size(gpu.total_bytes)} free)"
        for gpu in machine.gpus
    )


def _port(server: ServerConfig) -> str:
    from weft.launch.listen import listen

    try:
        listen(server.host, server.port).close()
    except SettingsError as exc:
        raise Caution(str(exc)) from exc
    return f"{server.port} on {server.host} is free"


def _server(server: ServerConfig) -> str:
    """The settings that need no model."""
    from weft.config.keys import read_keys
    from weft.config.media_options import media_options

    digests, _ = read_keys(server)
    media_options(server)
    if not digests.user:
        return "needs no key"
    return f"takes {counted(len(digests.user), 'key')}"


def capacity_line(server: ServerConfig) -> str:
    """What a plan has found, if the settings have it."""
    if not server.knee_output_per_s:
        return "not known; weft plan MODEL finds how many users this machine serves"
    return f"{server.knee_output_per_s:,.0f} output tokens a second at the knee (weft plan)"


def _sockets() -> str:
    from weft.launch.engine_process import SocketFolder

    with SocketFolder() as folder:
        return f"can be made in {folder.path.parent}"


def installation_checks(machine: Machine, engine: EngineConfig) -> Iterator[tuple[str, Check]]:
    yield "python", lambda: f"{platform.python_version()} ({sys.executable})"
    yield "torch", _torch
    yield "kernels", lambda: _kernels(engine)
    if machine.gpus:
        yield "kernels-gpu", _gpu_kernels
    yield "packages", _packages


def _torch() -> str:
    import torch

    if _numbers(torch.__version__) < LEAST_TORCH:
        raise SettingsError(
            f"torch is {torch.__version__}, at least {'.'.join(map(str, LEAST_TORCH))} is needed"
        )
    build = "for CPU"
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    return f"{torch.__version__}, build {build}, uses {torch.backends.cpu.get_cpu_capability()}"


def _kernels(engine: EngineConfig) -> str:
    """The kernels that compute on the CPU. Builds their library if necessary, as a server would."""
    from weft.config.resolve import computes_by_torch
    from weft.ops.cpp.library import Unavailable, load

    if computes_by_torch(engine):
        return "none: with these options torch computes on the CPU"
    try:
        library = load("" if engine.kernels == "auto" else engine.kernels)
    except Unavailable as exc:
        raise Caution(
            f"torch computes on the CPU, several times slower than our own kernels: {exc}"
        ) from exc
    return f"{library.instruction_set} ({library.path})"


def _gpu_kernels() -> str:
    """Whether our GPU kernels can be compiled here; the engine compiles them at its start."""
    import torch

    if not torch.cuda.is_available():
        raise SettingsError(
            f"the driver shows a GPU, but torch {torch.__version__} cannot use it (--device cpu "
            "computes without)"
        )
    major, minor = torch.cuda.get_device_capability(0)
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError as exc:
        raise SettingsError(
            "the package triton is missing, which comes with torch for CUDA"
        ) from exc
    lacking = _lacks_to_build()
    if lacking:
        raise SettingsError(
            f"triton builds a small library that launches our kernels; {lacking} missing"
        )
    found = f"triton {triton}, compute capability {major}.{minor}"
    if major < LEAST_CAPABILITY:
        raise Caution(f"{found}: below {LEAST_CAPABILITY}.0 there is no fast bfloat16")
    raise Caution(
        f"{found}; weft's path for GPUs has been tried on CPUs only so far: "
        "benchmarks/gpu_check.py tests it"
    )


def _lacks_to_build() -> str:
    """What is missing to build a small C library for this Python; "" if nothing is."""
    if not any(map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))):
        return "gcc (or clang, or what CC names) is"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if headers.exists():
        return ""
    return f"{headers}, which a package of Python's headers brings, is"


def _packages() -> str:
    """Versions of the packages that weft requires. Fails if one is missing or too old."""
    lines = []
    wrong = []
    # A checkout may have been installed under an earlier name.
    (distribution, *_) = metadata.packages_distributions().get("weft", [""])
    if not distribution:
        return "not checked: weft runs from its sources, without an installation"
    for requirement in metadata.requires(distribution) or []:
        parsed = re.match(r"([A-Za-z0-9_.-]+)(?:>=([0-9.]+))?", requirement)
        if parsed is None or "extra ==" in requirement or parsed[1] == "torch":
            continue
        name = parsed[1]
        least = parsed[2] or "0"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        lines.append(f"{name} {version}")
        if _numbers(version) < _numbers(least):
            wrong.append(f"{name} is {version}, at least {least} is needed")
    if wrong:
        raise SettingsError("; ".join(wrong))
    return ", ".join(lines)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def model_checks(
    asked: EngineConfig, server: ServerConfig, machine: Machine
) -> Iterator[tuple[str, Check]]:
    """The checks of a model. Each check presupposes the earlier ones; without a model, there is
    only the first check."""
    from weft.assemble.model_config import choose_model
    from weft.assemble.model_folder import model_folder
    from weft.assemble.prepare import load_tokenizer
    from weft.weights.known import default_model

    config = with_kv_transfer_config(with_speculative_config(asked))
    try:
        folder = model_folder(config)
        model = choose_model(config, folder)
    except ModelError as exc:
        reason = exc
        yield "model", lambda: _raise(reason)
        return
    if not asked.model:  # it has been said which one that is
        asked = replace(asked, model=default_model())
    yield "model", lambda: f"{model.name} in {folder}"
    yield "config", lambda: _architecture(model)
    yield "code", lambda: _code(model)
    yield "weights", lambda: _weights(folder, model)
    vision = model.vision
    if vision is not None:
        yield "encoder", lambda: _encoder(vision, model)
    yield (
        "tokenizer",
        lambda: f"{load_tokenizer(folder).vocab_size:,} tokens; the model has {model.vocab_size:,}",
    )
    pooling = model.pooling
    if pooling is None:
        yield "chat", lambda: _chat(folder)
    else:
        yield "gives", lambda: _pooled(model, pooling)
    # The cost is not known for experts, nor for the code of transformers.
    if not (model.is_encoder or model.has_experts or model.library_config):
        yield "layers", lambda: _layers(config, model, machine)
    yield "fit", lambda: _fit(asked, server, machine)


def _raise(exc: Exception) -> str:
    raise exc


def _architecture(model: ModelConfig) -> str:
    stored = model.dtype
    if model.stored.shown_name:
        stored += f", weights in {model.stored.shown_name}"
    heads = f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    if model.latent is not None:
        heads = f"{model.num_heads} heads on latents of {model.latent.rank}"
    return (
        f"{model.architecture}, {model.num_layers} layers, {heads}, {model.max_position:,} "
        f"positions, {stored}"
    )


def _code(model: ModelConfig) -> str:
    """The code that computes the model (`--model-impl`), and its cost."""
    from weft.assemble.model_config import COST

    if not model.library_config:
        return "weft's own"
    version = metadata.version("transformers")
    return f"that of transformers {version} on weft's pages: {COST}"


def _weights(folder: Path, model: ModelConfig) -> str:
    """Compare names and shapes in the files' headers with those that the architecture needs."""
    import torch

    from weft.executor.plain.tower import TorchTowerBackend
    from weft.models.registry import make_model
    from weft.models.vision.towers import make_tower
    from weft.ops.plain import PlainOps
    from weft.weights.contents import labelled, open_contents
    from weft.weights.fetch import weight_files
    from weft.weights.load import files_beside, unread_of
    from weft.weights.stream import matched

    with ExitStack() as stack:
        paths = [*weight_files(folder), *files_beside(model, folder)]
        files = open_contents(stack, labelled(paths))
        # transformers renames and merges tensors when it loads them: only it can compare.
        if not model.library_config:
            empty = make_model(model, PlainOps(torch.bfloat16, torch.device("meta")))
            wanted = {weight.name: weight for weight in empty.weights()}
            if model.vision is not None:
                backend = TorchTowerBackend(torch.bfloat16, torch.device("meta"))
                for weight in make_tower(model.vision, backend).weights():
                    wanted[weight.name] = weight
            what = "they are not what config.json says"
            unread = unread_of(model)
            matched(wanted, files, what, quantization=model.stored, unread=unread)
        num_tensors = sum(len(file.entries) for file in files)
    in_dtype = f"in {model.dtype}"
    if model.stored.shown_name:
        in_dtype = f"if widened to {model.dtype}"
    return f"{counted(num_tensors, 'tensor')}, {size(model.weights_bytes)} {in_dtype}"


def _encoder(vision: TowerSpec, model: ModelConfig) -> str:
    """The encoder for pictures, videos or sounds beside the decoder."""
    kinds = " and ".join(f"{kind}s" if kind != "audio" else kind for kind in vision.kinds)
    weights = f"{count(vision.num_parameters)} parameters, {size(model.vision_bytes)}"
    return f"{kinds}: {vision.shown_name}; {weights}"


def _chat(folder: Path) -> str:
    """Render a conversation and encode it."""
    from weft.assemble.prepare import load_template, load_tokenizer

    tokenizer = load_tokenizer(folder)
    template = load_template(tokenizer)
    if template is None:
        raise Caution("the model has no chat template: it can complete texts, but not chat")
    text = template.render([{"role": "user", "content": "Hello"}])
    ids = tokenizer.encode(text, add_special_tokens=False)
    return f"template works: a greeting has {len(ids)} tokens"


STATES = {
    "mean": "the mean of all tokens",
    "cls": "the first token",
    "last": "the last token",
}


def _pooled(model: ModelConfig, pooling: PoolingConfig) -> str:
    """The output of a model that makes vectors or scores from a prompt, not text."""
    if pooling.form == "sparse":
        return f"sparse vectors, with a number for each of {model.vocab_size:,} tokens"
    if pooling.form == "tokens":
        return f"a vector of {pooling.size:,} numbers for each token, of length 1"
    state = STATES[pooling.kind]
    if pooling.task == "classify":
        labels = f"{len(pooling.labels)} labels" if len(pooling.labels) > 1 else "one label"
        return f"scores of {labels}, of {state}"
    length = ", of length 1" if pooling.normalize else ""
    return f"vectors of {model.hidden_size:,} numbers{length}: {state}"


def _layers(config: EngineConfig, model: ModelConfig, machine: Machine) -> str:
    """The cost of the model's mechanisms besides its matrix products."""
    on_gpu = device_of(config, machine) == "cuda"
    passes = own_passes(model.decoder, model.num_layers, model.num_heads)
    if not passes.total:
        return "norms and sums are parts of products, as in Llama"
    parts = [f"{name} ({num})" for name, num in passes.by_mechanism.items()]
    more = passes.total / passes.others
    line = f"{'; '.join(parts)}: {passes.total} passes over activations in a step"
    if on_gpu:
        return f"{line}, beside {passes.others} operations"
    # A pass reads and writes float32; a step of one token also reads all weights.
    moved = 8 * model.hidden_size * passes.total / model.weights_bytes
    return (
        f"{line}, which stays one call of the kernels, with {more:.0%} more operations and "
        f"{moved:.2%} more bytes where one request runs"
    )


def _fit(asked: EngineConfig, server: ServerConfig, machine: Machine) -> str:
    """All that `weft serve` checks and decides before it loads the weights."""
    from weft.assemble.prepare import prepare
    from weft.launch.engine_group import part_of

    config = with_engines(asked, server.dp_size)
    prepared = prepare(config, part_of(machine, server.dp_size, config))
    chosen = prepared.config
    draft = prepared.draft
    running = f"at most {counted(chosen.max_running_requests, 'request')} together"
    in_types = types(kept_as(chosen, prepared.model))
    sizing = prepared.sizing
    parts = f"weights {size(sizing.weight_bytes)}, work {size(sizing.work_bytes)}"
    text = f"on {chosen.device} in {in_types}: {parts}, KV cache {sizing}; {running}"
    if draft is not None:
        text += f"; {draft.model.name} ({parameters(draft.model)}) guesses, in the same slots"
    if chosen.device == "cuda":
        text += f"; {_on_gpu(chosen)}"
    if sizing.note:
        raise Caution(f"{text}; {sizing.note}")
    return text


def _on_gpu(config: EngineConfig) -> str:
    """How steps run on the GPU; `config` is resolved."""
    sizes = config.cuda_graph_sizes.split(",")
    graphs = "no graphs"
    if config.cuda_graph_sizes:
        graphs = f"{counted(len(sizes), 'graph')} for up to {sizes[-1]} requests"
    overlap = "steps do not overlap"
    if config.overlap:
        overlap = "steps overlap"
    return f"{overlap}, {graphs}, prompts in pieces of {config.chunked_prefill_size:,} tokens"
