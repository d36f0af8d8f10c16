from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weft.ops.cpp import build
from weft.ops.cpp.build import CannotBuild, InstructionSet, find_or_build
from weft.ops.cpp.library import Library, Unavailable

COMPILER = """#!/bin/sh
# Writes a line about its task, then what a compiler would write.
case "$*" in *{refused}*) echo "unknown option {refused}" >&2; exit 1;; esac
sleep {seconds}
for last in "$@"; do :; done
while [ "$1" != -o ]; do case "$1" in -shared|-DWEFT_SETS*) printf '%s ' "$1" >> {log};; esac; shift; done
echo "made $2" >> {log}
echo compiled > "$2"
"""


class FakeFunction:
    """A function of a library with no sets."""

    def __call__(self, *arguments: object) -> int:
        return -1


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of its own: an empty cache, no installed library, a compiler that writes `log`."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler(tmp_path)))
    monkeypatch.setattr(build, "library_name", lambda sets: "weft-kernels-test.so")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def compiler(folder: Path, refused: str = "-no-such-option", seconds: float = 0) -> Path:
    path = folder / "compiler"
    path.write_text(COMPILER.format(log=folder / "log", refused=refused, seconds=seconds))
    path.chmod(0o755)
    return path


def links(folder: Path) -> list[str]:
    """What the compiler wrote about making libraries."""
    log = folder / "log"
    return (
        [line for line in log.read_text().splitlines() if "-shared" in line] if log.exists() else []
    )


# ---------------------------------------------------------------- what is built


def test_a_set_that_does_not_exist_is_refused_by_name(library_file: Path):
    with pytest.raises(Unavailable, match="no avx9000"):
        Library(library_file, "avx9000")


@pytest.mark.slow
def test_kernels_share_no_function_with_those_of_another_set(tmp_path: Path):
    """The linker keeps one of several weak functions with the same name, maybe one for another
    processor."""
    if not shutil.which("nm"):
        pytest.skip("no nm")
    try:
        found = build.find_compiler()
    except CannotBuild as problem:
        pytest.skip(str(problem))
    made = build._compile(found, InstructionSet("some_set", ("-O1",)), tmp_path)
    assert isinstance(made, Path), made
    listed = subprocess.run(["nm", "-C", made], capture_output=True, text=True, check=True).stdout
    symbols = [line.split(maxsplit=2)[-2:] for line in listed.splitlines()]
    assert any(kind == "t" for kind, _ in symbols)
    shared = [name for kind, name in symbols if kind in "WVu" and "weft::some_set::" not in name]
    strong = [name for kind, name in symbols if kind in "TDBR"]
    assert shared == []
    assert strong == ["weft::kernels_some_set"]


# ---------------------------------------------------------------- where it is kept


def test_a_library_is_built_once(machine: Path):
    first = find_or_build()
    assert first == machine / "cache/weft/kernels/weft-kernels-test.so"
    assert first.read_text() == "compiled\n"
    assert find_or_build() == first
    assert len(links(machine)) == 1
    assert build.build_once(machine) == build.build_once(machine) == machine / first.name
    assert len(links(machine)) == 2


def test_two_processes_that_build_at_once_both_succeed(machine: Path):
    compiler(machine, seconds=0.1)
    code = (
        "from weft.ops.cpp import build\n"
        "build.library_name = lambda sets: 'weft-kernels-test.so'\n"
        "print(build.find_or_build().read_text())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0].split() for process in running] == [
        ["compiled"],
        ["compiled"],
    ]
    assert len(links(machine)) == 1


def test_a_cache_that_cannot_be_written_is_done_without(
    machine: Path, monkeypatch: pytest.MonkeyPatch
):
    (machine / "a file").touch()
    monkeypatch.setenv("WEFT_CACHE", str(machine / "a file"))
    made = find_or_build()
    assert made.read_text() == "compiled\n"
    assert made.parent.stat().st_mode & 0o077 == 0
    assert find_or_build() == made, "the next start finds it"
    made.parent.chmod(0o777)  # somebody else may have put it there
    assert find_or_build().parent != made.parent


def test_a_read_only_cache_serves_what_it_has(machine: Path, monkeypatch: pytest.MonkeyPatch):
    made = find_or_build()
    made.parent.chmod(0o500)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert find_or_build() == made
    made.parent.chmod(0o700)


def test_a_file_that_others_can_write_is_not_loaded(machine: Path):
    made = find_or_build()
    for mode in (0o775, 0o757):
        made.write_text("not ours")
        made.chmod(mode)
        assert find_or_build().read_text() == "compiled\n"
    assert len(links(machine)) == 3


def test_a_user_whose_files_a_group_can_write_builds_once_too(machine: Path):
    before = os.umask(0o002)
    try:
        assert find_or_build() == find_or_build()
        assert len(links(machine)) == 1
    finally:
        os.umask(before)


# ---------------------------------------------------------------- compilers


