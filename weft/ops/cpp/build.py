"""Compiles the kernel library: a shared object with the kernels of one or several instruction sets.

A wheel holds a library with every set of its architecture. `python -m weft.ops.cpp.build` makes a
library for this machine beside the sources; `find_or_build` makes one at first use in the user's
cache. These hold only the best set for this processor and the portable one, and build in a third of
the time. The name of a file is derived from its sources and sets, so an outdated library is never
used. Two processes that build at once both end with a complete file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# What compilers say that lack memory, or whose own processes were killed.
NO_MEMORY = (
    *("Killed signal", "signal 9", "out of memory", "virtual memory exhausted"),
    *("Cannot allocate memory", "cannot allocate memory", "unable to execute command: Killed"),
)
COMPILE_TIMEOUT_S = 1_800  # of one set, which takes a minute of a processor
COMMON = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
)
AVX512 = (
    "-DWEFT_ISA_AVX512",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mfma",
    "-mf16c",
    "-mprfchw",
)
AVX2 = ("-DWEFT_ISA_AVX2", "-mavx2", "-mfma", "-mf16c")


class InstructionSet(NamedTuple):
    """An instruction set that a library can hold. Its name is also the namespace in C++."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()  # flags of the processor, as Linux spells them
    slow_on: str = ""  # maker of processors that support it, but are faster with the next set


