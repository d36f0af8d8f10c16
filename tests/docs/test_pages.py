"""The pages under docs/: links lead somewhere, generated pages are those of the code, the site
shows every page."""

from __future__ import annotations

import builtins
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import weft
from weft.scheduler.policies.composed.language import names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAV_ENTRY = re.compile(r"^ +- ([\w./-]+\.md)$", re.MULTILINE)


@pytest.mark.parametrize(
    "arguments",
    [["links.py"], ["references.py", "--check"], ["pictures.py", "--check"]],
    ids=" ".join,
)
def test_script_finds_nothing(arguments: list[str]) -> None:
    command = [sys.executable, str(DOCS / "generate" / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.strip() == ""
    assert done.stderr == ""
    assert done.returncode == 0


def test_the_guide_to_the_apis_names_every_route_and_the_fields_of_completions() -> None:
    pages = [
        DOCS / "guides" / name
        for name in ("apis.md", "api-fields.md", "input-embeddings.md", "logprobs.md")
    ]
    guide = "\n".join(page.read_text("utf-8") for page in pages)
    reference = (DOCS / "reference" / "http.md").read_text("utf-8")
    routes = re.findall(r"^\| `[A-Z]+ (/[^`]*)`", reference, re.MULTILINE)
    assert [route for route in routes if route not in guide] == []
    for body in ("ChatRequest", "CompletionRequest", "SglangGenerateRequest"):
        section = reference.split(f"## {body}\n")[1].split("\n## ")[0]
        fields = re.findall(r"^\| `(\w+)`", section, re.MULTILINE)
        assert len(fields) > 20
        assert [field for field in fields if f"`{field}`" not in guide] == []


def test_errors_that_the_python_page_names_can_be_caught_by_their_name() -> None:
    page = (DOCS / "reference" / "python.md").read_text("utf-8")
    named = set(re.findall(r"\b(\w+(?:Param|Error))\b", page))
    assert {"InvalidParam", "SettingsError"} <= named
    assert {name for name in named if not hasattr(builtins, name)} <= set(weft.__all__)
    assert all(issubclass(getattr(weft, name, ValueError), ValueError) for name in named)


def test_site_shows_every_page_once() -> None:
    shown = NAV_ENTRY.findall((ROOT / "mkdocs.yml").read_text("utf-8"))
    there = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(shown) == sorted(there)


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    sys.path.insert(0, str(DOCS / "generate"))
    try:
        import links
    finally:
        sys.path.pop(0)
    links.ROOT = tmp_path
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` [c](d.md)\n[x](none.md) [y](#a-b-c) [z](#no) `[code](none.md)`\n[w](https://a.example)\n"
    )
    assert list(links.dead_links(page)) == [
        "page.md: d.md is not there",
        "page.md: none.md is not there",
        "page.md: #no has no such heading",
    ]


def test_the_site_has_no_links_out_of_the_pages() -> None:
    spec = importlib.util.spec_from_file_location("weft_site", DOCS / "generate" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    page = DOCS / "guides" / "page.md"
    text = "[`memory`](../../weft/memory/README.md) [a](../architecture.md#x) [b](../../pyproject.toml)"
    shown = "`memory` [a](../architecture.md#x) b"
    assert site.without_links_out(text, page) == shown


def shown_texts() -> dict[str, str]:
    """Files that people read or run, and the code whose messages they see."""
    found = [ROOT / "README.md", ROOT / "Dockerfile", ROOT / "pyproject.toml", *DOCS.rglob("*.md")]
    found += [*(ROOT / "weft").rglob("*.py"), *(ROOT / "deploy").rglob("*.*")]
    return {
        str(path.relative_to(ROOT)): path.read_text("utf-8") for path in found if path.is_file()
    }


def test_no_text_installs_the_product_of_another_by_the_name_of_weft() -> None:
    wrong = re.compile(r"weft\[[a-z]+\]|(?:pip|uv|pipx)(?: add| install)[^\n`]* weft(?![\w./-])")
    allowed = "`pip install weft` would bring another product"
    found = [
        (name, hit[0])
        for name, text in shown_texts().items()
        for hit in wrong.finditer(text.replace(allowed, ""))
    ]
    assert found == []


def test_pages_name_the_versions_of_python_that_the_package_is_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    classified = [one.rpartition(" ")[2] for one in project["classifiers"] if "Python :: 3." in one]
    for page in (ROOT / "README.md", DOCS / "start" / "install.md"):
        (told,) = re.findall(r"Python (3\.\d+(?:(?:, | or )3\.\d+)+)", page.read_text("utf-8"))
        assert re.split(", | or ", told) == classified, page


def test_the_number_of_policies_is_that_of_the_code() -> None:
    words = ("nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen")
    said = re.findall(r"\b(\w+) policies,", (ROOT / "README.md").read_text("utf-8"))
    assert said == [words[len(names()) - 9]]


MOST_WORDS = 3_000
REFERENCES = ("command-line.md", "errors.md", "http.md", "limits.md", "python.md", "features.md")


def test_no_page_is_longer_than_one_reads() -> None:
    long = {
        str(page.relative_to(DOCS)): words
        for page in DOCS.rglob("*.md")
        if page.name not in REFERENCES
        and (words := len(page.read_text("utf-8").split())) > MOST_WORDS
    }
    assert long == {}


def test_the_page_about_installation_has_every_extra_under_the_name_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    page = (DOCS / "start" / "install.md").read_text("utf-8")
    shown = re.findall(rf"`{project['name']}\[(\w+)\]`", page)
    assert sorted(shown) == sorted({*project["optional-dependencies"]} - {"dev", "clients"})
    assert f"pip install {project['name']} " in page
