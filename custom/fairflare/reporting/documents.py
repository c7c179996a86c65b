"""Declare a run's results document: the server writes it, checkpoints store it, tables and pages read it.

``docs/results_reference.md`` explains the keys. A change of a key's meaning must raise ``SCHEMA_VERSION``. A missing
key has its default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError, to_jsonable_python

from fairflare.base.settings import Flag, Number, Whole
from fairflare.core.cells import GLOBAL, LAST, NOT_COUNTED, TEST, Cell, Vector, pivot

SCHEMA_VERSION = 2

#: Significant digits of values by layer and site, and decimals of CKA: limited, as a long run has millions of them.
LAYER_DIGITS, CKA_DECIMALS = 8, 6

WITHIN, CASES, ERRORS = "permutation of test images within classes", "permutation of test cases", "Cochran's Q"
#: Names of the tests whether the sites' metrics differ by more than chance, and the words for each test in sentences.
TESTS = {WITHIN: "permutation test within classes", CASES: "permutation test", ERRORS: "Cochran's Q test"}


def _drop_null(value: Any) -> Any:
    """Return a mapping without its null entries, for which defaults hold; return any other value unchanged."""
    return {key: part for key, part in value.items() if part is not None} if isinstance(value, Mapping) else value


# Figure: a float that is NaN where undefined; a file has null in place of NaN. A MaybeFigure may also be missing.
if TYPE_CHECKING:
    Figure: TypeAlias = float
    MaybeFigure: TypeAlias = Any
else:
    Figure = MaybeFigure = Number | None
Metrics: TypeAlias = Mapping[str, Mapping[str, Figure]]  # {site: {metric: value}}


# ------------------ a round: plain dataclasses, since their values (NaN, arrays, records of a rule) are not yet JSON


@dataclass(frozen=True)
class LeftOut:
    """Describe a site that was left out of a round, which continued without the site."""

    site: str
    phase: str
    reason: str


@dataclass(frozen=True)
class PhaseRecord:
    """Describe one exchange with the sites: wall time, bytes on the wire, numbers of sites asked and answering."""

    name: str
    seconds: Number
    bytes_out: Whole
    bytes_in: Whole
    asked: Whole
    answered: Whole


@dataclass(frozen=True)
class Warned:
    """Describe an effect that one site could have on a round, or would have had without a bound.

    Attributes:
        site: name of the site; empty if the warning is about no single site.
        kind: kind of the warning, such as ``majority``, or the bound that changed a value and that value's name.
        value, used: the value that the site sent; the value that the server used in its place. ``None`` in a file: too
            large for a number.
        text: the warning in words, without site and round.
        layers: number of layers that the warning concerns; ``None`` if weights are not by layer.
    """

    site: str
    kind: str
    value: Figure
    used: Figure
    text: str
    layers: Whole | None = None


@dataclass
class RoundRecord:
    """Store the record of one round.

    Attributes:
        current_round: number of the round, from 0.
        sites: names of the sites that were asked.
        accepted: sites whose model is in the new global model.
        left_out: sites not asked, or asked and not accepted, with the phase and the reason.
        phases: the round's phases, in the order in which they ran.
        validation: ``{site: {metric: value}}`` of the *received* model, on the site's validation split.
        train: ``{site: {"loss": ..., "num_samples": ..., ...}}`` of the local training; ``"state_lost"`` if the site
            could not use the state that it had saved in earlier rounds.
        site_weights: ``{site: weight}`` if the method has one weight for a whole model.
        layers: ``{layer: {site: {"cka": ..., "dissimilarity": ..., "weight": ...}}}`` if the method has one weight
            per layer.
        reports: ``{site: {field: value}}``, numbers that the sites report for the method.
        values: figures of the method about the round as a whole.
        details: further figures of the method about the round, as nested JSON-like values.
        warnings: warnings that a bound limited one site's influence, or that a site held more than half of the weight.
        suppressed: ``{site: names}`` of values that the site withholds for too few cases: ``metrics/...`` (of the
            validation split), ``report/...``, ``stats/...``.
        notes: sentences about single sites, such as how a filter at the site changed its model.
        test: ``{site: {metric: value}}`` of the round's *new* model on the test splits, if that model was tested.
        global_test: ``{metric: value}`` of the round's new model on the images of the global test, if sites have
            such images.
    """

    current_round: Whole
    sites: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    phases: list[PhaseRecord] = field(default_factory=list)
    validation: Metrics = field(default_factory=dict)
    train: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    site_weights: Mapping[str, Figure] | None = None
    layers: Mapping[str, Mapping[str, Mapping[str, Figure]]] | None = None
    reports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    warnings: list[Warned] = field(default_factory=list)
    suppressed: Mapping[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    test: Metrics = field(default_factory=dict)
    global_test: Mapping[str, Figure] | None = None


# ------------------------------------------------------------------------------------------------ the document


class ResultsPart(BaseModel, extra="allow", defer_build=True):
    """Represent a part of a results document; it is false if the document lacks the part. Unknown keys are kept."""

    @model_validator(mode="before")
    @classmethod
    def _absent(cls, value: Any) -> Any:
        return _drop_null(value)

    def __bool__(self) -> bool:
        return bool(self.model_fields_set)


class Info(ResultsPart):
    """Describe what was run; a run's record may have more fields than this class declares."""

    experiment: str = ""
    method: str = ""
    label: str = ""
    title: str = ""
    kind: str = ""
    without: str = ""
    sums: str = ""
    in_vain: list[str] = []
    primary_metric: str = ""
    measured: str = ""
    job_id: str | None = None
    num_rounds: Whole | None = None
    seed: Whole | None = None
    sites: list[str] = []
    connected: list[str] | None = None
    classes_at_home: list[str] = []
    resumed_with: list[str] = []
    shown_metrics: list[str] = []
    higher_is_better: dict[str, Flag] = {}
    units: dict[str, str] = {}
    config: dict[str, Any] = {}
    bounds: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    said: dict[str, dict[str, Any]] = {}
    privacy: dict[str, dict[str, Any]] = {}
    task_file: dict[str, Any] = {}
    output_rows: dict[str, list[str]] = {}
    channels: dict[str, list[str]] = {}
    synthetic: Flag = False


