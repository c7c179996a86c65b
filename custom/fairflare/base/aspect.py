"""Declare the aspects of a run: capabilities that concern several of its phases, such as secure sums.

:data:`ASPECTS` is the one table of what each aspect has (settings, tasks, fields of messages, keys of a site's file,
words for ``fairflare privacy``) and of what excludes it. Lists of these names elsewhere are made from it, and
:func:`refusals` reads its rows before the first round, at the server and at a site under differential privacy. A new
aspect is a setting and an entry here; ``tests/federation/test_combinations.py`` then tries it with every other one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Excludes:
    """Describe a choice elsewhere in the run with which an aspect cannot be used.

    Attributes:
        fact: name of a setting, or of a fact about the run (``federation/plan/refusals.py``); a fact that is not known
            excludes nothing.
        text: reason and remedy; facts in braces are replaced by their values.
        but: the values that can be used; all others are excluded.
        values: the values that are excluded; without ``but`` and ``values``: all but 0, false, empty and none.
    """

    fact: str
    text: str
    but: tuple[Any, ...] = ()
    values: tuple[Any, ...] = ()

    def holds(self, facts: Mapping[str, Any]) -> bool:
        """Return whether a run has the choice."""
        value = facts.get(self.fact, self.but[0] if self.but else None)
        return value not in self.but if self.but else value in self.values if self.values else bool(value)


@dataclass(frozen=True)
class Aspect:
    """Declare one aspect of a run.

    Attributes:
        name: the aspect in words.
        on: name of the setting, or of the fact, that switches the aspect on.
        values: values of ``on`` that do so; empty: all but 0, false, empty and none.
        settings: names of its settings of the run.
        copied: whether the setting of the run called ``on`` is not given but copied from the sites' training.
        tasks: names of the server's tasks of its own.
        phases: those of them that are further phases of each round, and measure something on the sites' images.
        fields: fields of its own in the server's tasks, each with words for ``fairflare privacy``.
        site_keys: names of its settings in a site's own file.
        stays: what stays at the sites, for ``fairflare privacy``, by the setting that does it.
        excludes: what it cannot be used with.
    """

    name: str
    on: str
    values: tuple[Any, ...] = ()
    settings: tuple[str, ...] = ()
    copied: bool = False
    tasks: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    site_keys: tuple[str, ...] = ()
    stays: Mapping[str, str] = field(default_factory=dict)
    excludes: tuple[Excludes, ...] = ()

    def is_on(self, facts: Mapping[str, Any]) -> bool:
        """Return whether a run has the aspect."""
        return Excludes(self.on, "", values=self.values).holds(facts)


def _only(name: str, value: Any, why: str) -> Excludes:
    """Return the row by which differential privacy allows one value of a setting."""
    return Excludes(name, f"{name}={{{name}!r}} cannot go with it ({why}); set it to {value!r}", but=(value,))


FINETUNED = ("finetune", "finetune:head", "finetune:norms", "finetune:all")
FACTORS = "set adapters.average=factors"
SUMS = Aspect(
    "secure sums", "secure",
    settings=("secure",),
    tasks=("keys", "mask", "release"),
    fields={
        "sums": "in a run with `secure=sums`: the run's random number; in `keys` all sites' public keys with their "
        "certificates; in `mask` and `release` which sums are asked, with all sites' weights (by class or group), and "
        "after lost rounds the groups of sites in which they are opened",
    },
    site_keys=("secure", "secure_max_weight", "secure_max_exposure", "secure_pins"),
    excludes=tuple(Excludes(fact, "secure={secure!r}: " + text, **limits) for fact, text, limits in (
        ("reads_models", "{rule} cannot go with it: {reads_models}; choose another method", {}),
        ("aggregate", "aggregate={aggregate!r} needs every site's model; leave it out", {"but": ("mean",)}),
        ("revealing_weight", "max_weight={max_weight} would show a site's update; set it to {revealing_weight} at most",
         {}),
        ("keep_local_models", "keep_local_models has nothing to keep; leave it out", {}),
        ("personalise", "personalise={personalise!r} may send a site's own model; leave it out", {"values": FINETUNED}),
        ("unlabelled", "unlabelled weighs sites without a report, which is not built for sums; leave it out", {}),
        ("products", f"adapters.average='product' needs every site's factors; {FACTORS}", {}),
    )),
)  # fmt: skip
PRIVATE = Aspect(
    "differential privacy", "privacy",
    site_keys=("privacy",),
    excludes=(
        Excludes("uncounted", "{uncounted} does not say that its training can be counted; choose fed_avg or fed_prox"),
        Excludes(
            "undeclared", "the task {undeclared} does not say that its images do not see each other in the loss; "
            "choose FairFlare's own 2D tasks, without code of the job",
        ),
        _only("criterion", "task", "class counts have no noise"),
        _only("norm_statistics", "average", "norms would be told"),
        _only("personalise", "", "its choice of steps is not counted"),
        _only("unlabelled", "", "it is not counted"),
        _only("max_grad_norm", None, "'clip' of the site takes its place"),
        Excludes(
            "computes_in", "precision='fp16' scales the loss by what the gradients are; set it to 'bf16' or 'fp32'",
            values=("fp16",),
        ),
        Excludes(
            "batch_norm", "the network has norms over a batch ({batch_norm!r}); choose one with layer, group or "
            "instance norms: network=vit_s for classes, segresnet or swin_unetr for structures",
        ),
        Excludes("no_images", "there is no training image"),
        Excludes(
            "crt_rounds", "crt_rounds={crt_rounds} draws classes in equal parts, which differential privacy (site "
            "{privacy}) cannot count: set crt_rounds=0, or choose fed_avg",
        ),
    ),
)  # fmt: skip
GROUPS = Aspect(
    "groups of people", "groups",
    settings=("groups", "group_bins", "calibration_bins"),
    fields={
        "groups": "in `check` and in `validate` of the last model, where the run asks for groups: names of the "
        "attributes",
        "group_bins": "beside it: bins of the histograms of probabilities",
        "calibration_bins": "beside it: bins of the told class's probability",
    },
    excludes=(
        Excludes(
            "no_outcomes", "groups needs a task with a result for each image, which {no_outcomes} does not have; take "
            "groups out, or choose another task",
        ),
    ),
)  # fmt: skip
NORMS = Aspect(
    "recalibrated norms", "norm_statistics", ("recalibrated",),
    settings=("norm_statistics", "norms_timeout"),
    copied=True,
    phases=("norms",),
    stays={
        "norm_statistics=site": "running means, variances and counters of the norms that have them",
    },
    excludes=(
        Excludes(
            "own_tensors", "norm_statistics='recalibrated' would change nothing: with {training} those of the norms "
            "stay at the sites; leave it at 'average'",
        ),
        Excludes(
            "still_norm", "norm_statistics='recalibrated' measures every batch norm anew, and {still_norm!r} is in a "
            "part of the network that does not travel; set norm_statistics=average, or exchange=all",
        ),
    ),
)  # fmt: skip
FINETUNING = Aspect(
    "fine-tuned own models", "personalise", FINETUNED,
    site_keys=("submit_model",),
    stays={
        "personalise=keep:REGEX": "the tensors whose names the expression finds",
        "personalise=finetune": "a model of the site's own; with `submit_model` true in the site's own file its update "
        "is sent, and the other sites are sent the model to test it",
    },
    excludes=(
        Excludes(
            "own_parts", "personalise={personalise!r} starts from a model that all sites share, and with {training} "
            "and norm_statistics={norm_statistics!r} each site has tensors or a model of its own; leave it out",
        ),
    ),
)  # fmt: skip
RETRAINING = Aspect(
    "extra rounds for the classifier", "crt_rounds",
    settings=("crt_rounds", "crt_epochs", "crt_weights", "crt_mask_absent"),
    excludes=(
        Excludes("headless", "crt_rounds needs a classifier, tensors called 'head.*'; set crt_rounds=0"),
        Excludes("classless", "{whose}crt_rounds needs a classifier; set crt_rounds=0{other}"),
        Excludes(
            "own_models", "with {rule} every site has a model of its own, and there is no common one whose classifier "
            "could be trained; set crt_rounds=0",
        ),
        Excludes("makes_tensors", "{rule} retrains a classifier itself; set crt_rounds=0"),
    ),
)  # fmt: skip
SAMPLING = Aspect(
    "intervals of chance", "bootstrap",
    settings=("bootstrap",),
    fields={
        "resample": "in `validate`: on how many draws of the test images the primary metric is measured too "
        "(`bootstrap`)",
    },
)  # fmt: skip
#: All aspects of a run.
ASPECTS = (
    Aspect(
        "another aggregate than the mean", "aggregate", ("median", "trimmed_mean"),
        settings=("aggregate", "trim"),
        excludes=(
            Excludes("only_mean", "aggregate={aggregate!r} does not go with {rule}: {only_mean}; leave it out"),
        ),
    ),
    Aspect(
        "trim", "trim",
        excludes=(
            Excludes(
                "aggregate", "trim={trim:g} is of aggregate='trimmed_mean', not {aggregate!r}; leave it out",
                but=("trimmed_mean",),
            ),
        ),
    ),
    Aspect(
        "sites' own scripts", "script",
        excludes=(
            Excludes(
                "secure", "secure={secure!r} needs FairFlare's own training at the sites, not a script; leave it out",
            ),
            Excludes(
                "exchange", "exchange={exchange!r}: a script's own loop trains the whole model; set exchange=all",
                but=("all",),
            ),
            Excludes(
                "crt_rounds", "crt_rounds: a script's own loop does not train a classifier alone; set crt_rounds=0",
            ),
        ),
    ),
    RETRAINING,
    Aspect(
        "adapters averaged by their products", "products",
        excludes=tuple(Excludes(fact, f"adapters.average='product' does not go with it: {why}; {FACTORS}", but)
                       for fact, why, but in (
            ("own_models", "{rule} gives every site a model of its own", ()),
            ("moves", "{rule} makes a step of its own from the mean change", ()),
            ("aggregate", "aggregate={aggregate!r} works number by number", ("mean",)),
        )),
    ),
    SUMS,
    GROUPS,
    Aspect(
        "unlabelled images", "unlabelled",
        excludes=(
            Excludes(
                "inconsistent", "unlabelled={unlabelled!r} does not work with {inconsistent}; take a task of "
                "segmentation or classification (one class an image) of FairFlare's own, or leave the setting out",
            ),
        ),
    ),
    NORMS,
    FINETUNING,
    PRIVATE,
    Aspect("common test", "test_global"),
    Aspect("clinical figures", "clinical"),
    SAMPLING,
)  # fmt: skip
#: Settings of the run that are copied from the training; further phases of a round; all keys of a site's own file.
COPIED = tuple(one.on for one in ASPECTS if one.copied)
PHASES = tuple(name for one in ASPECTS for name in one.phases)
SITE_KEYS = tuple(name for one in ASPECTS for name in one.site_keys)


def refusals(facts: Mapping[str, Any], aspects: Collection[Aspect] = ()) -> Iterator[str]:
    """Yield why a run cannot have one of its aspects, by the rows of the table that hold.

    Args:
        facts: settings of the run, its method and its task, and facts about them, as far as they are known, by name.
        aspects: the aspects to look at; empty: all.
    """
    on = (one for one in aspects or ASPECTS if one.is_on(facts))
    yield from (row.text.format_map(facts) for one in on for row in one.excludes if row.holds(facts))
