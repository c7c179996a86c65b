"""``docs/privacy.md``: what leaves a site and what it is told, made from the declared fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from fairflare.core.checks import in_words
from fairflare.core.settings import build
from fairflare.core.task import Metric, Task
from fairflare.exchange.messages import TASK_ANCHOR, TASK_CHECK, TASK_NORMS, TASK_TRAIN, TASK_VALIDATE
from fairflare.federation import check, norm_moments
from fairflare.federation.leaving import METRICS_BY_CLASS, MIN_CASES, TRAINS_BELOW
from fairflare.federation.plan import TASKS_BY_KIND, load_task_class
from fairflare.federation.replies import COUNTS, MAX_REASON, STATS
from fairflare.federation.sampling import SAMPLING
from fairflare.methods.catalog import Method, all_methods
from fairflare.methods.crt import ClassifierAverage
from fairflare.methods.reports import Field
from fairflare.methods.rule import anchor_fields

Row = tuple[str, ...]
#: Which answers a declared value is in, where it is not in all.
WHEN = {
    "train_loss": TASK_TRAIN, "epoch_losses": TASK_TRAIN, "synthetic": TASK_TRAIN, "num_steps": TASK_TRAIN,
    "trained_metric": TASK_TRAIN,
    **dict.fromkeys(("resampled", "drawn_units", "num_units", *(field.name for field in SAMPLING)), TASK_VALIDATE),
    "num_samples": f"{TASK_TRAIN}, {TASK_NORMS}, {TASK_VALIDATE}",
}  # fmt: skip
EVERY = "every answer"
#: What stands around the declared values in an answer: by the keys of :func:`encode_reply`'s message.
ENVELOPE: dict[str, Row] = {
    "params": (
        TASK_TRAIN,
        "the update: for each tensor of the model that does not stay at the site, also the running statistics of its "
        "norms, the trained minus the received one",
        "finite, of the received model's names and shapes",
        "the most of all: training images can be guessed from updates, more so the fewer images and steps are behind "
        "them; whether an image was among them can be tested, and how often each class occurs estimated",
        "FLARE's filters blur it or take tensors out; what stays by the job: see below",
    ),
    "current_round": (EVERY, "the round that was asked about", "an integer", "", ""),
    "version": (EVERY, "version of fairflare", "a text", "", ""),
    "status": (EVERY, "`ok`, `skipped` or `failed`", "exactly one of these", "", ""),
    "reason": (EVERY, "why not `ok`, see below", f"cut to {MAX_REASON} printable characters", "see below", ""),
}
HOLDERS = ("metrics", "report", "stats")  # keys whose content is declared field by field
#: What a site is sent besides the model and the method's directives: by the keys of :func:`encode_task`'s message.
TOLD = {
    "version": "version of fairflare at the server",
    "experiment": "id of the experiment, as the job names it",
    "run": "id that all jobs of one run of an experiment share",
    "seed": "seed of the experiment, the same for all sites",
    "current_round": "the round, from 0",
    "num_rounds": "how many there will be",
    "measure": "in `validate`: on which splits (test, and for the last model validation; of that model the site also "
    "says how far chance moves its primary metric); or on `test_global` alone",
    "resample": "in `validate`: on how many draws of the test images the primary metric is measured too (`bootstrap`)",
    "min_cases": "what is of fewer cases stays at home, unless the site's own number is larger anyway",
    "anchor_as": "in `train` and `anchor`: in which form the average of the local models comes (`model`, `bf16`, "
    "`difference`)",
    "directives": "what the method tells the sites, see below; in `norms`: which norms are done (`done`), the "
    "question's number in the round (`exchange`), whether all norms are meant at once (`one_pass`); "
    "in `train`: whether the site is to measure the model that it trained, too (`measure_trained`), see `suspects`",
}


def page() -> str:
    """The whole page, in Markdown.

    Raises:
        ValueError: a declared field has no ``doc`` (names it).
    """
    parts = [HEAD, *_all_methods(), *_methods(), *_stays(), *_tasks(), REASONS, *_told(), FLARES, PROTECTION]
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------------ tables


def field_row(field: Field, when: str) -> Row:
    """A declared value as a row of a table.

    Raises:
        ValueError: it does not say what it is.
    """
    if not field.doc:
        raise ValueError(f"field {field.name!r} has no doc=...; say in one phrase what leaves the site")
    floor = f"`{MIN_CASES}`" if field.of and MIN_CASES not in field.keep else ""
    keep = "; ".join(text for text in (field.keep, floor) if text)
    return (f"`{field.name}`", _code(when), field.doc, field.range(), field.reveals, keep)


def _metric_row(metric: Metric) -> Row:
    range_ = in_words(metric.low, metric.high)
    keep = f"`{METRICS_BY_CLASS}`, `{MIN_CASES}`" if metric.by_class else f"`{MIN_CASES}`"
    return (f"`{metric.family or metric.name}`", metric.doc, range_, metric.reveals, keep)


def _table(head: Sequence[str], rows: Iterable[Row]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["", *("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines), ""]


def _code(when: str) -> str:
    return when if when == EVERY else ", ".join(f"`{name}`" for name in when.split(", "))


FIELDS = ("field", "in", "what it is", "range", "what it may reveal", "kept at home by")


# ------------------------------------------------------------------------------------------------ sections


def _all_methods() -> list[str]:
    rows: list[Row] = [(f"`{name}`", _code(row[0]), *row[1:]) for name, row in ENVELOPE.items()]
    rows += [field_row(f, WHEN.get(f.name, EVERY)) for f in (*COUNTS, *STATS)]
    rows.append((
        "`metrics`", f"`{TASK_TRAIN}`, `{TASK_VALIDATE}`",
        "how good the received model, with what stays at the site, is on the validation split, and the final one on "
        "the test split and on each further test list, whose name stands in front; the last one on the validation "
        "split too",
        "see the tasks", "see the tasks", f"those by class: `{METRICS_BY_CLASS}`; of too few cases: `{MIN_CASES}`",
    ))  # fmt: skip
    asked = [field_row(field, TASK_CHECK) for field in check.FIELDS]
    norms = [field_row(field, TASK_NORMS) for field in norm_moments.FIELDS]
    return ["## With every method", *_table(FIELDS, rows), CHECK, *_table(FIELDS, asked), NORMS, *_table(FIELDS, norms)]


def _methods() -> list[str]:
    lines = ["## What a method asks for besides", "", "In `report`. The server's half of the method declares it.", ""]
    methods = sorted(all_methods().values(), key=lambda m: (m.rule.__name__, m.name))
    without: list[Method] = []
    for _, group in groupby(methods, key=lambda m: m.rule):
        same = list(group)
        rule = same[0].rule
        rows = [field_row(f, TASK_TRAIN) for f in rule.report_fields]
        rows += [field_row(f, TASK_ANCHOR) for f in anchor_fields(rule)]
        if not rows:
            without += same
            continue
        lines += [f"### {_titles(same)}", *_table(FIELDS, rows)]
    return [*lines, f"Nothing besides: {_titles(without)}.", ""]


def _stays() -> list[str]:
    """What stays at a site by the method, or by a setting of every method."""
    rows: list[Row] = [
        (f"{m.title} (`{m.name}`)", doc) for m in all_methods().values() if (doc := build(m.training, m.site).home.doc)
    ]
    rows.append((
        "every method with `norm_statistics=site`", "running means, variances and counters of the norms that have them"
    ))  # fmt: skip
    return ["## What of the model stays at a site", "", STAYS, *_table(("job", "what stays"), rows)]


def _titles(methods: Iterable[Method]) -> str:
    return ", ".join(f"{m.title} (`{m.name}`)" for m in methods)


def _tasks() -> list[str]:
    lines = ["## The metrics of a task", "", METRICS]
    head = ("metric", "what it is", "range", "what it may reveal", "kept at home by")
    for kind, file in TASKS_BY_KIND.items():
        task: Task = load_task_class(file)(**EXAMPLES.get(kind, {}))
        rows = dict.fromkeys(_metric_row(metric) for metric in task.declared_metrics())
        lines += [f"### {kind.capitalize()}", *_table(head, rows)]
    return [*lines, "### MONAI bundle", "", BUNDLE, ""]


def _told() -> list[str]:
    lines = ["## What a site is told", *_table(("key", "what it is"), [(f"`{k}`", v) for k, v in TOLD.items()])]
    lines += [MODELS, ""]
    told: dict[tuple[str, str], list[str]] = {}
    for method in all_methods().values():
        for name, doc in method.rule.directive_docs.items():
            told.setdefault((f"`{name}`", doc), []).append(f"`{method.name}`")
    rows = [(", ".join(names), *directive) for directive, names in told.items()]
    rows += [("any, with `crt_rounds`", f"`{name}`", doc) for name, doc in ClassifierAverage.directive_docs.items()]
    lines += [SCRIPTS, ""]
    return [*lines, "A method's directives:", *_table(("method", "directive", "what it is"), rows)]


#: So that a table has the metrics by class; those by group leave where each has several classes.
EXAMPLES: Mapping[str, Mapping[str, object]] = {
    "segmentation": {"num_classes": 2},
    "classification": {"phantom": "endoscopy"},
}

# ------------------------------------------------------------------------------------------------ prose

HEAD = """# Privacy: what leaves a site