class Best(ResultsPart):
    """Describe which model of a run is the best by the validation splits."""

    round: Whole | None = None
    is_last: Flag = False
    by: str = ""
    value: MaybeFigure = None
    sites: list[str] = []


class SiteStanding(ResultsPart):
    """Store what a test says of a site, and what it rests on; value, interval and cases are those of its cell."""

    value: MaybeFigure = None
    low: MaybeFigure = None
    high: MaybeFigure = None
    test_cases: MaybeFigure = None
    expected: MaybeFigure = None
    p_value: MaybeFigure = None
    common: MaybeFigure = None
    class_support: dict[str, Number] | None = None
    structure_support: dict[str, Number] | None = None


class Inequality(ResultsPart):
    """Describe which sites are behind in the primary metric, and whether sites differ by more than chance."""

    metric: str = ""
    level: MaybeFigure = None
    test: str = ""
    p_value: MaybeFigure = None
    std: MaybeFigure = None
    chance_std: MaybeFigure = None
    gap: MaybeFigure = None
    gap_site: str = ""
    chance_gap: MaybeFigure = None
    behind: list[str] = []
    ahead: list[str] = []
    common_classes: list[str] | None = None
    sites: dict[str, SiteStanding] = {}

    @model_validator(mode="after")
    def _whole(self) -> Inequality:
        if self.test and not (
            self.test in TESTS
            and None not in (self.level, self.p_value, self.std, self.chance_std, self.gap, self.chance_gap)
            and {self.gap_site, *self.behind, *self.ahead} <= {*self.sites}
            and all((s.p_value is None) == (s.expected is None) for s in self.sites.values())
        ):
            raise PydanticCustomError("not_whole", "names no known test, or lacks its numbers or sites")
        return self


class Compared(ResultsPart):
    """Describe which structures are used to compare the sites (:mod:`fairflare.core.statistics.footing`)."""

    how: str = ""
    structures: dict[str, list[str]] = {}
    empty: dict[str, list[str]] = {}
    shared: list[str] = []
    parts: list[list[str]] = []
    bridges: list[str] = []


class GlobalList(ResultsPart):
    """Describe one list of images that belong to no site alone."""

    measured_at: str = ""
    sites: list[str] = []
    images: MaybeFigure = None