def test_sets_that_the_compiler_does_not_know_are_left_out(machine: Path):
    compiler(machine, refused="-mavx512bf16")
    build.build(machine / "all.so", (*build.X86, build.PORTABLE))
    build.build(machine / "best.so", (*build.X86, build.PORTABLE), best_only=True)
    everything, best = links(machine)
    known = ("avx512_vnni", "avx512", "avx2_vnni", "avx2", "portable")
    assert f"-DWEFT_SETS={' '.join(f'SET({name})' for name in known)}" in everything
    assert "-DWEFT_SETS=SET(avx512_vnni) SET(portable)" in best


def test_a_compiler_that_is_too_slow_leaves_no_set_out(
    machine: Path, monkeypatch: pytest.MonkeyPatch
):
    def run(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, build.COMPILE_TIMEOUT_S)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(build.NoCompiler, match="timed out after 1800 s"):
        build.build_once(machine)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (1, "g++: fatal error: Killed signal terminated program cc1plus"),
        (1, "cc1plus: out of memory allocating 65536 bytes"),
        (-9, ""),
    ],
)
def test_a_compiler_without_memory_leaves_no_set_out(
    machine: Path, monkeypatch: pytest.MonkeyPatch, status: int, words: str
):
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, status, "", words)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(build.NoCompiler, match="too little memory, or was killed"):
        build.build_once(machine)


def test_this_machine_gets_the_best_set_of_its_processor_and_one_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(build, "all_sets", lambda: (*build.X86, build.PORTABLE))
    monkeypatch.setattr(build, "processor_flags", lambda: build.X86[2].needs | {"sse2"})
    # An Ice Lake server has no AVX-VNNI.
    assert [one.name for one in build.sets_here()] == ["avx512_vnni", "avx512", "avx2", "portable"]
    assert [one.name for one in build.sets_here("avx2")] == ["avx2", "portable"]
    assert [one.name for one in build.sets_here("portable")] == ["portable"]


@pytest.mark.parametrize(
    ("maker", "best"), [("AuthenticAMD", "avx512_bf16"), ("GenuineIntel", "avx512_bf16_kv")]
)
def test_a_set_that_is_slow_on_a_processor_is_taken_only_by_name(
    monkeypatch: pytest.MonkeyPatch, maker: str, best: str
):
    monkeypatch.setattr(build, "all_sets", lambda: (*build.X86, build.PORTABLE))
    monkeypatch.setattr(build, "processor_flags", lambda: build.X86[0].needs)
    monkeypatch.setattr(build, "_processor_maker", lambda: maker)
    assert build.sets_here()[0].name == best
    assert build.sets_here("avx512_bf16")[0].name == "avx512_bf16"


@pytest.mark.parametrize(
    ("flags", "told"),
    [({"magic"}, "kernels.so has no best"), (set(), "this processor has no best")],
)
def test_it_is_said_whether_processor_or_library_has_not_a_set(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], told: str
):
    class Opened(dict[str, FakeFunction]):
        def __getattr__(self, name: str) -> FakeFunction:
            return self.setdefault(name, FakeFunction())

    best = InstructionSet("best", (), frozenset({"magic"}))
    monkeypatch.setattr(build, "all_sets", lambda: (best, build.PORTABLE))
    monkeypatch.setattr("weft.ops.cpp.library.processor_flags", lambda: frozenset(flags))
    monkeypatch.setattr("weft.ops.cpp.library.ctypes.CDLL", lambda path: Opened())
    with pytest.raises(Unavailable, match=told):
        Library(Path("kernels.so"), "best")


def test_a_set_that_the_processor_has_not_is_refused_before_anything_is_compiled(
    machine: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        build,
        "all_sets",
        lambda: (InstructionSet("best", (), frozenset({"magic"})), build.PORTABLE),
    )
    monkeypatch.setattr(build, "processor_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(CannotBuild, match="this processor has no best"):
        find_or_build("best")
    assert links(machine) == []


def test_a_build_for_this_machine_serves_those_who_name_its_instruction_sets(
    machine: Path, monkeypatch: pytest.MonkeyPatch
):
    sets = (InstructionSet("best", ()), InstructionSet("other", ()), build.PORTABLE)
    monkeypatch.setattr(build, "all_sets", lambda: sets)
    monkeypatch.setattr(build, "library_name", lambda sets: "-".join(one.name for one in sets))
    made = find_or_build()
    assert find_or_build("portable") == find_or_build("best") == made
    assert len(links(machine)) == 1
    assert find_or_build("other") != made


def test_what_the_compiler_says_is_the_reason(machine: Path):
    compiler(machine, refused="-std=c++17")
    with pytest.raises(CannotBuild, match=r"unknown option -std=c\+\+17"):
        find_or_build()


def test_the_compiler_may_be_named_with_options(machine: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", f"{machine / 'compiler'} -pipe")
    assert build.find_compiler() == (str(machine / "compiler"), "-pipe")
    monkeypatch.setenv("CXX", "/nowhere/c++ -pipe")
    with pytest.raises(CannotBuild, match="CXX names /nowhere/c"):
        find_or_build()


def test_without_a_compiler_the_reason_names_those_that_were_looked_for(
    machine: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(machine / "empty"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(machine))
    with pytest.raises(CannotBuild, match=r"no C\+\+ compiler .*g\+\+.*ziglang"):
        find_or_build()
    assert not list(machine.glob("weft-kernels-*"))