<!-- Made by `make refresh` (`fairflare privacy`) from the declared fields; edit those. A test compares. -->

Field by field: what leaves a hospital, when, in which range, what it may reveal, and which setting keeps it at home.
A method's own code sends nothing else: a test runs every method and looks at each key that leaves. The server refuses
a value out of its range and never reads an undeclared one.

No image, mask, label, file name, path or patient's identifier is among it. That does not make it harmless: read the
column "what it may reveal". A server that means harm chooses the model and the job, so read it with that server in
mind. "Kept at home by" names a setting of the site's `local/fairflare.json`, or of the job: that one is not the
site's to set, but the site can refuse the job. An empty cell: nothing keeps it at home. A
[script of your own](own_script.md) that trains with `fairflare.client.Site` sends the same fields, filled by the same
code, and the metrics that it measures itself; its switches are `client.Site(metrics_by_class=False)` and
`client.Site(min_cases=5)`.
What else a script sends is its own affair.
"""

STAYS = """By the job's method: a site that wants it accepts such jobs only. It is kept in the site's state folder, as
private as the data, and is in no message; the server sends its own, untrained values in its place. Metrics are then of
the site's own model: measured with what stays. Where tensors stay, `submit_model` is refused whatever the site's file
says. A tensor that a site sends all the same is not used, and the server's log says so."""

