"""The options that say what is run, for every command that has them, and what is said of such a run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from fairflare.cli import completion
from fairflare.cli.screen import errors, user_errors
from fairflare.cli.site_names import parse_sites

if TYPE_CHECKING:
    from fairflare.federation.plan.plan import Plan

PAPER_HELP = (
    "The paper's rounds, sites, network and training, not those of a quick job; with a name (fed_lwr, fed_lwr_rif, "
    "fed_mrl, fed_mas, ...) that experiment's; default: the first whose table has the method."
)
FIRST_PAPER = "default"  # what --paper says without a name

VALUES = "Give them with --set NAME=VALUE; lists and numbers as JSON, null for nothing or None."

OWN_IMAGES = "On own images (--data) image_size and in_channels follow the images unless they are given."

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Method = Annotated[str, typer.Argument(help="A name that `fairflare list` prints.", autocompletion=completion.methods)]


class WithPaper(TyperCommand):
    """A command whose option --paper may stand without a name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [
            f"{arg}={FIRST_PAPER}" if arg == "--paper" and _no_paper(after) else arg
            for arg, after in zip(args, [*args[1:], ""], strict=False)
        ]
        return super().parse_args(ctx, given)


def _no_paper(word: str) -> bool:
    """Whether what stands behind ``--paper`` is nothing, an option or a method (else a paper, or one mistyped)."""
    from fairflare.methods.base.catalog import all_methods
    from fairflare.methods.base.papers import experiments

    return word not in experiments() and (word[:1] in ("", "-") or word.partition(":")[0] in all_methods())


def which_paper(name: str | None) -> dict[str, Any]:
    """``--paper`` as arguments of :func:`fairflare.federation.plan.plan.make_plan`."""
    return {"small": name is None, "paper": None if name == FIRST_PAPER else name}


