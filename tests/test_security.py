"""The package holds nothing that runs what it reads: a whole class of holes (code by pickle) cannot
come back."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from tests.shape.measure import walk

PACKAGE = Path(__file__).parent.parent / "weft"

FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "shelve",
    "marshal",
    "joblib",
}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "numpy.load",
    "np.load",
    "yaml.load",
    "os.system",
    "multiprocessing.Pipe",
    "multiprocessing.Queue",
}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"}
KINDS = {
    ".py",
    ".typed",
    ".json",
    ".jinja",
    ".safetensors",
    ".cpp",
    ".h",
    ".html",
    ".css",
    ".js",
    ".svg",
    ".md",
    ".txt",
}
RUNS = re.compile(
    r"\b(?:eval|exec)\s*\(|new Function\s*\(|\bpickle\b|torch\.load|recv_pyobj|\bdill\b|\bmarshal\b|auto_map"
)
FORBIDDEN_ARGUMENTS = {"shell", "trust_remote_code", "allow_pickle"}  # unless given as False
# Without one of these words a source has none of them, and need not be parsed.
WORDS = FORBIDDEN_MODULES | FORBIDDEN_METHODS | FORBIDDEN_ARGUMENTS
WORDS |= {name.rpartition(".")[2] for name in FORBIDDEN_CALLS} - {"load"}
TRACE = re.compile(rf"\b(?:{'|'.join(sorted(WORDS))})\b|\.\s*load\b")


def violations(source: str) -> list[str]:
    """What in `source` is forbidden, with line numbers."""
    if not TRACE.search(source):
        return []
    found = []
    for node in walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [
                (node.lineno, item.name)
                for item in node.names
                if item.name.split(".")[0] in FORBIDDEN_MODULES
            ]
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] in FORBIDDEN_MODULES
        ):
            found.append((node.lineno, str(node.module)))
        elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_METHODS:
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in FORBIDDEN_CALLS:
                found.append((node.lineno, ast.unparse(node.func)))
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in FORBIDDEN_ARGUMENTS and not off:
                    found.append((node.lineno, f"{keyword.arg}="))
    return [f"line {line}: {what}" for line, what in found]


def wheel_files() -> list[Path]:
    """What a wheel of this tree holds: all modules, and the data that pyproject.toml names."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["weft"]
    data = {path for pattern in patterns for path in PACKAGE.glob(pattern) if path.is_file()}
    return sorted(data | set(PACKAGE.rglob("*.py")))


def test_the_wheel_holds_no_file_that_could_be_run_when_it_is_read() -> None:
    files = wheel_files()
    assert {path.name for path in files} >= {
        "py.typed",
        "__init__.py",
        "tokenizer.json",
        "model.safetensors",
    }
    assert {path.suffix for path in files} <= KINDS
    for path in files:
        if path.suffix not in (".py", ".safetensors"):
            text = path.read_text("utf-8")
            if path.suffix == ".js":
                text = text.replace("exec(", "match(")  # a method of regular expressions
            found = RUNS.findall(text)
            assert not found, path


def test_package_runs_nothing_that_it_reads() -> None:
    files = [path for path in wheel_files() if path.suffix == ".py"]
    assert len(files) > 100
    found = {str(path): violations(path.read_text()) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import dill.source",
        "eval('1')",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "socket.recv_pyobj()",
        "yaml.load(text)",
        "subprocess.run(line, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
    ],
)
def test_check_finds(source: str) -> None:
    assert violations(source)


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "json.loads(text)", "safetensors.torch.load_file(p)", "f(shell=False)"],
)
def test_check_lets_pass(source: str) -> None:
    assert not violations(source)