METRICS = f"""Of the received model on the validation split in each round, and of the final model on the test split.
With further test lists (`test_<name>` in the datalist) each is there once more as `<name>/<metric>`: the names of the
lists leave too. The list `test_global` is asked for by itself, of the model that all sites share, and only of one site
where several have the same: the answer has the fields of a `validate`, which are then of this list. `{MIN_CASES}` and
`{METRICS_BY_CLASS}` hold for it, too.

`{METRICS_BY_CLASS}`: false in a site's `local/fairflare.json` keeps its metrics by class at home, in every round and
in the final test; the primary metric and the loss always leave. Of a task of your own, every metric then stays at
home that the task does not declare (`declared_metrics`). The run's tables name the sites that do so, and show `-` for
them. No method needs these metrics. What it does *not* hide:

- How often each class occurs can be estimated from the update of the last layer; the fewer steps, the better.
- A server that sends a model which always answers one class reads off the share of that class from `accuracy`.
- With two classes, the remaining figures together nearly give the two recalls.
- The number of test cases, and of a metric that is a mean over images how their scores are distributed, leave. The
  number of test images of each class stays at home, and so does the standard error of a metric over classes: such a
  site has no interval in the results.
- Means over a group (`head`, `medium`, `tail`, `all`) leave, unless a group has one class or one class has no group.
  They tell whether the site has any class of the group.

## Too few cases

`{MIN_CASES}` in a site's `local/fairflare.json`: of a split with fewer cases, and of a class in it, nothing leaves.
A case is a patient where the datalist names patients (`patient`), else a volume, else an image. Default: 1, so
everything leaves; a kit of our `SitePolicyBuilder` says 5. A job may set `{MIN_CASES}` too; the larger number counts,
so a job can only raise it. Every answer of a site goes through this gate. What stays is named (`suppressed`): it is
neither 0 nor undefined, and tables, CSV files and pages say so.

- Of a split with too few cases: every metric, loss, draw and reported value, its number of images. Of the training
  split the update, `num_samples` and `num_steps` leave all the same, or the site could not take part;
  `"{TRAINS_BELOW}": false` keeps the site out of the training then. It is still tested.
- Of a class with too few cases: its metrics, its gradients (CReFF), its part in Fed-MAS's rescue factor and in FedMRL's
  entropy, and the numbers of test images of all classes. None counts as too few, so a name in `suppressed` does not
  tell whether the site has the class. As the mean over all classes leaves, a class that is alone in staying could be
  solved for: the ones with the fewest cases join it until two classes with `{MIN_CASES}` cases together stay. Means
  over groups stay too where a class has a few, and the draws and the standard error of a metric over classes. That
  these stay, or that a class has joined, tells that a class has a few; that they leave, that it has none.
- A metric by class of a task that does not say which class it is about (`Metric.of_classes`) stays where any class has
  too few, or nobody can count its cases: of a MONAI bundle, or of a script's validation and test images, always.
- A method goes on without what stays as without a report that is missing: the others' mean in its place, or the site is
  left out of the phase, by name.

What it does *not* do: it bounds no update. It does not look at differences between lists: where `test` and
`test_<name>` differ in one case, their metrics tell it.
"""

BUNDLE = (
    "The bundle's own metric, `dice` or `iou` (the mean, always) and `dice_<class>` or `iou_<class>` where it names\n"
    "several structures (kept at home by `metrics_by_class`), in [0, 1], and `loss`. What a structure's value may\n"
    "reveal is as in a segmentation; a structure that no mask of the site has is not there."
)

