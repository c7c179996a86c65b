"""Define the options that several commands share, and parse their values."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperCommand

from fairflare.base.checks import refuse
from fairflare.cli import completion
from fairflare.cli.data.sites import parse_sites
from fairflare.cli.screen import console, say, user_errors
from fairflare.federation.plan.request import RunRequest
from fairflare.federation.plan.run_settings import (
    BY_OPTION,
    RUN,
    SAME,
    SITES_THAT_FAIL,
    TRAINING,
    RunSettings,
    usual_waits,
)
from fairflare.reporting.layout import join_parts

FIRST_PAPER = "default"  # value of --paper without a name

VALUES = "Give them with --set NAME=VALUE; lists and numbers as JSON, null for nothing or None."

OWN_IMAGES = "On own images (--data) image_size and in_channels follow the images unless they are given."

TABLES = "Tables"  # name of a group of options in the help
PANELS = ("", TRAINING, RUN, SITES_THAT_FAIL, TABLES)

DEVICE = (
    " The device stands in the file of --data, in the site's block (at a real site in local/fairflare.json): "
    '"device": "cuda:0", or "cpu". By default it is the first GPU.'
)
#: How options that users of other tools type are spelled here: of several spellings the first that the command has. A
#: word before ``: `` is another command; ``{}`` stands for the value, and alone for an argument with one of the names;
#: a text that begins with a space is the whole answer.
SPELLED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("epochs", "epoch", "num_epochs", "n_epochs", "local_epoch", "e"): ("--set local_epochs={}",),
    ("lr", "learning_rate"): ("--set learning_rate={}",),
    ("batch", "bs", "batch_size", "b"): ("--set batch_size={}",),
    ("model", "models", "net", "arch", "backbone", "network", "checkpoint"): ("{}", "--set network={}"),
    ("images", "image", "input"): ("{}", "--source {}"),
    ("clients", "client", "num_clients", "n_clients", "num_sites", "n_sites", "nodes", "n"): ("--sites {}",),
    ("num_rounds", "n_rounds", "communication_rounds"): ("--rounds {}",),
    ("method", "methods", "algorithm", "strategy"): ("{}",),
    ("data_dir", "data_path", "data_root", "datalist", "data", "src", "root", "i"): ("--data {}", "--source {}"),
    ("dataset",): (
        " Without --data the images are a synthetic phantom; `fairflare prepare` makes a folder of a public data set "
        "or of your own, and --data FOLDER/fairflare.json takes it.",
    ),
    ("config", "cfg", "config_file", "c"): (
        "--plan {}",
        " Settings are given one by one, --set NAME=VALUE (`fairflare describe METHOD` lists them); a file with rows "
        "and settings is for compare: fairflare compare --plan {}",
    ),
    ("gpu", "gpus", "gpu_id", "g"): ("--device cuda:{}", DEVICE),
    ("cuda", "use_cuda"): ("--device cuda", DEVICE),
    ("cpu", "no_cuda"): ("--device cpu", DEVICE),
    ("device",): (DEVICE,),
    ("output", "out", "output_dir", "out_dir", "outdir", "save_dir", "dest", "o", "workspace"): (
        "--workspace {}",
        "--out {}",
    ),
    ("seed",): ("--seeds {}",),
    ("seeds",): ("compare: --seeds {}",),
    ("dry_run",): ("export: --out jobs",),
}
#: The commands that take further words, by those that do not.
FOR_SEVERAL = {"run": "compare", "list": "describe", "report": "show"}
HELP_ALL, SHORT = "--help-all", "fairflare.short_help"
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]  # class of typer's own copy of click, without a public name


def option_of(setting: str) -> Any:
    """Return the command-line option that a setting of the run declares, see :class:`ByOption`."""
    option = BY_OPTION[setting]
    return typer.Option(
        *option.flags, min=option.low, metavar=option.metavar, help=option.help, rich_help_panel=option.panel,
        show_default=option.metavar is not None,
    )  # fmt: skip


Method = Annotated[str, typer.Argument(help="A name that `fairflare list` prints.", autocompletion=completion.methods)]
Rounds = Annotated[int | None, option_of("num_rounds")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        "-d",
        metavar="FILE",
        help="A local/fairflare.json that says where each site's data are, or its folder.",
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="KIND",
        help="A kind, such as segmentation or volume_segmentation; default: what the paper learns.",
        autocompletion=completion.kinds_of_task,
        rich_help_panel=TRAINING,
    ),
]
TaskFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Python file with a class Task: your own network and data.", rich_help_panel=TRAINING
    ),
]
MethodFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Python file with METHODS: a method of your own.", rich_help_panel=TRAINING,
        is_eager=True, callback=lambda file: add_methods(file),
    ),
]  # fmt: skip
MonaiBundle = Annotated[
    Path | None,
    typer.Option(
        "--monai-bundle",
        metavar="DIR",
        help="Folder of a MONAI bundle: network, loss, optimizer, transforms and metric are its own (docs/bundles.md).",
        rich_help_panel=TRAINING,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="JSON or text, see `fairflare describe`; may be repeated.",
        autocompletion=completion.settings,
    ),
]
Paper = Annotated[
    str | None,
    typer.Option(
        "--paper",
        metavar="NAME",
        help="The paper's rounds, sites, network and training, not those of a quick job; with a name (fed_lwr, "
        "fed_lwr_rif, fed_mrl, fed_mas, ...) that experiment's; default: the first whose table has the method.",
        autocompletion=completion.papers,
    ),
]
Metric = Annotated[
    str | None, typer.Option("--metric", "-m", metavar="NAME", help="Of the tables; default: the task's own.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
OfModels = Annotated[
    bool | None,
    typer.Option("--best/--last", help="The best model by validation, or the last; default: best, else last."),
]
Device = Annotated[
    str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1 ...; default: the first GPU, else cpu.")
]
OwnCode = Annotated[
    Path | None,
    typer.Option(
        "--task-file", metavar="FILE", help="The task.py of the run, where it has code of its own; that code is run."
    ),
]


class ExplainingCommand(TyperCommand):
    """Define a command that answers an option of another tool with the command line that is meant."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, [*args])  # the parser empties its list
        except USAGE_ERROR as error:
            more, words = "", spell_methods([word.removesuffix(f"={FIRST_PAPER}") for word in args])
            if hasattr(error, "possibilities"):  # the option is unknown
                more = _suggest_line(
                    ctx.command_path.partition("fairflare ")[2] or ctx.info_name,
                    words,
                    error.option_name,
                    [flag for p in self.params for flag in p.opts],
                )
            elif "extra argument" in error.message:
                more = _guess_meaning(ctx.info_name, words)
            elif not error.message:  # an argument or an option is missing
                more = error.param.help or ""
            error.message += more
            error.possibilities = [] if more else getattr(error, "possibilities", [])
            raise


