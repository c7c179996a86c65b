"""Run the command ``python -m fairflare.data.preparers NAME ...``, which is the same as ``fairflare prepare``."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import typer

from fairflare.base.cases.census import KEYS, list_unexplained, question
from fairflare.base.disk.files import system_error
from fairflare.base.settings import field_names
from fairflare.cli.options import ExplainingCommand
from fairflare.data.datalist import SPLITS
from fairflare.data.preparers import dealing, preparers
from fairflare.data.preparers.options import TOGETHER, Preparer, option, values_of
from fairflare.data.preparers.writing import MANIFEST, SITE_FILE

INTERRUPTED = 130
PROG = "fairflare prepare"
SHARED = (
    option("out_dir", str, "Folder to write to.", Parameter.empty, "--out", metavar="OUT"),
    option("seed", int, "Of everything random.", 0, min=0),
    option("number", bool, "Call the sites site-1, site-2, ...", False, "--number"),
    option("overwrite", bool, "Replace what an earlier call wrote.", False, "--overwrite"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare one data set, print a summary, and return the exit status.

    Args:
        arguments: arguments of the command line; ``None`` for those of this process.
    """
    try:
        make_app()(args=None if arguments is None else list(arguments), prog_name=PROG)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


class PreparerCommand(ExplainingCommand):
    """Accept lists on the command line both as ``--classes A B`` and as ``--classes A --classes B``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {flag: " " in (param.metavar or "") for param in self.params for flag in param.opts if param.multiple}
        words: list[str] = []
        flag = ""
        for word in args:
            flag = word if word.startswith("--") else flag
            further = flag in lists and word != flag and words[-1] != flag
            if further and lists[flag]:  # this word belongs to the value of the words before
                words[-1] += TOGETHER + word
            else:
                words += [flag, word] if further else [word]
        return super().parse_args(ctx, words)


def make_app() -> typer.Typer:
    """Return a typer app with every preparer as a command."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        help="Makes folders with a datalist for every site of public data sets or your own files (docs/datasets.md).",
    )  # fmt: skip
    for preparer in preparers().values():
        app.command(preparer.name, cls=PreparerCommand, help=preparer.text)(command_of(preparer))
    return app


