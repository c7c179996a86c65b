"""A results document as the page can rely on it, whatever is missing or of the wrong kind in the file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fairflare.core.resampling import UNITS
from fairflare.reporting.standing import TESTS

OF_SITE = ("value", "low", "high", "images", "test_cases", "standard_error", "expected", "p_value", "common")
MAX_PROBLEMS = 20
_STATES = ("running", "completed", "failed")


class Tidier:
    """Takes what has the right kind, leaves out what has not, and remembers what that was.

    Attributes:
        problems: a line for each thing left out, :data:`MAX_PROBLEMS` at most.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._more = 0

    def document(self, raw: Mapping[str, Any], layers: Callable[[int, dict[str, Any]], int]) -> dict[str, Any]:
        """A new document with all keys of ``docs/results.md`` that tables and pictures read.

        Args:
            raw: of :func:`fairflare.reporting.results.read_results`; not changed.
            layers: is given a round's number and its ``layers``, which the new document does not keep; how many
                entries are of the wrong kind.
        """
        info = self._info(raw.get("info"))
        status = raw.get("status")
        found: dict[str, Any] = {
            "status": status if status in _STATES else "failed",
            "reason": self._text("reason", raw.get("reason")),
            "info": info,
            "test": self._metrics("test", raw.get("test")) or None,
            "test_best": self._metrics("test_best", raw.get("test_best")) or None,
            "suppressed": {
                site: self._names(f"suppressed.{site}", names)
                for site, names in self._dict("suppressed", raw.get("suppressed")).items()
            },
            "best": self._best(raw.get("best")),
            "last_rounds": self._last(raw.get("last_rounds")),
            "inequality": self._inequality(raw.get("inequality")),
            "global_test": self._global(raw.get("global_test")),
            **self._draws(raw.get("resampled"), raw.get("resampled_units")),
            "left_out": self._left_out("left_out", raw.get("left_out")),
            "phases": self._phases("phases", raw.get("phases")),
            "resumed": self._list("resumed", raw.get("resumed")),
            "went_back": self._list("went_back", raw.get("went_back")),
        }
        for key in ("started", "finished"):
            found[key] = self._text(key, raw.get(key))
        found["rounds"] = []
        for index, entry in enumerate(self._list("rounds", raw.get("rounds"))):
            record = self._round(f"rounds[{index}]", entry)
            if record is not None:
                where = f"rounds[{index}].layers"
                if wrong := layers(record["current_round"], self._dict(where, entry.get("layers"))):
                    self._problem(f"{where}: {wrong} entries are of the wrong kind")
                found["rounds"].append(record)
        found["rounds"].sort(key=lambda record: record["current_round"])
        return found

    def told(self) -> list[str]:
        """The problems, with a last line where there are more."""
        return [*self.problems, *([f"and {self._more} more"] if self._more else [])]

    # -------------------------------------------------------------------------------------------- parts

    def _info(self, value: Any) -> dict[str, Any]:
        info = dict(self._dict("info", value))
        for key in ("sites", "connected", "classes_at_home", "shown_metrics"):
            if info.get(key) is None:
                info.pop(key, None)
            else:
                info[key] = self._names(f"info.{key}", info[key])
        for key in ("config", "versions", "said", "bounds", "higher_is_better", "task_file"):
            info[key] = self._dict(f"info.{key}", info.get(key))
        info["higher_is_better"] = {k: v for k, v in info["higher_is_better"].items() if isinstance(v, bool)}
        info["said"] = {site: self._dict(f"info.said.{site}", v) for site, v in info["said"].items()}
        for key in ("label", "method", "measured", "primary_metric", "experiment"):
            info[key] = self._text(f"info.{key}", info.get(key))
        info["synthetic"] = info.get("synthetic") is True
        seed = info.get("seed", info["config"].get("seed"))
        info["seed"] = seed if isinstance(seed, int) and not isinstance(seed, bool) else None
        info["config"] = {**info["config"], "seed": info["seed"]}
        return info

    def _best(self, value: Any) -> dict[str, Any] | None:
        found = self._dict("best", value)
        if not isinstance(found.get("round"), int):
            return None
        return {
            "round": found["round"],
            "is_last": found.get("is_last") is True,
            "by": self._text("best.by", found.get("by")),
            "value": finite(found.get("value")),
            "sites": self._names("best.sites", found.get("sites")),
        }

    def _last(self, value: Any) -> dict[str, Any] | None:
        found = self._dict("last_rounds", value)
        rounds = [n for n in self._list("last_rounds.rounds", found.get("rounds")) if isinstance(n, int)]
        return {"rounds": rounds, "test": self._metrics("last_rounds.test", found.get("test"))} if rounds else None

    def _global(self, value: Any) -> dict[str, Any] | None:
        found = self._dict("global_test", value)
        given = self._list("global_test.lists", found.get("lists"))
        lists = [self._dict(f"global_test.lists[{k}]", one) for k, one in enumerate(given)]
        whole = [
            {key: self._text("global_test.lists", one.get(key)) for key in ("measured_at",)}
            | {"sites": self._names("global_test.lists", one.get("sites"))}
            for one in lists
        ]
        numbers = {key: finite(found.get(key)) for key in ("low", "high", "images", "test_cases")}
        return (
            {
                "metrics": self._numbers("global_test.metrics", found.get("metrics")),
                **numbers,
                "images": None if numbers["images"] is None else int(numbers["images"]),
                "metric": self._text("global_test.metric", found.get("metric")),
                "reason": self._text("global_test.reason", found.get("reason")),
                "lists": whole,
            }
            if found
            else None
        )

    def _inequality(self, value: Any) -> dict[str, Any] | None:
        found = self._dict("inequality", value)
        if not found:
            return None
        numbers = ("level", "p_value", "std", "chance_std", "gap", "chance_gap")
        tidy: dict[str, Any] = {key: finite(found.get(key)) for key in numbers}
        tidy |= {key: self._text(f"inequality.{key}", found.get(key)) for key in ("metric", "test", "gap_site")}
        tidy |= {key: self._names(f"inequality.{key}", found.get(key)) for key in ("behind", "ahead")}
        common = found.get("common_classes")
        tidy["common_classes"] = None if common is None else self._names("inequality.common_classes", common)
        tidy["sites"] = {}
        for site, said in self._by_site("inequality.sites", found.get("sites")).items():
            where = f"inequality.sites.{site}.class_support"
            own = {key: finite(said.get(key)) for key in OF_SITE}
            support = self._numbers(where, said.get("class_support"))
            whole = support if all(count is not None for count in support.values()) else {}
            tidy["sites"][site] = {**own, "class_support": whole or None}
        if tidy["test"] and not (
            tidy["test"] in TESTS
            and all(tidy[key] is not None for key in numbers)
            and {tidy["gap_site"], *tidy["behind"], *tidy["ahead"]} <= set(tidy["sites"])
            and all(
                (site["p_value"] is None) == (site["expected"] is None) and site["value"] is not None
                for site in tidy["sites"].values()
            )
        ):
            self._problem("inequality is not whole")
            return None
        return tidy

    def _draws(self, resampled: Any, units: Any) -> dict[str, Any]:
        """Values and units; of a site that has either of the wrong kind, neither."""
        values: dict[str, list[float | None]] = {}
        for site, entry in self._dict("resampled", resampled).items():
            given = self._list(f"resampled.{site}", entry)
            values[site] = [finite(v) for v in given]
            if any(v is not None and finite(v) is None for v in given):
                self._problem(f"resampled.{site} has entries that are no numbers; its test images are in no interval")
                del values[site]
        told: dict[str, dict[str, Any]] = {}
        for site, entry in self._dict("resampled_units", units).items():
            unit = self._dict(f"resampled_units.{site}", entry)
            count = finite(unit.get("count")) or 0.0
            if unit.get("unit") in UNITS and count >= 1 and count.is_integer():
                told[site] = {"unit": unit["unit"], "count": int(count)}
            else:
                self._problem(f"resampled_units.{site} does not say what was drawn; it is in no interval")
                values.pop(site, None)
        return {"resampled": values or None, "resampled_units": told or None}

    def _round(self, where: str, value: Any) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            self._problem(f"{where} is no object")
            return None
        number = value.get("current_round")
        if not isinstance(number, int) or isinstance(number, bool):
            self._problem(f"{where} has no current_round")
            return None
        return {
            "current_round": number,
            "sites": self._names(f"{where}.sites", value.get("sites")),
            "accepted": self._names(f"{where}.accepted", value.get("accepted")),
            "left_out": self._left_out(f"{where}.left_out", value.get("left_out")),
            "phases": self._phases(f"{where}.phases", value.get("phases")),
            "validation": self._metrics(f"{where}.validation", value.get("validation")),
            "train": self._by_site(f"{where}.train", value.get("train")),
            "reports": self._by_site(f"{where}.reports", value.get("reports")),
            "site_weights": self._numbers(f"{where}.site_weights", value.get("site_weights")),
            "warnings": self._warnings(f"{where}.warnings", value.get("warnings")),
            "details": self._dict(f"{where}.details", value.get("details")),
            "test": self._metrics(f"{where}.test", value.get("test")),
            "global_test": self._numbers(f"{where}.global_test", value.get("global_test")),
        }

    def _left_out(self, where: str, value: Any) -> list[dict[str, str]]:
        found = [self._dict(f"{where}[{k}]", entry) for k, entry in enumerate(self._list(where, value))]
        return [{key: self._text(where, left.get(key)) for key in ("site", "phase", "reason")} for left in found]

    def _phases(self, where: str, value: Any) -> list[dict[str, Any]]:
        found = []
        for index, entry in enumerate(self._list(where, value)):
            phase = self._dict(f"{where}[{index}]", entry)
            numbers = {key: finite(phase.get(key)) for key in ("seconds", "bytes_out", "bytes_in", "asked", "answered")}
            if lacking := [key for key, number in numbers.items() if number is None]:
                self._problem(f"{where}[{index}]: no number {', '.join(lacking)}")
            found.append({"name": self._text(where, phase.get("name")), **{k: n or 0.0 for k, n in numbers.items()}})
        return found

    def _warnings(self, where: str, value: Any) -> list[dict[str, Any]]:
        found = [self._dict(f"{where}[{k}]", entry) for k, entry in enumerate(self._list(where, value))]
        return [
            {
                **{key: self._text(where, w.get(key)) for key in ("site", "kind", "text")},
                "value": finite(w.get("value")),
            }
            for w in found
        ]

    def _metrics(self, where: str, value: Any) -> dict[str, dict[str, float | None]]:
        return {site: self._numbers(f"{where}.{site}", found) for site, found in self._dict(where, value).items()}

    def _by_site(self, where: str, value: Any) -> dict[str, dict[str, Any]]:
        return {site: self._dict(f"{where}.{site}", found) for site, found in self._dict(where, value).items()}

    # -------------------------------------------------------------------------------------------- kinds

    def _numbers(self, where: str, value: Any) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for name, entry in self._dict(where, value).items():
            found[name] = finite(entry)
            if found[name] is None and entry is not None and not isinstance(entry, float):
                self._problem(f"{where}.{name} is no number")
        return found

    def _dict(self, where: str, value: Any) -> dict[str, Any]:
        return self._kind(where, value, dict, "object") or {}

    def _list(self, where: str, value: Any) -> list[Any]:
        return self._kind(where, value, list, "list") or []

    def _text(self, where: str, value: Any) -> str:
        return self._kind(where, value, str, "text") or ""

    def _names(self, where: str, value: Any) -> list[str]:
        found = self._list(where, value)
        names = [name for name in found if isinstance(name, str)]
        if len(names) < len(found):
            self._problem(f"{where} has entries that are no names")
        return names

    def _kind(self, where: str, value: Any, kind: type, called: str) -> Any:
        if value is None:
            return None
        if not isinstance(value, kind):
            self._problem(f"{where} is no {called}")
            return None
        return value

    def _problem(self, text: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)
        else:
            self._more += 1


def finite(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
