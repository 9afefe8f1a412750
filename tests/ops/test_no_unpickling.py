"""Nothing that comes from outside is ever executed: no pickle, marshal, eval or their hidden doors, anywhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("radix", "kernels", "rpc", "src", "bench", "scripts")
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "__import__"}


def findings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {item.name}" for item in node.names if item.name.split(".")[0] in BANNED_MODULES)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in BANNED_MODULES:
                yield f"from {node.module}"
        elif isinstance(node, ast.Call):
            yield from _call_findings(node)


def _call_findings(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    keywords = {item.arg: item.value for item in call.keywords}
    if name in BANNED_CALLS:
        yield name
    elif name == "torch.load" and not _is_true(keywords.get("weights_only")):
        yield "torch.load without weights_only=True"
    elif "allow_pickle" in keywords and _is_true(keywords["allow_pickle"]):
        yield f"{name}(allow_pickle=True)"
    elif name in {"yaml.load", "yaml.unsafe_load"} or name.endswith((".recv_pyobj", ".send_pyobj")):
        yield name


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def sources() -> list[Path]:
    return sorted({path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")})


def test_the_project_has_none() -> None:
    assert len(sources()) > 50
    found = [f"{path.relative_to(ROOT)}: {what}" for path in sources() for what in findings(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "eval(x)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "numpy.load(f, allow_pickle=True)",
        "socket.recv_pyobj()",
    ],
)
def test_the_search_finds_what_it_is_for(bad: str) -> None:
    assert list(findings(bad))


@pytest.mark.parametrize(
    "good", ["torch.load(f, weights_only=True)", "numpy.load(f)", "model.eval()", "ast.literal_eval(x)"]
)
def test_the_search_leaves_the_harmless_alone(good: str) -> None:
    assert list(findings(good)) == []
