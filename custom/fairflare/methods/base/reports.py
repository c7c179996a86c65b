"""Declare the values that sites report, each with name, kind and range, and check reports before they are used."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fairflare.base.checks import ReportError as ReportError
from fairflare.base.checks import refuse_if

MAX_TEXT = 200
MAX_ARRAY = 2**28  # largest number of bytes of an array in a report
MAX_ENTRIES = 100_000  # largest number of entries of a vector or a list of names; no network has more layers
STAY = "reports_stay"  # directive: sites under differential privacy make no report in this run
LENGTH = "update_norm"  # with secure sums: name of a directive, and of the report's norm of the site's update
CLASSES = "gradient_classes"  # with secure sums: name of the report's list of classes of which the site keeps numbers
SUPPRESSED = "suppressed"  # word for a value that a site withholds because it has fewer cases than its min_cases
SENT_BACK = "sent back the model that it received"  # part of the message about a site that made no optimizer step
TOO_FEW = "fewer cases than its min_cases"
TRAINING, VALIDATION = ("training",), ("validation",)  # splits from whose images most values are computed
NO_IMAGES: tuple[str, ...] = ()
#: Type of a single value, or of an entry of a list, and the words for it, by the field's kind; only a flag is a bool.
SINGLE: dict[str, tuple[Any, str]] = {
    "number": ((int, float), "be a number"),
    "vector": ((int, float), "be a number"),
    "whole": (int, "be an integer"),
    "flag": (bool, "be true or false"),
    "text": (str, f"be a text of at most {MAX_TEXT} characters"),
    "names": (str, "list names"),
}


@dataclass(frozen=True)
class ByClass:
    """Store a report's numbers by class until :mod:`fairflare.federation.site.gate` removes classes with too few cases.

    This object cannot be sent as it is, so the removal cannot be forgotten.

    Args:
        split: the split from whose images the numbers are computed.
        rows: the numbers of each class, by class.
        shape: number of all classes, and of the numbers of one; needed for secure sums only.
    """

    split: str
    rows: Mapping[int, np.ndarray[Any, Any]]
    shape: tuple[int, int] = (0, 0)

    def sent(self, labels: Collection[int]) -> bytes:
        """Return the bytes of an ``"array"`` field: for each class in ``labels`` its label, then its numbers."""
        rows = [
            np.concatenate([[label], self.rows[label].reshape(-1)]) for label in sorted(self.rows) if label in labels
        ]
        return np.array(rows, "<f4").tobytes()


@dataclass(frozen=True)
class Field:
    """Declare one value of a site's report.

    Args:
        name: key of the value in the report.
        kind: ``"number"``, ``"whole"`` (an integer), ``"flag"``, ``"text"`` (at most 200 characters), ``"vector"``
            (list of numbers), ``"names"`` (list of strings) or ``"array"`` (bytes: many numbers, each a little-endian
            float of 4 bytes; read as a NumPy array).
        low, high: closed range of each number.
        nan_ok: whether NaN is a legal value, with a meaning that the method defines ("undefined here").
        infinite_ok: whether infinite values are legal too; they are read as NaN.
        same_length_as: name of another field; this vector or list of names must have as many entries as that field.
        required: whether a report without this value is refused.
        doc: description of the value in one phrase; every declared field has one, and ``fairflare privacy`` lists them.
        reveals: what the value may reveal about the site's data; empty for nothing beyond ``doc``.
        keep: description of the setting with which the site withholds the value; empty if no setting withholds it.
        of: the splits from whose images the value is computed; empty if it is computed from no images. If one of
            them has fewer cases than the site's ``min_cases``, the value is withheld. ``None`` if the splits are not
            known: then it is withheld if any split has too few cases.
        home_ok: whether the method works if the site withholds the value, which is then NaN, as with ``nan_ok``.
        measures: kind of measure of the site's labels: ``"loss"``, ``"score"`` or ``"error"`` (1 - score). If sites
            annotate different structures, the rule gets comparable values
            (:meth:`fairflare.core.statistics.footing.Footing.reports`). Empty: the value does not measure labels.
        alike: advice for the case that sites report different values; a site whose value differs from that of most
            sites of the round is left out. Empty: sites may report different values.
    """

    name: str
    kind: Literal["number", "whole", "flag", "text", "vector", "names", "array"] = "number"
    low: float = -math.inf
    high: float = math.inf
    nan_ok: bool = False
    infinite_ok: bool = False
    same_length_as: str | None = None
    required: bool = True
    doc: str = field(default="", kw_only=True)
    reveals: str = field(default="", kw_only=True)
    keep: str = field(default="", kw_only=True)
    of: tuple[str, ...] | None = field(default=None, kw_only=True)
    home_ok: bool = field(default=False, kw_only=True)
    alike: str = field(default="", kw_only=True)
    measures: Literal["", "loss", "score", "error"] = field(default="", kw_only=True)

    def read(self, report: Mapping[str, Any], site: str, suppressed: Collection[str] = ()) -> Any:
        """Return this field's checked value from a report; ``None`` when the field is optional and absent.

        Args:
            report: the site's report.
            site: name of the site.
            suppressed: names of fields that the site withholds because of too few cases. Their value is NaN if the
                method can use NaN.

        Raises:
            ReportError: the value is missing, of another type, or out of range (names site, field and value).
        """
        value, partner = report.get(self.name), report.get(self.same_length_as or "")
        wanted = len(partner) if isinstance(partner, (list, tuple)) else 0
        withheld = value is None and self.name in suppressed
        if withheld and (self.nan_ok or self.home_ok):
            return [math.nan] * wanted if self.kind == "vector" else math.nan
        refuse_if(site, {
            f"the field {self.name!r} is {SUPPRESSED} there: {TOO_FEW}": withheld and self.required,
            f"the report lacks the field {self.name!r}": value is None and self.required,
        })  # fmt: skip
        if value is None:
            return None
        if self.kind == "array":
            return self._array(value, site)
        if self.kind not in ("vector", "names"):
            return self._single(value, site, self.name)
        checked = self._list(value, site)
        refuse_if(site, {
            f"field {self.name!r} has {len(checked)} entries, field {self.same_length_as!r} has {wanted}": (
                self.same_length_as is not None and len(checked) != wanted
            ),
        })  # fmt: skip
        return checked

    def _array(self, value: Any, site: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        if not isinstance(value, bytes) or len(value) % 4 or len(value) > MAX_ARRAY:
            raise self._wrong(site, self.name, f"be at most {MAX_ARRAY} bytes, four for each number", value)
        array = np.frombuffer(value, "<f4").astype(np.float32)
        outside = ~(np.isfinite(array) & (array >= self.low) & (array <= self.high))
        if outside.any():
            place = int(outside.argmax())
            wanted = f"be finite and lie in [{self.low:g}, {self.high:g}]"
            raise self._wrong(site, f"{self.name}[{place}]", wanted, float(array[place]))
        return array

    def _list(self, value: Any, site: str) -> list[Any]:
        count = len(value) if isinstance(value, (list, tuple)) else None
        refuse_if(site, {
            f"field {self.name!r} must be a list, got {type(value).__name__}": count is None,
            f"field {self.name!r} has {count} entries, more than {MAX_ENTRIES}": (count or 0) > MAX_ENTRIES,
        })  # fmt: skip
        places = [f"[{place}]" if self.kind == "vector" else "" for place in range(len(value))]
        return [self._single(entry, site, self.name + place) for place, entry in zip(places, value, strict=True)]

    def _single(self, value: Any, site: str, where: str) -> float | str:
        types, wanted = SINGLE[self.kind]
        too_long = isinstance(value, str) and len(value) > MAX_TEXT
        if not isinstance(value, types) or too_long or isinstance(value, bool) != (self.kind == "flag"):
            raise self._wrong(site, where, wanted, value)
        if isinstance(value, (bool, str)):
            return value
        try:
            number = float(value)
        except OverflowError:
            raise self._wrong(site, where, "be finite", value) from None
        if (math.isnan(number) and self.nan_ok) or (math.isinf(number) and self.infinite_ok):
            return math.nan
        if not (math.isfinite(number) and self.low <= number <= self.high):
            wanted = f"lie in [{self.low:g}, {self.high:g}]" if math.isfinite(number) else "be finite"
            raise self._wrong(site, where, wanted, number)
        return number

    @staticmethod
    def _wrong(site: str, where: str, wanted: str, value: Any) -> ReportError:
        return ReportError(f"site {site!r}: field {where!r} must {wanted}, got {shorten_value(value)}")


def shorten_value(value: Any) -> str:
    """Return a value as printable text of at most 80 characters, for a message."""
    if isinstance(value, int) and not -(10**40) < value < 10**40:
        return "an integer of over 40 digits"  # formatting such an integer in full could take minutes
    if isinstance(value, (bool, int, float, str, bytes)) or value is None:
        return f"{value if not isinstance(value, (str, bytes)) else value[:80]!r:.80}"
    return f"a {type(value).__name__}"


def read_report(
    report: Any, fields: Iterable[Field], site: str, where: str = "report", suppressed: Collection[str] = ()
) -> dict[str, Any]:
    """Return a report's declared fields, checked; absent optional ones are ``None``, undeclared ones are ignored.

    Args:
        report: the report as the site sent it.
        fields: the declared fields.
        site, where: name of the site and of the report, for error messages.
        suppressed: names of fields that the site withholds, as in :meth:`Field.read`.

    Raises:
        ReportError: a value is refused, as by :meth:`Field.read`; the report is missing and a field is required; or the
            report is no dict.
    """
    fields = tuple(fields)
    no_dict = report is not None and not isinstance(report, Mapping)
    refuse_if(site, {
        f"the message carries no {where}": report is None and any(f.required for f in fields),
        f"field {where!r} must be a dict, got {shorten_value(report)}": no_dict,
    })  # fmt: skip
    return {f.name: f.read(report or {}, site, suppressed) for f in fields}


def misfits(reports: Mapping[str, Mapping[str, Any]], declared: Field) -> dict[str, str]:
    """Return the sites whose value of a field is not the most frequent one (on a tie, all sites), with the reasons."""
    values = {site: report[declared.name] or "none" for site, report in reports.items()}
    first, *others = Counter(values.values()).most_common(2) or [("", 0)]
    common = first[0] if not others or others[0][1] < first[1] else None
    most = f"at most sites {common!r}" if common is not None else "and no value is that of most sites"
    return {
        site: f"site {site!r}: field {declared.name!r} is {value!r}, {most}; {declared.alike}"
        for site, value in values.items()
        if value != common
    }


def numbers(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the single numbers of a report, without lists and texts, for results and curves."""
    return {name: value for name, value in report.items() if isinstance(value, float)}