class Command(ExplainingCommand):
    """Define a command whose help sorts options by group and name, and whose option --paper may have no value.

    Where options are in groups, ``--help`` shows those without a group, and ``--help-all`` shows all of them.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, without the options of groups unless ``--help-all`` asks for them."""
        ctx.meta[SHORT] = not ctx.meta.get(HELP_ALL)
        super().format_help(ctx, formatter)

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        if any(map(_panel, parameters)):
            every: Any = copy(self.get_help_option(ctx))
            every.name, every.opts, every.callback = "all", [HELP_ALL], _print_all
            every.help = "Show further options too."
            parameters.append(every)
        return sorted((p for p in parameters if not (ctx.meta.get(SHORT) and _panel(p))), key=_place_in_help)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [
            f"{arg}={FIRST_PAPER}" if arg == "--paper" and _no_paper(after) else arg
            for arg, after in zip(args, [*args[1:], ""], strict=False)
        ])  # fmt: skip


def _print_all(ctx: Any, parameter: Any, given: bool) -> None:
    """Print the help with all options, and end the command, where ``--help-all`` is given."""
    if given:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help())
        ctx.exit()


def spell_methods(words: Sequence[str]) -> list[str]:
    """Return a command line's words, with methods by the names that commands take; values of options stay."""
    from fairflare.methods.base.catalog import find_titled

    same = {word: find_titled(word.partition(":")[0]) for word in words}
    return [
        word.replace(word.partition(":")[0], same[word][0].name, 1)
        if before[:1] != "-" and len(same[word]) == 1
        else word
        for before, word in zip(["", *words], words, strict=False)
    ]


