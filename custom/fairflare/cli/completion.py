"""What the shell offers after TAB: names of methods, settings and runs, at once: PyTorch is not imported.

The names come from the recipes, one file a method, with every setting as an argument.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import typer

RECIPES = files("fairflare") / "recipes"  # the package is not imported: that takes seconds
#: Settings of the run that --set takes too; in a recipe they stand before ``settings``, the method's own after it.
OF_THE_RUN = (
    "max_weight", "max_samples", "max_update_norm", "best_by", "best_lambda", "test_last", "norm_statistics",
    "bootstrap", "recalibration", "anchor_as", "crt_rounds", "crt_epochs", "crt_weights", "crt_mask_absent",
    "min_cases",
)  # fmt: skip


def methods(incomplete: str) -> list[str]:
    """Methods whose name begins so."""
    names = (path.name.removesuffix(".py") for path in RECIPES.iterdir() if path.name.endswith(".py"))
    return sorted(name for name in names if not name.startswith("_") and name.startswith(incomplete))


def kinds_of_task(incomplete: str) -> list[str]:
    """Kinds of task that begin so."""
    return [name for name in ("segmentation", "classification") if name.startswith(incomplete)]


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Settings of the method on the command line, as ``name=``."""
    # Click gives up at the option whose value is being typed: the method is then among what is left.
    given = [word for word in (ctx.params.get("method"), *ctx.args) if word in methods("")]
    found = sorted(set(_arguments(given[0]))) if given else []
    return [f"{name}=" for name in found if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Folders that hold a run: below ``runs``, or below what was typed."""
    folder = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent) if incomplete else Path("runs")
    found = (path for path in sorted(folder.iterdir()) if path.is_dir()) if folder.is_dir() else ()
    return [str(path) for path in found if str(path).startswith(incomplete)]


def _arguments(method: str) -> Iterator[str]:
    tree = ast.parse((RECIPES / f"{method}.py").read_text(encoding="utf-8"))
    dotted: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(
            node.value, ast.Dict
        ):  # arguments that belong to a part
            dotted |= ast.literal_eval(node.value)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            names = [argument.arg for argument in node.args.kwonlyargs]
    for name in (*OF_THE_RUN, *names[names.index("settings") + 1 :]):
        yield dotted.get(name, name)
