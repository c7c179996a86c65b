"""Name the commands of ``fairflare``, each of which is imported when it is called, with the packages that it needs."""

from __future__ import annotations

import shlex
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fairflare.base.disk.files import system_error
from fairflare.base.own_errors import lacking_package
from fairflare.base.plugins import COMMANDS, load_object
from fairflare.cli.options import Command, spell_methods
from fairflare.cli.screen import console, say

#: Functions of the commands, in the order of the help.
FUNCTIONS = {
    "list": "methods:list_methods", "describe": "methods:describe", "privacy": "methods:privacy",
    "run": "run.command:run", "export": "run.command:export", "show": "show:show", "adapt": "model.adapt:adapt",
    "predict": "model.predict:predict", "evaluate": "model.evaluate:evaluate", "plan": "model.plan:plan",
    "check-data": "data.check:check_data", "stats": "data.stats:stats", "doctor": "data.doctor:doctor",
    "policies": "data.policies:policies", "examples": "examples:examples", "prepare": "commands:prepare",
}  # fmt: skip
#: What ``prepare`` gets of the command line, whose options are declared by the preparers.
AS_IT_IS: Any = {
    "add_help_option": False, "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}  # fmt: skip
#: How commands that users of other tools type are spelled here.
SPELLED = {
    "version": "--version", "-v": "--version", "train": "run", "methods": "list", "test": "evaluate", "help": "--help",
}  # fmt: skip


class Commands(TyperGroup):
    """Define the group of all commands, which answers a word of another tool with the command that is meant.

    The commands are ours and those of plugins by name, as entry points; each is made when it is asked for.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        plugged = sorted(entry_points(group=COMMANDS), key=lambda point: point.name)
        self.commands: Any = {
            **{name: EntryPoint(name, f"{__package__}.{function}", COMMANDS) for name, function in FUNCTIONS.items()},
            # A plugin's command of the same name extends ours: `show` calls it for several runs.
            **{point.name: point for point in plugged if point.name not in FUNCTIONS},
        }

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (point := self.commands.get(cmd_name)) is None:
            return None
        alone = typer.Typer(add_completion=False)
        alone.command(cmd_name, **({"cls": Command} if cmd_name != "prepare" else AS_IT_IS))(load_object(point))
        return typer.main.get_command(alone)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and (meant := SPELLED.get(args[0])):
            words = [meant, *spell_methods(args[1:])]
            line = shlex.join(reversed(words) if meant == "--help" else words)
            ctx.fail(f"No such command: {args[0]}. Meant is probably: fairflare {line}")
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Fair federated learning for medical images on NVIDIA FLARE.",
)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[
        bool, typer.Option("--version", help="The versions of FairFlare, FLARE, MONAI and PyTorch.")
    ] = False,
) -> None:
    """Fair federated learning for medical images on NVIDIA FLARE."""
    if version:
        from fairflare.federation.record.run_info import versions

        console.print(
            ", ".join(f"{name} {number}" for name, number in versions().items()), highlight=False, soft_wrap=True
        )
        raise typer.Exit()


def prepare(ctx: typer.Context) -> None:
    """Make folders with a datalist for every site out of public data sets or your own folders (docs/datasets.md)."""
    from fairflare.data.preparers.__main__ import main as prepare_data

    raise typer.Exit(prepare_data(ctx.args))


def main() -> None:
    """Run the command line; an unusable path or an extra that is not installed is reported in one line."""
    try:
        app()
    except Exception as error:
        text = system_error(error) if isinstance(error, OSError) else lacking_package(error)
        if text is None:
            raise
        say(text, mark="[red]error[/red]: ")
        raise SystemExit(2) from error
