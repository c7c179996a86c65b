"""Register the commands of ``fairflare``, a file each; packages that a command needs are imported when it is called."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fairflare.base.disk.files import system_error
from fairflare.base.own_errors import lacking_package
from fairflare.base.plugins import COMMANDS, plugged
from fairflare.cli.data.check import check_data
from fairflare.cli.data.doctor import doctor
from fairflare.cli.data.policies import policies
from fairflare.cli.data.stats import stats
from fairflare.cli.examples import examples
from fairflare.cli.methods import describe, list_methods, privacy
from fairflare.cli.model.adapt import adapt
from fairflare.cli.model.evaluate import evaluate
from fairflare.cli.model.plan import plan
from fairflare.cli.model.predict import predict
from fairflare.cli.options import Command, spell_methods
from fairflare.cli.run.command import export, run
from fairflare.cli.screen import console, say
from fairflare.cli.show import show

#: How commands that users of other tools type are spelled here.
SPELLED = {
    "version": "--version", "-v": "--version", "train": "run", "methods": "list", "test": "evaluate", "help": "--help",
}  # fmt: skip


class Commands(TyperGroup):
    """Define the group of all commands, which answers a word of another tool with the command that is meant."""

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

    raise typer.Exit(prepare_data(ctx.args, prog="fairflare prepare"))


app.command("list", cls=Command)(list_methods)
for command in (
    describe,
    privacy,
    run,
    export,
    show,
    adapt,
    predict,
    evaluate,
    plan,
    check_data,
    stats,
    doctor,
    policies,
    examples,
):
    app.command(cls=Command)(command)
app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(prepare)
own = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
for name, more in plugged(COMMANDS).items():
    if name not in own:  # a plugin's command of the same name extends ours: `show` calls it for several runs
        app.command(name, cls=Command)(more)


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