class GlobalTest(ResultsPart):
    """Describe on which lists the global test was made, and why it has no figures or not those of every list."""

    reason: str = ""
    lists: list[GlobalList] = []


class RunResults(ResultsPart):
    """Represent ``results.json``, in the order of writing; the rounds, each a :class:`RoundRecord`, come last."""

    schema_version: int = SCHEMA_VERSION
    status: Literal["running", "completed", "failed"] = "running"
    reason: str = ""
    started: str = ""
    updated: str = ""
    finished: str | None = None
    resumed: list[Any] = []
    went_back: list[Any] = []
    info: Info = Info()
    cells: list[Cell] = []
    vectors: list[Vector] = []
    inequality: Inequality = Inequality()
    personal: dict[str, Any] = {}
    footing: Compared = Compared()
    global_test: GlobalTest = GlobalTest()
    best: Best = Best()
    last_rounds: list[Whole] = []
    left_out: list[LeftOut] = []
    phases: list[PhaseRecord] = []
    rounds: list[Annotated[RoundRecord, BeforeValidator(_drop_null)]] = []

    @model_validator(mode="after")
    def _join_inequality(self) -> RunResults:
        for site, cell in self.columns.get(LAST, {}).get(self.inequality.metric, {}).items():
            if found := self.inequality.sites.get(site):
                found.value, found.low, found.high, found.test_cases = cell.value, cell.low, cell.high, cell.cases
        return self

    @cached_property
    def columns(self) -> dict[str, dict[str, dict[str, Cell]]]:
        """Return the metrics of the test splits and of the global test: ``{model: {metric: {site: cell}}}``.

        A metric of the global test is called ``global/<metric>``; its cell is of no site. The model that a round made
        is called ``round <number>``, if it was tested.
        """
        skip = {(c.metric, c.site) for c in self.cells if c.reason == NOT_COUNTED}
        of_rounds = (
            Cell(name, site, f"round {record.current_round}", split, value=value,
                 reason=NOT_COUNTED if (name, site) in skip else "")
            for record in self.rounds
            for split, test in ((TEST, record.test), (GLOBAL, {"": record.global_test or {}}))
            for site, of in test.items() for name, value in of.items()
        )  # fmt: skip
        return {
            **pivot((c for c in self.cells if c.split in (TEST, GLOBAL) and not c.group), "model", "name", "site"),
            **pivot(of_rounds, "model", "name", "site"),
        }


HEAD: TypeAdapter[RunResults] = TypeAdapter(RunResults)


# ------------------------------------------------------------------------------------------------ writing


def encode(value: Any) -> str:
    """Return a value from :func:`encode_value` as one line of strict JSON."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def round_as_json(record: RoundRecord) -> dict[str, Any]:
    """Return a round as JSON types; the values by layer and site, by far the most of a round, are rounded.

    ``cka`` keeps :data:`CKA_DECIMALS` decimals (``dissimilarity`` is 1 - CKA, accurate when small); all other values
    keep :data:`LAYER_DIGITS` significant digits.

    Raises:
        TypeError: the round has a value that JSON cannot hold; the message names its place.
    """
    plain: dict[str, Any] = encode_value(record, "round")
    for values in (of_site for by_site in (plain["layers"] or {}).values() for of_site in by_site.values()):
        values |= {
            name: float(format(value, f".{CKA_DECIMALS}f" if name == "cka" else f".{LAYER_DIGITS}g"))
            for name, value in values.items() if isinstance(value, float)
        }  # fmt: skip
    return plain


def encode_value(value: Any, where: str) -> Any:
    """Return a value as JSON types; NaN and infinity, which JSON does not have, become None.

    Args:
        value: records, mappings, sequences, paths, dates, NumPy and torch scalars and arrays, within each other.
        where: name of the value, for the message.

    Raises:
        TypeError: the value holds an object of another type, which the message names.
    """

    def plain(part: Any) -> Any:
        if hasattr(part, "tolist"):  # a scalar or an array of NumPy or torch
            return part.tolist()
        raise TypeError(f"{where} holds {part!r:.80} of type {type(part).__name__}, which results.json cannot hold")

    return to_jsonable_python(value, inf_nan_mode="null", fallback=plain)
