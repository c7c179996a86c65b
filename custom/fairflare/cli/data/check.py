"""Implement ``fairflare check-data``, which lists all problems of the images of one or several sites at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fairflare.base.checks import group_by_key
from fairflare.cli.data.own_images import choose_prepared_settings, manifest_of
from fairflare.cli.data.sites import file_in, sites_of
from fairflare.cli.options import parse_settings
from fairflare.cli.screen import AsJson, console, errors, one_document, say, user_errors
from fairflare.data.listing.attributes import UNKNOWN

MOST = 20  # largest number of kinds of problems that are printed for a site without --all
QUOTED = re.compile(r"'([^']*)'")


def check_data(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|DIR",
            help="A fairflare.json, a datalist, a site's folder, or a folder of sites as `prepare` writes it.",
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option("--task", help="A kind, such as segmentation; default: as the labels are."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE of the task, such as num_classes=2; may be repeated.")
    ] = None,
    task_file: Annotated[Path | None, typer.Option(help="Python file with a class Task.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every problem, not one for each kind.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every image as training does, and list all problems. The exit code is 1 if training would fail."""
    from rich.progress import Progress

    from fairflare.checking.images import check_sites

    with one_document(as_json) as put:
        with user_errors():
            sites = sites_of(data)
            chosen_task, names = make_task(sites, task, parse_settings(settings), task_file, data)
        with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
            line = bar.add_task("images")
            report = check_sites(
                chosen_task,
                sites,
                lambda done, total: bar.update(line, completed=done, total=total),
                str(file_in(data)),
            )
        remarks = [str(note) for note in manifest_of(data).get("notes", ())]
        if as_json:
            put(
                usable=report.usable, grave=report.grave, problems=[*_kinds(report.problems, every)],
                sites=[_plain_report(site, names) for site in report.sites], labels=report.labels, notes=remarks,
            )  # fmt: skip
        else:
            _print_problems(report.problems, every)
            for site in report.sites:
                _print_counts(site, names)
            for text in filter(None, [report.labels, *(f"prepare noted: {note}" for note in remarks)]):
                _tell(text)
            for root in {str(settings["state_root"]) for settings in sites.values() if settings.get("state_root")}:
                _print_asked(Path(root))
            _tell(
                f"{report.usable} usable images at {len(report.sites)} site(s); {report.grave} problem(s), "
                f"{len(report.problems) - report.grave + len(remarks)} note(s)"
            )
    raise typer.Exit(int(report.grave > 0 or not report.sites))


def make_task(
    sites: Mapping[str, Mapping[str, Any]],
    kind: str | None,
    settings: dict[str, Any],
    task_file: Path | None,
    data: Path | None = None,
) -> tuple[Any, list[str] | None]:
    """Return the task that reads the images, and the names of its classes.

    Without ``kind`` the manifest beside the path ``data`` or, without a manifest, the labels decide the kind of task.
    Without ``num_classes`` a classification has as many classes as the datalists name, else the highest label plus one.
    """
    from fairflare.federation.plan.plan import make_plan
    from fairflare.tasks.images import ImageTask

    labels, names, findings = _labels(sites)
    if kind is None and task_file is None:
        kind = (data and manifest_of(data).get("kind")) or ("classification" if labels or findings else "segmentation")
    if findings:
        settings.setdefault("findings", findings)
    elif kind in ("classification", "volume_classification") and "num_classes" not in settings and (labels or names):
        settings["num_classes"] = max(2, len(names) if names else max(labels) + 1)
        _tell(
            f"num_classes={settings['num_classes']}: {'as the datalists name them' if names else 'the highest label'}"
        )
    plan = make_plan("fed_avg", task=kind, sites=0, settings=settings, task_file=task_file, min_sites=1)
    if task_file is None and (more := choose_prepared_settings(plan, data, settings)):
        plan = make_plan("fed_avg", task=kind, sites=0, settings={**more, **settings}, min_sites=1)
    image_task = plan.task
    if not isinstance(image_task, ImageTask):
        raise ValueError(f"{type(image_task).__name__} is no task on images (fairflare.tasks.images.ImageTask)")
    return image_task, names if image_task.class_labels else None


def _labels(sites: Mapping[str, Mapping[str, Any]]) -> tuple[list[int], list[str] | None, list[str]]:
    """Return all labels that are class numbers, the class names, and the findings, from datalists that can be read."""
    from fairflare.data.datalist import labels_in

    numbers: list[int] = []
    findings: dict[str, None] = {}
    names = None
    for settings in sites.values():
        labels, called = labels_in(settings)  # a datalist's problem is reported when the list is read
        named = called if isinstance(called, list) and all(isinstance(name, str) for name in called) else None
        if any(isinstance(label, list) for label in labels):
            findings |= dict.fromkeys(named or ())
        numbers += [number for number in labels if type(number) is int and number >= 0]
        names = named or names
    return numbers, names, list(findings)