def plan_options(
    method: Method,
    rounds: Annotated[
        int | None, typer.Option("--rounds", "-r", min=1, help="Communication rounds; default: the method's quick job.")
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(
            "--sites",
            "-s",
            help="Number of sites, or names separated by commas; 0: as many as the method's quick job has (the default "
            "of run, unless --data names them); all: every connected one (the default of export).",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="a kind, such as segmentation or volume_segmentation; default: what the paper learns.",
            autocompletion=completion.kinds_of_task,
        ),
    ] = None,
    paper: Annotated[str | None, typer.Option("--paper", help=PAPER_HELP, autocompletion=completion.papers)] = None,
    train_like: Annotated[
        str | None,
        typer.Option(
            "--train-like",
            help="Task, network, data and local training of this method, so that the two can be compared.",
            autocompletion=completion.methods,
        ),
    ] = None,
    min_sites: Annotated[int, typer.Option(min=1, help="Usable results that a round needs.")] = 2,
    require_all_sites: Annotated[
        bool, typer.Option(help="End the run before training when the data or settings of a site cannot be used.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial model and of all training.")] = 0,
    experiment: Annotated[str, typer.Option(help="Id under which a stopped run can be continued.")] = "",
    label: Annotated[
        str | None, typer.Option(help="What tables call the run, and its folder; default: the method's name.")
    ] = None,
    initial_ckpt: Annotated[
        str, typer.Option("--initial-ckpt", help="Model file to start from: a state dict or an FL_global_model.pt.")
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="KEY=VALUE (JSON or text), see `fairflare describe`; may be repeated.",
            autocompletion=completion.settings,
        ),
    ] = None,
    task_file: Annotated[
        Path | None, typer.Option(help="Python file with a class Task: your own network and data.")
    ] = None,
    monai_bundle: Annotated[
        Path | None,
        typer.Option(
            "--monai-bundle",
            help="Folder of a MONAI bundle: network, loss, optimizer, transforms and metric are its own "
            "(docs/bundles.md).",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds a phase may take.")] = 3600.0,
    grace: Annotated[
        float, typer.Option(help="Seconds for late sites once enough answered; 0: the whole timeout.")
    ] = 0.0,
) -> dict[str, Any]:
    """The options that say what is run: arguments of :class:`fairflare.flare.export.recipes.FairRecipe`."""
    return {
        "method": method,
        "task": task,
        **which_paper(paper),
        "train_like": train_like,
        "num_rounds": rounds,
        "sites": "default" if sites is None else parse_sites(sites),
        "min_sites": min_sites,
        "require_all_sites": require_all_sites,
        "seed": seed,
        "experiment": experiment,
        "initial_ckpt": initial_ckpt,
        **({} if label is None else {"label": label}),
        "phase_timeout": timeout,
        "straggler_grace": grace,
        "settings": parse_settings(settings or []),
        "task_file": task_file,
        "monai_bundle": monai_bundle,
    }


def takes_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :func:`plan_options` in front of its own, and their result as ``plan``."""
    shared = inspect.signature(plan_options).parameters
    own = {k: p for k, p in inspect.signature(command).parameters.items() if k != "plan"}

    @wraps(command)
    def run(**given: Any) -> None:
        with user_errors():
            plan = plan_options(**{key: given.pop(key) for key in shared})
        command(plan=plan, **given)

    hints = get_type_hints(command, include_extras=True) | get_type_hints(plan_options, include_extras=True)
    run.__annotations__ = {key: hints[key] for key in (*shared, *own)} | {"return": None}
    keyword = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name])
        for p in (*shared.values(), *own.values())
    ]
    run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    return run


def parse_settings(items: list[str]) -> dict[str, Any]:
    """``["clip_max=0.99"]`` -> ``{"clip_max": 0.99}``; values are JSON where they parse, else text.

    Raises:
        ValueError: no ``=``, or a key twice.
    """
    found: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ValueError(f"--set wants KEY=VALUE, got {item!r}")
        if key in found:
            raise ValueError(f"--set gives {key!r} twice")
        try:
            found[key] = json.loads(text)
        except json.JSONDecodeError:
            found[key] = text
    return found


def say_how_to_go_on(workspace: Path, experiment: str) -> None:
    """After Ctrl-C."""
    how = (
        "the same command goes on after the last finished round"
        if experiment
        else "it cannot be continued: that takes an --experiment NAME from the start"
    )
    errors.print(f"[yellow]stopped[/yellow]: {how}", highlight=False, soft_wrap=True)
    errors.print(f"what there is: {workspace}", markup=False, highlight=False, soft_wrap=True)


def say_what_was_left() -> None:
    """Removes the temporary folders of dead runs, which hold models of single sites, and says so."""
    from fairflare.base.disk.temporary import sweep

    for text in sweep():
        errors.print(text, markup=False, highlight=False, soft_wrap=True)


def say_whose_setting(plan: Plan) -> None:
    """Which paper ``--paper`` took, and where else the method stands."""
    if plan.paper is not None:
        others = [name for name in plan.method.papers if name != plan.paper.name]
        more = f" (--paper NAME takes another: {', '.join(others)})" if others else ""
        told = f"settings of {plan.paper.name or plan.method.name}: {plan.paper.source}{more}"
        errors.print(told, highlight=False, markup=False, soft_wrap=True)


def say_what_lacks(lacks: Sequence[str], own_data: bool = False) -> None:
    """What the paper's setting still has to be given."""
    from fairflare.reporting.layout import wrapped

    lacks = [text for text in lacks if not (own_data and text.endswith("with --data"))]
    if lacks:
        errors.print("[yellow]not the paper's run by itself[/yellow]; it lacks", highlight=False)
        for line in wrapped((f"  - {text}" for text in lacks), errors.width):
            errors.print(line, markup=False, highlight=False)


def say_what_is_brought(brought: Sequence[str]) -> None:
    """Local training as the MONAI bundle has it."""
    if brought:
        errors.print(f"local training, from the bundle: {', '.join(brought)}", markup=False, highlight=False)


def say_what_is_shared(plan: Plan, row: str = "") -> None:
    """Where a method does not train as it would by itself, since it trains like another one."""
    if plan.instead:
        text = f"{row or plan.method.name} trains like the others: {', '.join(plan.instead)}"
        errors.print(text, markup=False, highlight=False, soft_wrap=True)
