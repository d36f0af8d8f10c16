"""The pages of docs/contribute that extend weft, followed in one copy of the tree: what they make
works, and touches as few files as they say."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest

from tests.pages import BLOCK, CONTRIBUTE, copy_tree, follow, patched, run

IMPORTS = "tests/test_imports.py::test_every_import_goes_down"


class Page(NamedTuple):
    """One page. `files` are those of weft that it adds or edits, in its order."""

    name: str
    files: tuple[str, ...]
    test: str  # what it adds to the tests, or edits there
    also: tuple[str, ...] = ()  # other tests that meet what it makes
    words: tuple[str, ...] = ()  # in the names of those among them
    package: str = ""  # without it, its test cannot run
    is_last: bool = (
        False  # all engines of the tree have what it adds, so that others' tests would differ
    )

    @property
    def can_run(self) -> bool:
        return not self.package or find_spec(self.package) is not None


PAGES = [
    Page(
        "attention-backend.md",
        ("weft/executor/gpu/gather_attention.py", "weft/config/engine.py"),
        "tests/executor/test_gather_attention.py",
        package="triton",
    ),
    Page(
        "pass.md",
        ("weft/executor/passes/kinds/long_steps.py",),
        "tests/executor/test_long_steps.py",
        is_last=True,
    ),
    Page(
        "model.md",
        ("weft/config/families/jais.py",),
        "tests/models/many.py",
        (
            "tests/models/test_many_families.py",
            "tests/models/test_registry.py",
            "tests/executor/test_gguf_model.py",
        ),
        ("jais2", "readable"),
    ),
    Page(
        "sampling-feature.md",
        (
            "weft/messages/sampling.py",
            "weft/server/fields/sampling.py",
            "weft/plan/logits.py",
            "weft/scheduler/features/forbid_repeat.py",
            "weft/scheduler/features/registry.py",
            "weft/executor/outputs/sampler.py",
        ),
        "tests/scheduler/test_forbid_repeat.py",
    ),
    Page(
        "kv-group.md",
        ("weft/scheduler/groups/kinds/encoded.py",),
        "tests/scheduler/test_encoded.py",
        is_last=True,
    ),
    Page(
        "scheduler-option.md",
        ("weft/config/scheduling.py", "weft/scheduler/prefill.py"),
        "tests/scheduler/test_max_prefill_requests.py",
    ),
    Page(
        "policy.md",
        ("weft/scheduler/policies/kinds/least_memory.py",),
        "tests/scheduler/test_least_memory.py",
        ("tests/scheduler/test_policies.py",),
        ("least",),
    ),
    Page(
        "control-request.md",
        (
            "weft/messages/control.py",
            "weft/engine/control/handlers.py",
            "weft/server/admin/work.py",
        ),
        "tests/test_check_model.py",
    ),
    Page(
        "adapter-kind.md",
        ("weft/executor/lora/kinds/loha.py",),
        "tests/executor/lora/test_loha.py",
    ),
    Page(
        "request-field.md",
        (
            "weft/messages/requests.py",
            "weft/server/requests.py",
            "weft/scheduler/scheduler.py",
        ),
        "tests/server/test_never_waits.py",
    ),
]


class Followed(NamedTuple):
    """The copy after all pages, and by the name of each: the paths that it touched, the run of its
    tests. `imports`: the run that has looked at the imports of all."""

    tree: Path
    touched: dict[str, list[str]]
    tested: dict[str, CompletedProcess[str]]
    imports: CompletedProcess[str]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    tree = tmp_path_factory.mktemp("tree")
    copy_tree(tree)
    touched: dict[str, list[str]] = {}
    tested: dict[str, CompletedProcess[str]] = {}
    for is_last in (False, True):
        pages = [page for page in PAGES if page.is_last == is_last]
        for page in pages:
            touched[page.name] = follow(CONTRIBUTE / page.name, tree)
        done = run_tests(tree, [page for page in pages if page.can_run], imports=is_last)
        tested |= {page.name: done for page in pages}
    return Followed(tree, touched, tested, done)


def run_tests(tree: Path, pages: Sequence[Page], *, imports: bool) -> CompletedProcess[str]:
    """Run the tests of these pages, and name those that pass; with `imports`, also that of all
    imports."""
    files = [IMPORTS] if imports else []
    words = ["every_import"]
    for page in pages:
        files += page.also or (page.test,)
        words += page.words or (Path(page.test).stem,)
    options = ["-rp", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    return run(tree, "-m", "pytest", *options, *files, "-k", " or ".join(words))


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_page_makes_what_works_and_touches_few_files(followed: Followed, page: Page) -> None:
    touched = followed.touched[page.name]
    assert [path for path in touched if not path.startswith("tests/")] == list(page.files)
    if not page.can_run:
        pytest.skip(f"the package {page.package} is not installed")
    done = followed.tested[page.name]
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"PASSED {IMPORTS}" in followed.imports.stdout
    for file in page.also or (page.test,):
        assert f"PASSED {file}::" in done.stdout


def test_the_command_line_names_the_backends_that_there_are(followed: Followed) -> None:
    done = run(followed.tree, "-m", "weft", "serve", "--attention-backend", "gathers")
    assert done.returncode != 0
    assert "neither a backend of weft (auto, torch, triton, gather), nor" in done.stderr
    assert done.stderr.endswith("; did you mean gather?\n")


def test_a_message_without_its_handler_stops_the_start(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    follow(CONTRIBUTE / "control-request.md", tmp_path, without="weft/engine/control/handlers.py")
    done = run(tmp_path, "-c", "import weft.engine.control.handlers")
    assert done.returncode == 1
    assert done.stderr.endswith("IncompleteTable: messages without a handler: CheckModel\n")


def test_a_page_changes_each_file_once() -> None:
    for page in PAGES:
        edited = [path for _, path, _ in BLOCK.findall((CONTRIBUTE / page.name).read_text("utf-8"))]
        assert len(set(edited)) == len(edited), page.name


def test_a_page_that_is_behind_the_code_is_found_out() -> None:
    hunk = " ROUTES = (\n+    new,\n"
    assert patched("ROUTES = (\n    a,\n)\n", hunk, "x") == "ROUTES = (\n    new,\n    a,\n)\n"
    for text in ("ALL_ROUTES = (\n", "ROUTES = (\n)\nROUTES = (\n", "  ROUTES = (\n"):
        with pytest.raises(AssertionError, match="has changed"):
            patched(text, hunk, "x")
