"""Write the messages about a run before the run begins and after the run was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fairflare.cli.screen import errors, say
from fairflare.federation.plan.papers import papers_of

if TYPE_CHECKING:
    from fairflare.federation.plan.plan import Plan


def say_plan(plan: Plan, own_data: bool = False) -> None:
    """Print where a plan's settings come from, what they lack, and where local training is that of another method."""
    say_whose_setting(plan)
    say_what_lacks(plan.lacks, own_data)
    if plan.prescribed:
        whose = "from the bundle" if plan.monai_bundle is not None else "as the task has it"
        say(f"local training, {whose}: {', '.join(plan.prescribed)}")
    say_what_is_shared(plan, plan.method.name)


def say_whose_setting(plan: Plan) -> None:
    """Print which paper's settings ``--paper`` took, and which other papers have settings of the method."""
    if plan.paper is not None:
        others = [name for name in papers_of(plan.method) if name != plan.paper.name]
        more = f" (--paper NAME takes another: {', '.join(others)})" if others else ""
        say(f"settings of {plan.paper.name or plan.method.name}: {plan.paper.source}{more}")


def say_what_lacks(lacks: Sequence[str], own_data: bool = False) -> None:
    """Print which data or files the user still has to give so that the run has the paper's setting."""
    from fairflare.reporting.layout import wrap_sentences

    lacks = [text for text in lacks if not (own_data and text.endswith("with --data"))]
    if lacks:
        say("; it lacks", mark="[yellow]not the paper's run by itself[/yellow]")
        for line in wrap_sentences((f"  - {text}" for text in lacks), errors.width):
            say(line)


def say_what_is_shared(plan: Plan, row: str) -> None:
    """Print those settings whose values the method takes from another method instead of its own."""
    if plan.replaced:
        say(f"{row} trains like the others: {', '.join(plan.replaced)}")


def say_how_to_go_on(workspace: Path, experiment: str) -> None:
    """Print, after Ctrl-C, how to resume the run and where its files are."""
    how = (
        "The same command goes on after the last finished round."
        if experiment
        else "It cannot be resumed; to be able to, start with --experiment NAME."
    )
    say(how, mark="[yellow]Stopped.[/yellow] ")
    say(f"what there is: {workspace}")


def say_what_was_left() -> None:
    """Remove the temporary folders of dead runs, which may hold models of single sites, and say so."""
    from fairflare.base.disk.temporary import sweep

    for text in sweep():
        say(text)
