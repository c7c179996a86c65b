"""Write what ``fairflare privacy`` prints: all values that leave a site or are sent to it, from declared fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fairflare.base.aspect import ASPECTS, GROUPS, SUMS
from fairflare.base.aspect import SAMPLING as SAMPLED
from fairflare.base.checks import MAX_REASON, group_by_key, refuse
from fairflare.base.settings import build
from fairflare.base.task import Metric
from fairflare.core.plans.counts import Counts
from fairflare.core.plans.document import Answers, plan_of
from fairflare.exchange.messages import (
    TASK_ANCHOR,
    TASK_CHECK,
    TASK_MASK,
    TASK_NORMS,
    TASK_PLAN,
    TASK_TRAIN,
    TASK_VALIDATE,
)
from fairflare.federation.plan.task_files import TASKS_BY_KIND, load_task_class
from fairflare.federation.server import check
from fairflare.federation.server.sums import MASKED
from fairflare.federation.site import case_counts, clinical, groups, norm_moments
from fairflare.federation.site.gate import METRICS_BY_CLASS, MIN_CASES, TRAINS_BELOW
from fairflare.federation.site.replies import COUNTS, STATS
from fairflare.federation.site.sampling import SAMPLING
from fairflare.methods.base.catalog import Method, all_methods
from fairflare.methods.base.reports import Field
from fairflare.methods.base.rule import SendsBeside, anchor_fields
from fairflare.methods.crt import ClassifierAverage
from fairflare.methods.fed_avg import WithoutReports
from fairflare.methods.parts.fine_tuning import DIRECTIVE
from fairflare.privacy.policy import EPSILON, LAST_LINE, PRIVACY

Row = tuple[str, ...]
#: For each declared field that is not in every answer: the tasks whose answers contain it.
WHEN = {
    "train_loss": TASK_TRAIN, "epoch_losses": TASK_TRAIN, "synthetic": TASK_TRAIN, "num_steps": TASK_TRAIN,
    EPSILON: TASK_TRAIN, LAST_LINE: f"{TASK_TRAIN}, {TASK_VALIDATE}",
    **dict.fromkeys(("resampled", "drawn_units", "num_units", *(field.name for field in SAMPLING)), TASK_VALIDATE),
    **dict.fromkeys((field.name for field in (*groups.FIELDS, *clinical.FIELDS)), TASK_VALIDATE),
    **dict.fromkeys(("tuned_steps", "tuned_passes", "tuned_before", "tuned_after", "own_gain"), TASK_TRAIN),
    "num_samples": f"{TASK_TRAIN}, {TASK_NORMS}, {TASK_VALIDATE}",
}  # fmt: skip
EVERY = "every answer"
#: Rows of the table for the parts of an answer around its declared values, by keys of :func:`encode_reply`'s message.
ENVELOPE: dict[str, Row] = {
    "params": (
        TASK_TRAIN,
        "the update: for each tensor of the model that does not stay at the site, also the running statistics of its "
        "norms, the trained minus the received one",
        "the most of all: training images can be guessed from updates, more so the fewer images and steps are behind "
        "them; whether an image was among them can be tested, and how often each class occurs estimated",
        "FLARE's filters blur it or take tensors out; what stays by the job: see below",
    ),
    "current_round": (EVERY, "the round that was asked about", "", ""),
    "version": (EVERY, "version of fairflare", "", ""),
    "status": (EVERY, "`ok`, `skipped` or `failed`", "", ""),
    "reason": (EVERY, f"why not `ok`, cut to {MAX_REASON} printable characters", "see below", ""),
}
#: Texts about what a site is sent besides the model, by the keys of :func:`encode_task`'s message.
TOLD = {
    "version": "version of fairflare at the server",
    "experiment": "id of the experiment, as the job names it",
    "run": "id that all jobs of one run of an experiment share",
    "seed": "seed of the experiment, the same for all sites",
    "current_round": "the round, from 0",
    "num_rounds": "how many there will be",
    "measure": "in `validate`: on which splits (test, and for the last model validation; of that model the site also "
    "says how far chance moves its primary metric); or on `test_global` alone",
    **SAMPLED.fields,
    "min_cases": "what is of fewer cases stays at home, unless the site's own number is larger anyway",
    "exchange": "which tensors travel: `all`, `trainable` or a regular expression",
    "makes": "beginnings of the names of tensors that the method's server makes, which travel too",
    "rest": "SHA-256 over the tensors that do not travel, as the server builds them; a site with others refuses the "
    "task, and its refusal has the first 12 digits of its own: they tell whether its encoder is a file "
    "that the reader knows",
    **GROUPS.fields,
    **SUMS.fields,
    "directives": "what the method tells the sites, see below; whether validation is on fixed patches of volumes "
    "(`patchwise`); in `validate`, where sites annotate different "
    "structures: those that the site's figure is over (`compared`); in `norms`: which norms are done (`done`), the "
    f"question's number in the round (`exchange`); beside `{PRIVACY}` what the site said last of its ledger "
    f"(`{LAST_LINE}`)",
}


def page() -> str:
    """Return the tables of all values in Markdown: ``templates/privacy.md``, with declared values in its tables.

    Raises:
        ValueError: a declared field has no ``doc``; the message names the field.
    """
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("fairflare.federation", "templates"), trim_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    return templates.get_template("privacy.md").render(
        table=_table, fields=FIELDS, metrics_by_class=METRICS_BY_CLASS, min_cases=MIN_CASES, trains_below=TRAINS_BELOW,
        max_reason=MAX_REASON, with_every_method=_all_methods(), stays=_stays(), by_task=_tasks(),
        checked=[field_row(field, TASK_CHECK) for field in check.FIELDS],
        norms=[field_row(field, TASK_NORMS) for field in norm_moments.FIELDS],
        counts=_group_rows((row[1:], row[0]) for row in (field_row(field, TASK_PLAN) for field in case_counts.FIELDS)),
        masked=[field_row(field, TASK_MASK) for field in MASKED],
        told=[(f"`{key}`", meaning) for key, meaning in TOLD.items()], directives=_directives(), **_rows_by_method(),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ tables


def field_row(field: Field, when: str) -> Row:
    """Return the row of the privacy page's table that describes a declared field.

    Raises:
        ValueError: the field has no ``doc``.
    """
    refuse({f"field {field.name!r} has no doc=...; say in one phrase what leaves the site": not field.doc})
    floor = f"`{MIN_CASES}`" if field.of and MIN_CASES not in field.keep else ""
    return (f"`{field.name}`", _code(when), field.doc, field.reveals, "; ".join(filter(None, (field.keep, floor))))


def _metric_row(metric: Metric) -> Row:
    kept_by = [f"`{METRICS_BY_CLASS}`"] * metric.by_class + [f"`{MIN_CASES}`"]
    return (f"`{metric.family or metric.name}`", metric.doc, metric.reveals, ", ".join(kept_by))


def _table(head: Sequence[str], rows: Iterable[Row]) -> str:
    """Return a table in Markdown; a long cell that equals the one above it is written as "as above"."""
    lines = [head, ["---"] * len(head), *(
        [
            "as above" if len(cell) > len("as above") * 4 and cell == over else cell
            for over, cell in zip(*two, strict=True)
        ]
        for two in pairwise([head, *rows])
    )]  # fmt: skip
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(when: str) -> str:
    return when if when == EVERY else ", ".join(f"`{name}`" for name in when.split(", "))


FIELDS = ("field", "in", "what it is", "what it may reveal", "kept at home by")


# ------------------------------------------------------------------------------------------------ sections


def _all_methods() -> list[Row]:
    return [
        *((f"`{name}`", _code(row[0]), *row[1:]) for name, row in ENVELOPE.items()),
        *(field_row(f, WHEN.get(f.name, EVERY)) for f in (*COUNTS, *STATS)),
        (
            "`metrics`", f"`{TASK_TRAIN}`, `{TASK_VALIDATE}`",
            "how good the received model, with what stays at the site, is on the validation split, and the final one "
            "on the test split and on each further test list; the last one on the validation split too: a cell for "
            "each, of `metric`, `split`, and `value` or `reason`: not finite, or withheld, as are then all that could "
            "be there",
            "see the tasks; of a withheld one that few cases have its class, perhaps none",
            f"those by class: `{METRICS_BY_CLASS}`; of too few cases: `{MIN_CASES}`",
        ),
    ]  # fmt: skip


def _rows_by_method() -> dict[str, Any]:
    """Return rows of the values that rules ask for, with their methods; and titles of methods that ask for none."""
    methods = sorted(all_methods().values(), key=lambda m: (m.rule.__name__, m.name))
    by_rule = group_by_key((m.rule, m) for m in methods)
    fields_of = {
        rule: [*((f, TASK_TRAIN) for f in rule.report_fields), *((f, TASK_ANCHOR) for f in anchor_fields(rule))]
        for rule in by_rule
    }
    return {
        "by_method": [(_titles(by_rule[rule]), *field_row(*f)) for rule, fields in fields_of.items() for f in fields],
        "without": _titles(m for m in methods if not fields_of[m.rule]),
    }


def _stays() -> list[Row]:
    """Return rows about tensors that stay at a site because of its method, or of a setting of every method."""
    return [
        *((_titles([m]), doc) for m in all_methods().values() if (doc := build(m.training, m.site).home.doc)),
        *((f"every method with `{choice}`", doc) for one in ASPECTS for choice, doc in one.stays.items()),
    ]


def _titles(methods: Iterable[Method]) -> str:
    return ", ".join(f"{m.title} (`{m.name}`)" for m in methods)


def _group_rows(pairs: Iterable[tuple[Row, str]]) -> list[Row]:
    """Return each row once, preceded by a cell that lists all words paired with this row."""
    return [(", ".join(words), *row) for row, words in group_by_key(pairs).items()]


def _tasks() -> list[Row]:
    """Return a row for each meaning of a metric: all names that it has, and all kinds of task that measure it."""
    by_kind = [
        (row, f"`{kind}`")
        for kind, file in TASKS_BY_KIND.items()
        for row in dict.fromkeys(map(_metric_row, load_task_class(file)(**EXAMPLES.get(kind, {})).declared_metrics()))
    ]
    return _group_rows(((kinds, *rest), name) for kinds, name, *rest in _group_rows(by_kind))


def _directives() -> list[Row]:
    methods = all_methods().values()
    return [
        *_group_rows(
            ((f"`{name}`", doc), f"`{m.name}`") for m in methods for name, doc in m.rule.directive_docs.items()
        ),
        *(
            (f"`{m.name}`", "tensors `beside/*`", m.rule.beside_doc)
            for m in methods if issubclass(m.rule, SendsBeside)
        ),
        *(("any, instead of its own", f"`{name}`", doc) for name, doc in WithoutReports.directive_docs.items()),
        *(("any, with `crt_rounds`", f"`{name}`", doc) for name, doc in ClassifierAverage.directive_docs.items()),
        (
            "any, with `personalise=finetune`", f"`{DIRECTIVE}`",
            "each site fine-tunes a model of its own, and tests it",
        ),
    ]  # fmt: skip


#: Metrics of the example segmentation tasks from which the privacy page lists all metrics that a task may declare.
MASK_METRICS = ("iou", "hd95", "assd", "surface_dice", "volume_error")
AXES = [Counts({32: 1})] * 3  # counts of a made-up case, for which the example of nnU-Net is planned
EXAMPLES: Mapping[str, Mapping[str, object]] = {
    "segmentation": {"num_classes": 2, "metrics": MASK_METRICS},
    "volume_segmentation": {"num_classes": 2, "metrics": MASK_METRICS},
    "classification": {"phantom": "endoscopy"},
    "nnunet": {
        "num_classes": 2, "metrics": MASK_METRICS,
        "plan": plan_of(Answers(AXES, AXES, AXES), channels=["MR"], outputs=3, memory=8),
    },
}  # fmt: skip