_AVX2 = frozenset(("avx2", "fma", "f16c"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_VNNI = _AVX512 | {"avx512_vnni"}
_BF16 = (*AVX512, "-DWEFT_VNNI", "-mavx512vnni", "-DWEFT_BF16", "-mavx512bf16")
X86 = (  # the best first
    InstructionSet(
        "avx512_bf16",
        (*_BF16, "-DWEFT_BF16_PRODUCTS"),
        _VNNI | {"avx512_bf16"},
        # Sapphire and Emerald Rapids multiply pairs of bfloat16 at half the rate of floats.
        slow_on="GenuineIntel",
    ),
    # Pairs of bfloat16 only by the matrix unit, in encoders; floats in all other products.
    InstructionSet("avx512_bf16_kv", _BF16, _VNNI | {"avx512_bf16"}),
    InstructionSet("avx512_vnni", (*AVX512, "-DWEFT_VNNI", "-mavx512vnni"), _VNNI),
    InstructionSet("avx512", AVX512, _AVX512),
    # Processors for laptops and desktops have that instruction without AVX-512.
    InstructionSet("avx2_vnni", (*AVX2, "-DWEFT_VNNI", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
    InstructionSet("avx2", AVX2, _AVX2),
)
PORTABLE = InstructionSet("portable", ())
# avx512_bf16 with its special instructions emulated, for tests on processors without them.
EMULATED = InstructionSet(
    "emulated_bf16",
    (
        *AVX512,
        "-DWEFT_VNNI",
        "-mavx512vnni",
        "-DWEFT_BF16",
        "-DWEFT_BF16_PRODUCTS",
        "-DWEFT_EMULATE",
    ),
)


class CannotBuild(Exception):
    """There is no library and none can be built; the message gives the reason."""


class NoCompiler(CannotBuild):
    """The compiler could not be run to its end."""


def find_or_build(instruction_set: str = "") -> Path:
    """A library with this instruction set, or for "" with the best of this machine: the installed
    one, else the one in the user's cache, which is built if necessary. Raises `CannotBuild`.
    """
    found = find(instruction_set)
    if found is not None:
        return found
    sets, name = _wanted(instruction_set)
    for folder in (cache_folder(), temporary_folder()):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _is_safe(folder):
                continue
            with _locked(folder / "lock"):
                if not _is_ours(folder / name):
                    build(folder / name, sets, best_only=True)
                return folder / name
        except OSError:  # it cannot be written
            continue
    private = Path(tempfile.mkdtemp(prefix="weft-kernels-"))  # of this process
    try:
        return build(private / name, sets, best_only=True)
    except CannotBuild:
        shutil.rmtree(private, ignore_errors=True)
        raise


def find(instruction_set: str = "") -> Path | None:
    """What `find_or_build` finds; None: it has to build. Raises `CannotBuild`."""
    _, name = _wanted(instruction_set)
    for installed in (SOURCES / library_name(all_sets()), SOURCES / name):
        if installed.exists():
            return installed
    for folder in (cache_folder(), temporary_folder()):
        if _is_safe(folder) and _is_ours(folder / name):
            return folder / name
    return None


def _wanted(instruction_set: str) -> tuple[Sequence[InstructionSet], str]:
    """The sets of a library, and its name. Raises `CannotBuild`."""
    flags = processor_flags()
    named = sets_here(instruction_set)
    if flags and not named[0].needs <= flags:
        raise CannotBuild(f"this processor has no {instruction_set}")
    # Every library holds the portable set.
    sets = sets_here() if instruction_set == PORTABLE.name else named
    return sets, library_name(_tried(sets, best_only=True))


def library_name(sets: Sequence[InstructionSet]) -> str:
    flags = [(one.name, one.flags) for one in sets]
    digest = hashlib.sha256(repr((flags, COMMON)).encode())
    for path in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(path.name.encode() + path.read_bytes())
    return f"weft-kernels-{platform.machine()}-{digest.hexdigest()[:16]}.so"


def all_sets() -> tuple[InstructionSet, ...]:
    """Every set of this architecture, the best first."""
    return (*X86, PORTABLE) if platform.machine() in ("x86_64", "AMD64") else (PORTABLE,)


def sets_here(wanted: str = "") -> tuple[InstructionSet, ...]:
    """The set with the name `wanted`, or for "" all sets that this processor supports and is fast
    with, the best first; followed by PORTABLE."""
    flags = processor_flags()
    if wanted:
        found = [one for one in all_sets() if one.name == wanted]
    else:
        maker = _processor_maker()
        found = [one for one in all_sets() if one.needs <= flags and one.slow_on != maker]
    return tuple(dict.fromkeys((*found, PORTABLE)))


def cache_folder() -> Path:
    base = os.environ.get("WEFT_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "weft" / "kernels"


def temporary_folder() -> Path:
    """Where libraries are if the cache cannot be written."""
    return Path(tempfile.gettempdir(), f"weft-kernels-{os.getuid()}")


def build(
    target: Path,
    sets: Sequence[InstructionSet],
    *,
    best_only: bool = False,
) -> Path:
    """Compile `sets` into `target`. Leaves out sets that the compiler does not know, but not the
    last one, usually PORTABLE. `best_only`: compiles only the last and the first set that the
    compiler knows. Raises `CannotBuild`.
    """
    compiler = find_compiler()
    with (
        tempfile.TemporaryDirectory(prefix="weft-build-") as folder,
        ThreadPoolExecutor(os.cpu_count() or 1) as pool,
    ):
        *others, last = (
            pool.submit(_compile, compiler, one, Path(folder)) for one in _tried(sets, best_only)
        )
        if best_only and len(sets) > 2 and isinstance(others[0].result(), str):
            return build(target, sets[1:], best_only=True)
        results = zip(
            _tried(sets, best_only), [job.result() for job in (*others, last)], strict=True
        )
        objects = {one.name: result for one, result in results if isinstance(result, Path)}
        if sets[-1].name not in objects:
            raise CannotBuild(f"{compiler[0]} failed: {last.result()}")
        made = Path(folder) / "library.so"
        listed = " ".join(f"SET({name})" for name in objects)
        common = (str(SOURCES / name) for name in ("library.cpp", "team.cpp", "ranks.cpp"))
        parts = (*common, *map(str, objects.values()), f"-DWEFT_SETS={listed}", "-pthread")
        _run((*compiler, *COMMON, "-shared", *parts, "-o", str(made), "-static-libgcc"))
        temporary = target.with_suffix(f".{os.getpid()}")
        shutil.copy(made, temporary)
        # Independent of the umask, because `_is_ours` rejects files that others can write.
        temporary.chmod(0o755)
        os.replace(temporary, target)
    return target


def build_once(folder: Path) -> Path:
    """The library for this machine in `folder`, compiled if it is not there; remove it to compile
    it with another compiler. Raises `CannotBuild`."""
    sets, name = _wanted("")
    target = folder / name
    if target.exists():
        return target
    return build(target, sets, best_only=True)


def _tried(sets: Sequence[InstructionSet], best_only: bool) -> Sequence[InstructionSet]:
    if not best_only:
        return sets
    # The best set and the portable one, which may be the same.
    return tuple(dict.fromkeys((sets[0], sets[-1])))


def find_compiler() -> tuple[str, ...]:
    """The command that compiles C++: $CXX, one of the usual names, or the compiler of the package
    ziglang."""
    named = shlex.split(os.environ.get("CXX", ""))
    for name in named[:1] or COMPILERS:
        if shutil.which(name):
            return (name, *named[1:])
    if named:
        raise CannotBuild(f"CXX names {named[0]}, which does not exist")
    if (Path(sysconfig.get_path("purelib")) / "ziglang").exists():
        return (sys.executable, "-m", "ziglang", "c++")
    raise CannotBuild(f"no C++ compiler was found ({', '.join(COMPILERS)}, or pip install ziglang)")


def _compile(
    compiler: tuple[str, ...],
    one: InstructionSet,
    folder: Path,
) -> Path | str:
    """Compile the kernels for one set. Returns the object file, or the compiler's error. Raises
    `NoCompiler`: that says nothing about the set."""
    made = folder / f"{one.name}.o"
    source = str(SOURCES / "kernels.cpp")
    try:
        _run(
            (
                *compiler,
                *COMMON,
                f"-DWEFT_NAMESPACE={one.name}",
                *one.flags,
                "-c",
                source,
                "-o",
                str(made),
            )
        )
    except NoCompiler:
        raise
    except CannotBuild as exc:
        return str(exc)
    return made


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NoCompiler(f"{command[0]} could not be run: {exc}") from exc
    if done.returncode:
        reason = "\n".join(done.stderr.strip().splitlines()[:5])
        if done.returncode < 0 or any(words in done.stderr for words in NO_MEMORY):
            raise NoCompiler(f"{command[0]} had too little memory, or was killed: {reason}")
        raise CannotBuild(reason or f"exit status {done.returncode}")


def processor_flags() -> frozenset[str]:
    return frozenset(_processor_line("flags").split())


def _processor_maker() -> str:
    return _processor_line("vendor_id")


def _processor_line(name: str) -> str:
    """The value of the first line of /proc/cpuinfo with this name; "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    found = next((line for line in lines if line.startswith(name)), "")
    return found.partition(":")[2].strip()


def _is_safe(folder: Path) -> bool:
    """Whether nobody else can exchange a file in this folder."""
    return folder == cache_folder() or (_is_ours(folder) and not folder.is_symlink())


def _is_ours(path: Path) -> bool:
    """Whether the file or folder exists, belongs to this user, and cannot be written by others."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        print(build_once(SOURCES))
    except CannotBuild as problem:
        sys.exit(f"the kernel library was not built, weft will use torch: {problem}")