def command_of(preparer: Preparer) -> Callable[..., None]:
    """Return the command of one preparer: a function whose arguments are the preparer's options."""

    def run(**options: Any) -> None:
        try:
            _prepare(preparer, values_of(given, options))
        except (OSError, ValueError, MemoryError, re.error) as error:
            why = system_error(error, Path(options["out_dir"])) if isinstance(error, OSError) else error
            print(f"{PROG}: {why}", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            print("interrupted; nothing is written", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None

    given = [*preparer.options, *SHARED, *([] if preparer.dealing is None else dealing.options(preparer.dealing))]
    run.__signature__ = Signature(given)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in given}
    return run


def _prepare(preparer: Preparer, given: Mapping[str, Any]) -> None:
    options = dict(given)
    plain = {name: value for name, value in options.items() if name not in ("out_dir", "overwrite", "seed")}
    if preparer.dealing is not None:
        options["dealing"] = dealing.take_options(options, preparer.dealing)
        plain |= {name: getattr(options["dealing"], name) for name in field_names(dealing.Dealing)}
    with counting_files() as progress:
        preparer.prepare(**options, record={"preparer": preparer.name, "options": plain}, progress=progress)
    say(Path(options["out_dir"]), by_name="group" in options)


@contextmanager
def counting_files() -> Iterator[Callable[[int], None]]:
    """Show in a terminal how many files are written; yield the function that takes the number."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(), TextColumn("{task.completed} files"), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        line = bar.add_task("", total=None)
        yield lambda done: bar.update(line, completed=done)


def say(out: Path, by_name: bool = False) -> None:
    """Print the number of each site's images, and what a run needs; ``by_name``: the command has ``--group``."""
    manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    for site, facts in manifest["sites"].items():
        print(f"{site} ({facts['name']}): {', '.join(f'{count} {split}' for split, count in facts['images'].items())}")
    if any("classes" in about for about in manifest["sites"].values()):
        print(f"\nimages of training, validation and test\n{_table(manifest['sites'])}")
    if asked := _silent(out, manifest):
        print(asked)
    unknown = [site for site, about in manifest["sites"].items() if not about["patients"]]
    if unknown and not manifest.get("synthetic"):
        print(
            f"NOTE: no patients are known at {', '.join(unknown)}: split by image: every file counts as a patient of "
            "its own, so those of one person may be in training and in test."
            + " --group finds patients in names of files."
            * by_name
        )
    print(f"In {out}: manifest.json with counts, checksums, versions and the seed.")
    for site, facts in manifest.get("volumes", {}).items():
        properties = (f"{key} {', '.join(facts[key])}" for key in ("spacing", "orientation", "label") if facts[key])
        print(f"{site}: {facts['volumes']} volumes; {'; '.join(properties)}")
    given = (f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in manifest["task"].items())
    print("A run on it needs:", f"--task {manifest['kind']}", *(f"--set {shlex.quote(pair)}" for pair in given))
    print(
        f"Next: {'answer the NOTE on labels, then ' if asked else ''}fairflare check-data {out}, then fairflare run "
        f"METHOD --data {out / 'fairflare.json'} (it takes these from manifest.json)"
    )


def _table(sites: Mapping[str, Any]) -> str:
    """Return a table, as text, of the number of images of each class at each site, its three splits together."""
    import pandas

    table = pandas.DataFrame(
        {site: pandas.DataFrame(facts["classes"])[list(SPLITS)].sum(axis=1) for site, facts in sites.items()}
    )
    table.loc["all"] = table.sum()
    return table.rename_axis("class", axis=1).to_string(line_width=80)


def _silent(out: Path, manifest: Mapping[str, Any]) -> str:
    """Print how many images have each label at each site; return a question on labels that only other sites have."""
    sites = manifest["sites"]
    site_settings = json.loads((out / SITE_FILE).read_text(encoding="utf-8"))["sites"]
    classes = all("classes" in facts for facts in sites.values())
    findings = manifest["task"].get("findings", ())
    named_labels: dict[str, list[str]] = {}
    numbers: dict[str, list[int]] = {name: [number] for number, name in enumerate(findings)}
    explained = [site for site in sites if KEYS[classes or bool(findings)] in site_settings[site]]
    for site, site_facts in sites.items():
        marked = manifest.get("marked", {}).get(site_facts["name"])
        listed = json.loads((out / site / "datalist.json").read_text(encoding="utf-8"))
        if classes:
            named_labels[site] = sorted(
                {name for split in SPLITS for name, n in site_facts["classes"].get(split, {}).items() if n}
            )
            numbers.update({name: [number] for number, name in enumerate(listed.get("class_names", ()))})
        elif findings:
            columns = zip(*(entry["label"] for split in SPLITS for entry in listed[split]), strict=True)
            seen = {
                name: Counter(column) for name, column in zip(findings, columns, strict=False)
            }  # empty if no image is labelled
            named_labels[site] = [name for name, n in seen.items() if n[1]]
            explained += [site] if all(n[1] or not n[0] for n in seen.values()) else []
            print(f"{site}: labels with {', '.join(f'{name}: {n[1]}' for name, n in seen.items()) or 'no finding'}")
        elif marked is not None:
            coding = site_settings[site].get("mask_values", {"255": 1} if {*marked} <= {"0", "255"} else {})
            coded = {value: int(coding.get(value, value)) for value in sorted(marked, key=int)}
            named_labels[site] = list(dict.fromkeys(f"label {label}" for label in coded.values() if label))
            numbers.update({f"label {label}": [label] for label in coded.values() if label})
            print(
                f"{site}: masks with {', '.join(f'{value}: {marked[value]}' for value in coded)}, read as "
                f"{', '.join(map(str, coded.values()))}"
            )
    lacking = list_unexplained(named_labels, explained)
    return f"NOTE: {question(lacking, classes or bool(findings), numbers, str(out / SITE_FILE))}." if lacking else ""


if __name__ == "__main__":
    raise SystemExit(main())
