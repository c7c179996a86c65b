"""Test the examples in the docstrings as they are written."""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import fairflare

ROOT = Path(fairflare.__file__).parent
# FLARE's side apart, whose example needs a running job.
MODULES = [
    ".".join(("fairflare", *path.relative_to(ROOT).with_suffix("").parts))
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8") and path.relative_to(ROOT).parts[0] != "flare"
]
# Of the mathematics, what other people call: each has an example.
PUBLIC = {
    "core/fairness.py": ["summarize"],
    "core/weighting.py": ["capped_weights", "layer_weights", "power_weights", "rescue_weights", "tempered_weights"],
}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_are_right(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize(("file", "functions"), PUBLIC.items(), ids=PUBLIC)
def test_public_functions_have_one(file: str, functions: list[str]) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    docs = {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [name for name in functions if ">>> " not in docs[name]] == []