def _suggest_line(command: str, words: Sequence[str], wrong: str, has: Sequence[str]) -> str:
    """Return a hint with the command line that an unknown option probably means; an empty text if that is not known.

    Args:
        command: the command's name.
        words: the command line after them.
        wrong: the unknown option: one of :data:`SPELLED`, or a setting of the method that the words name.
        has: arguments and options that the command has, in their order.
    """
    from fairflare.federation.plan.describe import sections
    from fairflare.methods.base.catalog import all_methods

    method = next((method for word in words if (method := word.partition(":")[0]) in all_methods()), None)
    known = [setting.name for group in sections(method).values() for setting in group] if method else []
    line, rest, answered, front = list[str](), [*words], False, 0
    while rest:
        option, _, value = (word := rest.pop(0)).partition("=")
        name = option.lstrip("-").replace("-", "_").lower() if option[:1] == "-" and option not in has else ""
        as_setting = (f"--set {name}={{}}",) if name in known else ()
        names, spellings = next((pair for pair in SPELLED.items() if name in pair[0]), ((), as_setting))
        for spelling in spellings:
            other, _, form = ("", "", spelling) if spelling[0] == " " else spelling.rpartition(": ")
            if other or form[0] == " " or {form.partition(" ")[0], *(names if form == "{}" else ())} & {*has}:
                if "{}" in form and not value and rest and not rest[0].startswith("-"):
                    value = rest.pop(0)
                quoted = shlex.join(spell_methods(value.split(",")) if "methods" in names else [value])
                form = form.replace("{}", quoted if value else "VALUE")
                if form[0] == " ":
                    return f".{form}"
                place = front if has[0] in names else len(line)  # a command's first argument comes first
                line.insert(place, form)
                front += place == front
                command, answered = other or command, answered or option.startswith(wrong)
                break
        else:
            line.append(shlex.quote(word))
    # Two methods, of which one came with --method, are for compare.
    return (
        (
            _guess_meaning(command, shlex.split(" ".join(line)))
            or f". Meant is probably: fairflare {command} {' '.join(line)}"
        )
        if answered
        else ""
    )


def _guess_meaning(command: str, words: Sequence[str]) -> str:
    """Return a hint where a lone word probably belongs to ``--set`` or ``--paper``, or to ``compare``; else nothing."""
    from fairflare.federation.plan.papers import experiments
    from fairflare.methods.base.catalog import all_methods

    for option, word, after in zip(words, words[1:], [*words[2:], ""], strict=False):
        if option == "--set" and "=" not in word:
            return f". --set wants KEY=VALUE: --set {word}={after}"
        if option == "--paper" and word not in experiments():
            return f". Papers that --paper knows by name: {', '.join(experiments())}."
    least = {"run": 2, "list": 1}.get(command, 0)
    if command in FOR_SEVERAL and sum(word.partition(":")[0] in all_methods() for word in words) >= least:
        line = shlex.join(word for word in words if word != "--in-process")
        return f". Meant is probably: fairflare {FOR_SEVERAL[command]} {line}"
    return ""


def _panel(parameter: Any) -> str:
    return getattr(parameter, "rich_help_panel", None) or ""


def _place_in_help(parameter: Any) -> tuple[int, str]:
    if parameter.param_type_name == "argument":  # arguments come first, in the order of typing
        return -1, ""
    return PANELS.index(_panel(parameter)), [*parameter.opts, *parameter.secondary_opts][0]


def _no_paper(word: str) -> bool:
    """Return whether the word after ``--paper`` is no paper's name: it is empty, an option or a method.

    Any other word is a paper's name, perhaps a mistyped one.
    """
    from fairflare.federation.plan.papers import experiments
    from fairflare.methods.base.catalog import all_methods

    return word not in experiments() and (word[:1] in ("", "-") or word.partition(":")[0] in all_methods())


def which_paper(name: str | None) -> dict[str, Any]:
    """Return the value of ``--paper`` as arguments of :func:`fairflare.federation.plan.plan.make_plan`."""
    return {"small": name is None, "paper": None if name == FIRST_PAPER else name}


def add_methods(file: Path | None) -> Path | None:
    """Add the methods of the file of ``--method-file`` to the catalog, before any method is looked up."""
    from fairflare.methods.base.catalog import add_file

    with user_errors():
        if file is not None:
            add_file(file)
    return file


def which_model(best: bool | None) -> Literal["best", "last"] | None:
    """Return the value of ``--best/--last`` as :func:`fairflare.prediction.saved_model.find_model` takes it."""
    return None if best is None else "best" if best else "last"


def refuse_to_replace(targets: Iterable[Path], overwrite: bool) -> None:
    """Raise ValueError with the files' names where target files exist and ``--overwrite`` is not given."""
    there = [str(path) for path in targets if path.exists()]
    if there and not overwrite:
        raise ValueError(
            f"already there: {join_parts(there, most=5)}; give --overwrite to replace them, or another --out"
        )


