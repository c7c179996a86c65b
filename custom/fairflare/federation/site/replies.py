"""Declare and read the fields that a site's reply has besides its model, whatever the method."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from re import Pattern
from typing import Any

from fairflare import __version__
from fairflare.base.checks import MAX_SAMPLES, first_of, group_by_key, is_number, printable, refuse_if
from fairflare.base.site_data import UNLABELLED
from fairflare.base.task import Metric
from fairflare.core.cells import SUPPRESSED as WITHHELD
from fairflare.core.cells import UNDEFINED, Cell
from fairflare.core.fairness import declared_as
from fairflare.exchange.messages import CELL, STATUS_OK, Message, same_version
from fairflare.federation.site import clinical, groups
from fairflare.federation.site.sampling import SAMPLING
from fairflare.methods.base.reports import (
    MAX_TEXT,
    NO_IMAGES,
    SUPPRESSED,
    TRAINING,
    VALIDATION,
    Field,
    ReportError,
    read_report,
    shorten_value,
)
from fairflare.methods.parts.consistency import SHARE, WITHOUT_LABELS
from fairflare.privacy.policy import EPSILON, LAST_LINE, PRIVACY

AT_HOME = "classes_at_home"  # key in a reply's stats: true where metrics by class are withheld
RESAMPLED = "resampled"  # key in a reply's stats: values of the primary metric on draws of the test images
DRAWN_UNITS, NUM_UNITS = "drawn_units", "num_units"  # keys in a reply's stats: kind of units, and number
#: Prefixes of the names in a reply's ``suppressed``: the part of the reply from which a value is withheld.
IN_REPORT, IN_STATS = "report/", "stats/"
MAX_METRICS = 1000  # largest number of metrics in a reply
OF_TRAINING, OF_TEST = re.compile("validation"), re.compile("validation|test|test_.*")  # splits that are measured
MAX_NAMES = 40_000  # largest number of characters in the names of a reply's metrics together
METRIC_NAME = re.compile(r"[A-Za-z0-9_/.-]+")
SHA256 = re.compile(r"[0-9a-f]{64}")
#: Fields of a reply's ``stats``: values for the results, which a site sends besides the report for the rule.
STATS = (
    Field(
        "train_loss", nan_ok=True, infinite_ok=True, required=False,
        doc="mean training loss of the last epoch", of=TRAINING,
    ),
    Field(
        "epoch_losses", "vector", nan_ok=True, infinite_ok=True, required=False,
        doc="mean training loss of each epoch", of=TRAINING,
    ),
    Field(
        "seconds", low=0, required=False,
        doc="how long the task took",
        reveals="the site's hardware, and with it roughly the number of images", of=NO_IMAGES,
    ),
    Field("synthetic", "flag", required=False, doc="whether the data are made up", of=NO_IMAGES),
    Field(
        AT_HOME, "flag", required=False,
        doc="there, and true, where metrics by class stay at home", of=NO_IMAGES,
    ),
    Field(
        SUPPRESSED, "names", required=False,
        doc="names of what else stays at home for too few cases (`min_cases`): of all that could be there, so that a "
        "name does not tell whether there is anything",
        reveals="that a split, or a class in it, has fewer cases than `min_cases`; of a class perhaps none",
        of=NO_IMAGES,
    ),
    Field(
        RESAMPLED, "vector", low=0, high=1, nan_ok=True, required=False,
        doc="with `bootstrap`: the primary metric on so many draws of the test patients or images with replacement",
        reveals="with as many draws as test images, the metric of each single image can be solved for",
        keep="of a metric over classes: `metrics_by_class`", of=("test",),
    ),
    Field(
        SHARE, low=0, high=1, required=False,
        doc="with `unlabelled=consistency`: share of the pseudo-labels that counted; 1 with a mean teacher",
        reveals="how sure the model is of the unlabelled images", of=(UNLABELLED,),
    ),
    Field(
        WITHOUT_LABELS, "flag", required=False,
        doc="with `unlabelled=consistency`: there, and true, of a site without a labelled training image", of=NO_IMAGES,
    ),
    Field(
        EPSILON, low=0, required=False,
        doc=f"with the site's `{PRIVACY}`: what its cases have spent, with this round; made of numbers of steps alone",
        of=NO_IMAGES,
    ),
    Field(
        LAST_LINE, "text", required=False,
        doc="beside it: SHA-256 of the last line of its ledger, which the server shows it later",
        of=NO_IMAGES,
    ),
    *SAMPLING,
    *groups.FIELDS,
    *clinical.FIELDS,
    Field(
        DRAWN_UNITS, "text", required=False,
        doc="beside `resampled`: what was drawn, `patients`, `volumes`, `images` or, where only some images name a "
        "patient or volume, `cases`",
        keep="as `resampled`", of=("test",),
    ),
    Field(
        NUM_UNITS, "whole", low=1, high=MAX_SAMPLES, required=False,
        doc="beside `resampled`: how many of these the test split has",
        reveals="the number of test patients",
        keep="as `resampled`", of=("test",),
    ),
    Field(
        "tuned_steps", "whole", low=0, high=MAX_SAMPLES, required=False,
        doc="with `personalise=finetune`: after how many steps the site's own model was the best on its validation "
        "split; 0: no step helped, or that split is too small to tell", of=(*TRAINING, *VALIDATION),
    ),
    Field(
        "tuned_passes", "whole", low=0, high=MAX_SAMPLES, required=False,
        doc="beside it: passes over the training images that were tried", of=(*TRAINING, *VALIDATION),
    ),
    Field(
        "tuned_before", required=False, doc="beside it: primary metric of the common model on the validation split",
        of=VALIDATION,
    ),
    Field(
        "tuned_after", required=False, doc="beside it: of the own model", of=VALIDATION,
    ),
    Field(
        "own_gain", "vector", nan_ok=True, required=False,
        doc="beside it: the primary metric of the common and of the own model on the same test images, what the own "
        "one gains, the ends of the gain's 95 % interval over patients, its p-value, and its standard error",
        keep="of a metric over classes: `metrics_by_class`", of=("test",),
    ),
    Field(
        "state_lost", "text", required=False,
        doc="what the site had kept of earlier rounds and could not use", of=NO_IMAGES,
    ),
)  # fmt: skip
COUNTS = (
    Field(
        "num_samples", "whole", low=1, high=MAX_SAMPLES, required=False,
        doc="number of training images; in `validate` of test images",
    ),
    Field(
        "num_steps", "whole", low=0, high=MAX_SAMPLES, required=False,
        doc="optimizer steps of this round; for FLARE's controllers it also stands under `NUM_STEPS_CURRENT_ROUND`",
        reveals="with the job's batch size the number of images",
    ),
)  # fmt: skip


def read_head(site: str, message: Message, current_round: int) -> Mapping[str, Any]:
    """Check version, status and round of a reply; return its ``meta``.

    Raises:
        ReportError: the site has another version, the status is not exactly ``"ok"`` (the text gives the site's own
            reason), or the reply belongs to another round.
    """
    meta = message.meta
    if not isinstance(meta, Mapping):
        raise ReportError(f"site {site!r}: the message carries no fairflare part, got {shorten_value(meta)}")
    version, status, reason, answered = *map(meta.get, ("version", "status", "reason")), message.current_round
    ready = isinstance(status, str) and status == STATUS_OK
    text = printable(reason) if isinstance(reason, str) and reason.strip() else ""
    if problem := first_of({
        f"site {site!r} answers with fairflare {shorten_value(version)}, the server has {__version__}":
            not isinstance(version, str) or not same_version(version),
        _quote(site, text): not ready and bool(text),
        f"site {site!r}: field 'status' must be {STATUS_OK!r}, got {shorten_value(status)}": not ready,
        f"site {site!r} answered for round {shorten_value(answered)}, asked for round {current_round}":
            answered is not None and not (isinstance(answered, int) and answered == current_round),
    }):  # fmt: skip
        raise ReportError(problem)
    return meta


def read_stats(site: str, meta: Mapping[str, Any], primary: Metric | None = None) -> dict[str, Any]:
    """Return the checked fields of a reply's ``stats``, ``None`` for an absent one.

    Args:
        site: name of the site that sent the reply.
        meta: the reply's ``meta``.
        primary: the primary metric, whose range is that of its values on resampled test images; ``None`` for [0, 1].

    Raises:
        ReportError: a value is of the wrong kind (names site, field and value).
    """
    of_draws: dict[str, Any] = {} if primary is None else {"low": primary.low, "high": primary.high}
    fields = [replace(field, **of_draws) if field.name == RESAMPLED else field for field in STATS]
    values = read_report(meta.get("stats"), fields, site, "stats")
    last = values[LAST_LINE]
    refuse_if(site, {
        f"field {LAST_LINE!r} must be the 64 digits of a SHA-256, got {shorten_value(last)}":
            last is not None and not SHA256.fullmatch(last),
    })  # fmt: skip
    return values


def list_suppressed(stats: Mapping[str, Any], what: str) -> list[str]:
    """Return the names of the values that a site withholds because of too few cases, from its reply's ``stats``.

    ``what`` is the prefix of the part of the reply that is meant, such as :data:`IN_REPORT`.
    """
    return [name.removeprefix(what) for name in stats[SUPPRESSED] or () if name.startswith(what)]


def read_metrics(
    site: str, rows: Any, declared: Mapping[str, Metric], splits: Pattern[str], *, needed: bool = True
) -> list[Cell]:
    """Return the checked cells of a reply: numbers in their declared range, and reasons for missing ones.

    Args:
        site: name of the site that sent the reply.
        rows: the cells as the site sent them.
        declared: the metrics that the job's task declares, by name.
        splits: pattern of the splits that may be measured.
        needed: whether the reply must have at least one value, or withhold one.

    Raises:
        ReportError: a needed metric is missing, there are too many, or one is not declared or out of range (names
            site, metric, value).
    """
    sent = [] if rows is None else rows
    refuse_if(site, {
        f"metrics must be a list of at most {MAX_METRICS} cells, got {shorten_value(sent)}":
            not isinstance(sent, list) or len(sent) > MAX_METRICS or not all(isinstance(row, Mapping) for row in sent),
    })  # fmt: skip
    columns = [[row.get(column) for column in CELL] for row in sent]
    names = [part for metric, split, _, _ in columns for part in (metric, split)]
    odd = [n for n in names if not isinstance(n, str) or len(n) > MAX_TEXT or not METRIC_NAME.fullmatch(n)]
    size = sum(len(str(name)) for name in names)
    refuse_if(site, {
        f"a metric is called {shorten_value(next(iter(odd), ''))}; a name has letters, digits, '_', '/', '.' and '-', "
        f"at most {MAX_TEXT}": bool(odd),
        f"the names of its metrics have {size} characters, more than {MAX_NAMES}": size > MAX_NAMES,
    })  # fmt: skip
    cells: dict[tuple[str, str], Cell] = {}
    for name, split, value, reason in columns:
        metric, shown, missing = declared_as(name, declared), shorten_value(value), value is None
        refuse_if(site, {
            f"metric {name!r} was measured on {split!r}, which nobody asked for": not splits.fullmatch(split),
            f"metric {name!r} comes twice": (split, name) in cells,
            f"metric {name!r} has an unknown reason, {shorten_value(reason)}":
                reason is not None and not (isinstance(reason, str) and reason in (UNDEFINED, WITHHELD)),
            f"metric {name!r} must be a finite number or a reason, got {shown}": missing == (reason is None),
            f"metric {name!r} must be a finite number, got {shown}": not missing and not is_number(value),
        })  # fmt: skip
        refuse_if(site, {
            f"metric {name!r} is not declared by the job's task": not missing and metric is None,
            f"metric {name!r} must lie in {metric.range if metric else ''}, got {shown}":
                not missing and metric is not None and not metric.holds(value),
        })  # fmt: skip
        cells[split, name] = Cell(name, site, split=split, value=None if missing else float(value), reason=reason or "")
    undefined = printable(", ".join(sorted({cell.name for cell in cells.values() if cell.reason == UNDEFINED})))
    why = f" that is finite (not finite: {undefined})" if undefined else ""
    empty = all(cell.reason == UNDEFINED for cell in cells.values())
    refuse_if(site, {f"the answer carries no metric{why}": needed and empty})
    return [] if empty else list(cells.values())


def name_site_in_reason(site: str, reason: str) -> str:
    """Return a site's reason with the name of the site in front, unless it begins with that name already."""
    return reason if reason.startswith(f"site {site!r}") else f"site {site!r}: {reason}"


def _quote(site: str, words: str) -> str:
    """Return a site's reason; where it names another site, mark it as a quotation of this site's words."""
    others = {*re.findall(r"site '([^']*)'", words)} - {site}
    return (
        f"site {site!r} says: {words.removeprefix(f'site {site!r}: ')}" if others else name_site_in_reason(site, words)
    )


def reasons(left_out: Iterable[tuple[str, str]]) -> str:
    """Return one line with the sites that are left out and their reasons; sites with the same reason share one."""
    alike = group_by_key((why.removeprefix(f"site {site!r}: "), (site, why)) for site, why in sorted(left_out))
    texts = []
    for why, sites_and_texts in alike.items():
        site, text = sites_and_texts[0]
        one = text if text.startswith(f"site {site!r}") else f"{site}: {text}"
        texts.append(
            one if len(sites_and_texts) == 1 else f"sites {', '.join(repr(name) for name, _ in sites_and_texts)}: {why}"
        )
    return "; ".join(texts)