REASONS = f"""## When a task fails

`reason` is a sentence for the server: at most {MAX_REASON} characters of it are shown. It may name the site, the
task, the split, the number of an entry in the datalist and its key (`image`, `label`, `slice`), a key of
`local/fairflare.json` (and the value of `device`, `num_threads`, `isolate`, `precision`, `channels_last`, `compile`,
`deterministic`, `{METRICS_BY_CLASS}`, `{MIN_CASES}` or
`{TRAINS_BELOW}` when it is not usable), a tensor, an operation of PyTorch, a loss that is not
finite, the signal that ended a task's process, or the kind of an exception. It names no file, path, value of an image
or text of an unforeseen exception; those stand in the site's own log. That an image is damaged, larger than
`max_image_bytes` or has no mask is said without saying which.
"""

CHECK = """Before the first round of a job each site is asked what it has (`check`); no model is sent. In its `report`:
"""

NORMS = """With `norm_statistics` `recalibrated` ([norm_statistics.md](norm_statistics.md)), a setting of the job, each
site is asked after each aggregation for the moments of its batch norms' inputs over its training images (`norms`). In
its `report`:
"""

MODELS = """The model: in `train` and `validate` the global one (methods in which every site is sent another part of a
round's change, CFFL and CGSV, send the first model of all, and then a site's own part of the last change); in `anchor`
(two-phase methods) the plain mean of this round's local models, or what it differs by from the global one; in `norms`
the new global model, then the pooled statistics of its norms. What a site can learn from it of the others: the global
model holds something of all; with two sites, the mean minus its own model is the other's model. Sites are not told
each other's metrics or reports, but for what follows."""

SCRIPTS = """A site that trains with a [script of its own](own_script.md) is also told the method's site half: the name
of its class and its settings (`training`)."""

FLARES = """## What FLARE sends by itself

No setting of FairFlare changes it.

- Each message carries the site's name, FLARE's ids and times. A client tells the server its host and process at the
  start.
- **Logs.** With FLARE's default a site streams its job's log to the server while the job runs, and uploads its error
  log (`ERRORLOG_<site>` in the job store). FairFlare's lines there name files and paths when data cannot be read. Set
  `"allow_log_streaming": false` in the site's `local/resources.json`; kits of our `SitePolicyBuilder` have it.
- Keys of `local/resources.json` that FLARE does not know go to the server and to all sites. Private settings belong
  into `local/fairflare.json`, which nobody sends.
- FLARE's cross-site evaluation, where a job has it ([recipes.md](recipes.md)): for each model that it names, a site
  answers `validate` with the metrics of its test split, those by class as `metrics_by_class` says; of that model as it
  came, without what the site has of its own. `submit_model` asks
  for the site's local model, which FLARE then sends to *all other sites*: whoever has both models of a round can guess
  at images as from an update, and need not be the server. Refused unless the site's `local/fairflare.json` says
  `"submit_model": true`; only a job with that evaluation has the task at all.
- TensorBoard: a site sends no events. The server writes the curves (`tb_events`) from what is listed above: training
  loss, primary metric, weights and single numbers of the reports, by site. Whoever may download the job has them, and
  `results.json`, where all metrics are. A job may have the server send the same curves to an MLflow store
  ([results.md](results.md#mlflow)): whoever may read that has them, too.
"""

PROTECTION = """## What protects what

| | update | metrics, report, counts | reason | log |
| --- | --- | --- | --- | --- |
| declared and bounded (always) | names, shapes, finite | yes | cut, cleaned | |
| FLARE's stock filters in `privacy.json` (PercentilePrivacy, SVTPrivacy, ExcludeVars) | yes | no | no | no |
| FLARE's `DXOBlocker` | blocks an answer as a whole | blocks an answer as a whole | no | no |
| `metrics_by_class` | | metrics by class | | not written at the default level |
| `min_cases` | | of splits and classes with too few cases | | |
| `allow_log_streaming` | | | | yes |

FLARE's filters look at the tensors of an answer: no stock filter touches a loss, a score or a count, and an answer
about the anchor has nothing else. How they work with FairFlare: [deployment.md](deployment.md). What stays in a
site's state folder ([architecture.md](architecture.md)) includes models trained on its data: keep it as private as
the data.

A site whose `local/fairflare.json` names an `examples_folder`
([predict.md](predict.md#best-median-and-worst-image-of-a-site)) gets pictures of three of its own test images there
after the final test. No job can ask for them. They are written by the site's process, are in no answer (a test
compares the answers with and without), and neither path nor content is in a line of the log, unless the folder cannot
be written: then its name is in the site's log.
"""