def write_job(recipe: Any, out: Path, overwrite: bool, option: str = "--out") -> None:
    """Export a recipe as a job into a folder; ``option`` named the folder on the command line.

    Raises:
        ValueError: the job's folder exists already.
        OSError: the folder cannot be written.
    """
    folder = out / recipe.name
    if folder.exists() and not overwrite:
        raise ValueError(f"{folder} exists; give --overwrite to replace all of it, or another {option}")
    recipe.export(str(out))
    say(f"job folder: {folder}", console)
    needed = "permit code of their submitter (byoc)" if any(folder.rglob("custom")) else "allow its classes"
    say(f"The server and every site must {needed}, or the job fails; `fairflare doctor --kit KIT` shows it")


def plan_options(
    method: Method,
    sites: Annotated[
        str | None,
        typer.Option(
            "--sites",
            "-s",
            metavar="SITES",
            help="Number of sites, or names separated by commas; 0: as many as the method's quick job has (the default "
            "of run, unless --data names them); all: every connected one (the default of export).",
        ),
    ] = None,
    task: Task = None,
    paper: Paper = None,
    train_like: Annotated[
        str | None,
        typer.Option(
            "--train-like",
            metavar="METHOD",
            help="Task, network, data and local training of this method, so that the two can be compared.",
            autocompletion=completion.methods,
            rich_help_panel=TRAINING,
        ),
    ] = None,
    settings: Settings = None,
    task_file: TaskFile = None,
    method_file: MethodFile = None,
    monai_bundle: MonaiBundle = None,
    timeout: Annotated[
        float, typer.Option(metavar="S", help="Seconds a phase may take.", rich_help_panel=SITES_THAT_FAIL)
    ] = 3600.0,
    **of_run: Any,
) -> RunRequest:
    """Return what the options ask of a run; ``sites`` is ``"default"`` where the option is not given."""
    from fairflare.methods.base.catalog import get_method

    given = {name: value for name, value in of_run.items() if value is not None}
    return RunRequest.make(
        method=get_method(method).name, task=task, train_like=train_like, task_file=task_file,
        sites="default" if sites is None else parse_sites(sites), settings=parse_settings(settings),
        monai_bundle=monai_bundle, **which_paper(paper), **{**usual_waits(phase_timeout=timeout), **given},
    )  # fmt: skip


def run_options(command: str) -> list[inspect.Parameter]:
    """Return the parameters of a command for settings of the run that have an option, see :class:`ByOption`."""
    usual, hints = RunSettings(), get_type_hints(RunSettings)
    defaults = {
        name: getattr(usual, name) if option.default is SAME else option.default
        for name, option in BY_OPTION.items() if option.help and option.only in ("", command)
    }  # fmt: skip
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default,
            annotation=Annotated[hints[name] | None if default is None else hints[name], option_of(name)],
        )
        for name, default in defaults.items()
    ]  # fmt: skip


def takes_plan(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that describe a run to a command, which gets them as the argument ``request``."""
    of_run = run_options(command.__name__)
    shared = [p for p in inspect.signature(plan_options).parameters.values() if p.kind is not p.VAR_KEYWORD]
    own_parameters = [p for p in inspect.signature(command).parameters.values() if p.name != "request"]
    first = {p.name for p in (*shared, *of_run)}

    @wraps(command)
    def run(**given: Any) -> None:
        with user_errors():
            request = plan_options(**{key: given.pop(key) for key in first})
        command(request=request, **given)

    hints = get_type_hints(command, include_extras=True) | get_type_hints(plan_options, include_extras=True)
    parameters = [
        *[p.replace(kind=p.KEYWORD_ONLY, annotation=hints[p.name]) for p in (*shared, *own_parameters)],
        *of_run,
    ]
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def value_of(text: str) -> Any:
    """Return the value of a text that a user wrote: parsed as JSON if possible, else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def parse_settings(items: Sequence[str] | None) -> dict[str, Any]:
    """Parse ``["clip_max=0.99"]`` into ``{"clip_max": 0.99}``, see :func:`parse_pairs`."""
    return parse_pairs(items or (), "--set wants KEY=VALUE", "--set", "; give it once")


def parse_pairs(items: Iterable[str], wants: str, whose: str, remedy: str = "") -> dict[str, Any]:
    """Parse items of the form ``KEY=VALUE``; values are JSON where they parse, else text.

    Args:
        items: texts of a user.
        wants: beginning of the message that an item has not this form.
        whose: what the user gave, for the message that a key is given twice, which ends with ``remedy``.

    Raises:
        ValueError: an item has no ``=``, or a key is given twice.
    """
    parsed: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        refuse({
            f"{wants}, got {item!r}": not equals or not key.strip(),
            f"{whose} gives {key.strip()!r} twice{remedy}": key.strip() in parsed,
        })  # fmt: skip
        parsed[key.strip()] = value_of(text)
    return parsed
