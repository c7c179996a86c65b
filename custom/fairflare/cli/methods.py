"""Implement ``fairflare list``, ``describe`` and ``privacy``, which describe the methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table

from fairflare.cli.options import OWN_IMAGES, VALUES, Method, MethodFile, Task
from fairflare.cli.screen import AsJson, console, one_document, one_form, user_errors

if TYPE_CHECKING:
    from fairflare.federation.plan.describe import InUse

WIDE = 110  # least width of a screen on which the list shows sources too
WIDEST_TITLE, WIDEST_SOURCE = 14, 36


def list_methods(
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Tables in Markdown: also bytes, passes, secure sums, privacy."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the methods, with what they do and where they come from."""
    from fairflare.federation.plan.describe import STATUS, method_table, overview

    with user_errors(), one_document(as_json) as put:
        one_form(as_json, markdown=markdown)
        if as_json:
            put(methods=overview(), status=STATUS)
        elif markdown:
            typer.echo(method_table())
        else:
            _print_methods()


def _print_methods() -> None:
    """Print the methods in their groups; on a wide screen with their sources."""
    from fairflare.federation.plan.describe import STATUS, overview

    members = overview()
    for group, fair_to in dict.fromkeys((method.group, method.fair_to) for method in members):
        console.print(f"[bold]{group}[/bold] (fair to {fair_to})")
        columns = [
            Column(min_width=max(len(method.name) for method in members), no_wrap=True),
            Column(width=min(max(len(method.title) + 1 for method in members), WIDEST_TITLE)),
            Column(ratio=1), Column(no_wrap=True),
            Column(width=min(max(len(method.source) for method in members), WIDEST_SOURCE)),
        ][: 5 if console.width >= WIDE else 4]  # fmt: skip
        table = Table(*columns, box=None, pad_edge=False, show_header=False)
        for m in (method for method in members if method.group == group):
            only = f" ({m.learns[0]} only)" if len(m.learns) == 1 else ""
            marks = "S" * m.secure_sums * m.phases + " D" * m.private
            cells = (m.name, m.title + ("*" if m.phases > 1 else ""), m.summary + only, marks, m.source)
            table.add_row(*map(escape, cells[: len(columns)]))
        console.print(Padding(table, (0, 0, 1, 0)))
    console.print(
        "* asks every site twice a round. Works with: S: secure sums (SS: two a round), D: differential privacy\n"
        "Settings: fairflare describe METHOD. Costs: fairflare list --markdown",
        *(f"{status}: {what}" for status, what in STATUS.items()), sep="\n", markup=False, highlight=False,
    )  # fmt: skip


def describe(
    method: Method,
    settings: Annotated[list[str] | None, typer.Argument(help="Only these settings; default: all.")] = None,
    kind: Task = None,
    method_file: MethodFile = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables in Markdown, with the paper's values.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show settings of a method, for --set: type and range, the value that a run has (and a paper's), meaning.

    A method's form, such as term, is described as its method with this form.
    """
    from fairflare.federation.plan.describe import describe_setting, page, quick_job, settings_in_use
    from fairflare.methods.base.catalog import owner_of

    with user_errors(), one_document(as_json) as put:
        one_form(as_json, markdown=markdown)
        owner, form = owner_of(method) or (method, "")
        groups_in_use = settings_in_use(method := owner, settings or (), {"form": form} if form else {}, kind)
        if as_json:
            put(
                method=method,
                groups=[
                    {"title": title, "settings": [*map(_plain_setting, group)]}
                    for title, group in groups_in_use.items()
                ],
                quick_job=quick_job(method, kind),
            )
            return
    if markdown:
        typer.echo(page(method, kind))
        return
    if form:
        console.print(f"{form} is {method} with --set form={form}\n", highlight=False)
    for title, group in groups_in_use.items():
        table = Table("setting", "what it is", title=title, title_justify="left", box=None, pad_edge=False)
        table.columns[0].overflow = "fold"
        for used in group:
            table.add_row(escape(used.setting.name), escape(describe_setting(used)))
        console.print(table)
        console.print()
    if not settings:
        console.print(escape(f"{VALUES} {OWN_IMAGES} {quick_job(method, kind)}"), highlight=False)


def _plain_setting(used: InUse) -> dict[str, Any]:
    """Return a setting with its value in a run as plain values; ``paper``: the value with ``--paper`` if it differs."""
    declared = used.setting
    return {
        "name": declared.name, "wanted": declared.wanted, "value": declared.default, "paper": used.paper,
        "meaning": declared.meaning.replace("`", ""), "only": declared.only, "needs": used.needs,
    }  # fmt: skip


def privacy() -> None:
    """Print what leaves a site with each method and task, field by field, in Markdown."""
    from fairflare.federation.privacy import page

    typer.echo(page(), nl=False)