# ------------------------------------------------------------------------------------------------ printing


_tell = partial(say, where=console)


def _kinds(problems: Sequence[Any], every: bool) -> Iterator[dict[str, Any]]:
    """Yield site, text and gravity of each kind of problem of a site, with names of images; ``every``: each problem."""
    from fairflare.data.kinds import group_by_kind

    by_site = group_by_key(((not problem.grave, problem.site), (problem.about, problem.text)) for problem in problems)
    for (note, site), alike in sorted(by_site.items(), key=lambda one: one[0][0]):
        for kind in [[one] for one in alike] if every else group_by_kind(alike):
            yield {"site": site, "text": _describe_kind(kind), "grave": not note}


def _print_problems(problems: Sequence[Any], every: bool) -> None:
    """Print a line for each kind of problem of a site; ``every``: a line for each problem."""
    of_site = group_by_key(
        (f"{'problem' if one['grave'] else 'note'}: {one['site'] or 'all sites'}", one["text"])
        for one in _kinds(problems, every)
    )
    for where, lines in of_site.items():
        most = len(lines) if every else MOST
        for line in (*lines[:most], *[f"{len(lines) - most} more kinds; --all shows them"] * (len(lines) > most)):
            _tell(f"{where}: {line}")


def _describe_kind(problems: Sequence[tuple[str, str]]) -> str:
    """Return the text of the first of several problems of one kind, with the images' names of the other problems."""
    from fairflare.data.kinds import name_first, shorten

    if len(problems) == 1:
        return problems[0][1]
    first = problems[0][1]
    # A problem with a list's entry has no file name of its own: the name is quoted in the problem's text.
    more = [name or next((p for p in QUOTED.findall(text) if p not in first), "") for name, text in problems[1:]]
    return f"{first} -- {len(more)} more such: {name_first([shorten(Path(name)) for name in more])} (--all)"


def _print_counts(report: Any, names: Sequence[str] | None) -> None:
    sizes = [f"{'x'.join(map(str, (size[1], size[0], *size[2:])))}: {n}" for size, n in report.sizes.most_common()]
    more = f" and {len(sizes) - 3} more sizes" * (len(sizes) > 3)
    deep = " x slices" * any(len(size) == 3 for size in report.sizes)
    _tell(f"{report.site}: width x height{deep} {', '.join(sizes[:3]) or '-'}{more}")
    for split, counts in report.counts.items():
        classes = ", ".join(f"{_name(number, names)} {n}" for number, n in sorted(counts.items()))
        _tell(f"  {split}: {sum(counts.values())}" + (f" ({classes})" if None not in counts and counts else ""))
    if None in report.counts.get("training", ()):
        every = range(len(report.labelled)) if report.annotated is None else report.annotated
        marked = [
            f"{name}: {count if k in every else 'not annotated'}"
            for k, (name, count) in enumerate(report.labelled.items())
        ]
        _tell(f"  {'masks that mark' if names is None else 'labels that have'} {', '.join(marked)}")
    if report.prepared[0]:
        needed, limit = (size / 1e9 for size in report.prepared)
        _tell(f"  prepared for training: about {needed:.1f} GB on the site's disk, of decoded_bytes {limit:.1f} GB")
    for attribute, by_split in report.groups.items():
        for split, groups in by_split.items():
            in_words = ", ".join(f"{group} {count}" for group, count in groups.items() if count or group != UNKNOWN)
            _tell(f"  {split} by {attribute}: {in_words}")


def _print_asked(root: Path) -> None:
    """Print a line for the log of each site in a state root: how often it was asked, and about how many models."""
    from fairflare.federation.site.site_state import SENT

    for path in sorted((root / SENT).glob("*.jsonl")):
        lines = list(map(json.loads, path.read_text("utf-8").splitlines()))
        runs, models = ({line[key] for line in lines} - {None} for key in ("run", "model"))
        _tell(
            f"{path.stem}: {len(lines)} answers since {lines[0]['time'][:10]}, in {len(runs)} run(s), about "
            f"{len(models)} model(s): {path}"
        )


def _plain_report(report: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Return a site's usable images by split and class, by size in pixels, and by attribute, split and group."""
    return {
        "site": report.site,
        "counts": {split: {_name(k, names): n for k, n in counts.items()} for split, counts in report.counts.items()},
        "sizes": [{"width": size[1], "height": size[0], "images": n} for size, n in report.sizes.most_common()],
        "groups": report.groups,
    }


def _name(number: int | None, names: Sequence[str] | None) -> str:
    if number is None:
        return "images"
    return names[number] if names and number < len(names) else f"class_{number}"
