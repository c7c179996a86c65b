"""Turn documents of the first schema into cells and back, for tests that write figures by hand or look them up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from fairflare.core.cells import CLINICAL, GLOBAL, LAST, NOT_COUNTED, TEST, VALIDATION, Cell, Vector, pivot
from fairflare.core.fairness import higher_is_better, summarize
from fairflare.core.statistics.areas import ALL
from fairflare.reporting.documents import RunResults, encode_value
from fairflare.reporting.groups import attributes_of, gaps_at, groups_at
from fairflare.reporting.standing import standing
from fairflare.reporting.values import NO_VALUE, are_linked, cells_of, global_values, withheld_reason

OLD = (
    "validation", "test", "fairness", "test_best", "fairness_best", "resampled", "resampled_units", "suppressed",
    "clinical", "groups",
)  # fmt: skip
ENDS = (("low", "low"), ("high", "high"), ("cases", "test_cases"))
JOINED = ("value", "low", "high", "test_cases")
Document = dict[str, Any]


def upgraded(old: Mapping[str, Any]) -> Document:
    """Return a document whose figures are cells, from one with the sections of the first schema."""
    document = {key: part for key, part in old.items() if key not in OLD and part is not None}
    if "cells" in old:
        last = document.get("last_rounds") or []
        return document | {"last_rounds": last["rounds"] if isinstance(last, Mapping) else last}
    info, footing = old.get("info") or {}, old.get("footing") or {}
    withheld, privacy = old.get("suppressed") or {}, info.get("privacy") or {}
    reasons = {site: withheld_reason(site, privacy, info.get("said") or {}) for site in withheld}
    found = {k: dict(v) if isinstance(v, Mapping) else v for k, v in (old.get("inequality") or {}).items()}
    sites = {site: dict(of) for site, of in (found.get("sites") or {}).items()}
    parts = {name for of in sites.values() for name in of.get("class_support") or ()}
    last = old.get("last_rounds") or {}
    tests = {LAST: old.get("test") or ({} if withheld else None)}
    if not (old.get("best") or {}).get("is_last"):
        tests["best"] = old.get("test_best")
    if last:
        tests[f"last {len(last['rounds'])}"], document["last_rounds"] = last["test"], last["rounds"]
    cells = [
        cell
        for model, test in tests.items() if test is not None
        for cell in cells_of(model, {s: dict(of) for s, of in test.items()}, withheld, reasons,
                             footing.get("structures") or {}, footing.get("empty") or {}, parts)
    ]  # fmt: skip
    about = {
        site: {
            key: of.pop(old_key, None) for key, old_key in (("low", "low"), ("high", "high"), ("cases", "test_cases"))
        }
        for site, of in sites.items()
    }
    plain = [encode_value(cell, "cell") for cell in cells]
    for cell in plain:
        if (cell["model"], cell["metric"]) == (LAST, found.get("metric")) and cell["site"] in about:
            cell |= about[cell["site"]]
    for site, of in sites.items():
        value = of.pop("value", None)
        if not any((cell["site"], cell["metric"]) == (site, found["metric"]) for cell in plain):
            plain.append(encode_value(Cell(found["metric"], site, value=value), "cell") | about[site])
    if found:
        document["inequality"] = {**found, "sites": sites}
    of_all = dict(old.get("global_test") or {})
    metrics, ends = of_all.pop("metrics", {}), {new: of_all.pop(key, None) for new, key in ENDS}
    primary = of_all.pop("metric", "")
    more = [Cell(n, split=GLOBAL, value=v, **(ends if n == primary else {})) for n, v in metrics.items()]
    if of_all:
        document["global_test"] = of_all
    more += [
        Cell(name, site, split=VALIDATION, value=value)
        for site, of in (old.get("validation") or {}).items() for name, value in of.items()
    ]  # fmt: skip
    clinical = old.get("clinical") or {}
    for site, classes in clinical.items():
        for name, of in classes.items():
            more += [
                Cell(key, site, split=CLINICAL, part="" if name == ALL else name, value=value,
                     low=of.get(f"{key}_low"), high=of.get(f"{key}_high"))
                for key, value in of.items()
                if key not in ("calibration", "auc_p_value") and not key.endswith(("_low", "_high"))
            ]  # fmt: skip
            if site == next(iter(clinical)) and "auc_p_value" in of:
                more.append(Cell("auc_p_value", split=CLINICAL, part=name, value=of["auc_p_value"]))
    units = old.get("resampled_units") or {}
    vectors = [
        Vector(info.get("primary_metric", ""), site, unit=units.get(site, {}).get("unit") or "images",
               count=units.get(site, {}).get("count"), values=tuple(values))
        for site, values in (old.get("resampled") or {}).items()
    ]  # fmt: skip
    people = old.get("groups") or ([], [])
    of_people, folds = people if isinstance(people, tuple) else groups_upgraded(people)
    more, vectors = [*more, *of_people], [*vectors, *folds]
    document["cells"] = [*plain, *encode_value(more, "cells")]
    document["vectors"] = encode_value(vectors, "vectors")
    return document


def standing_of(test: Any, said: Any, info: Any, *footing: Any) -> Any:
    """Return the section on who is behind, with the figures of the sites that it rests on."""
    found, ends = standing(test, said, info, *footing)
    for site, of in (found or {"sites": {}})["sites"].items():
        value = test[site][info["primary_metric"]]
        of |= {"value": value, "low": ends[site][0], "high": ends[site][1]}
        of["test_cases"] = (said.get(site) or {}).get("test_cases")
    return encode_value(found, "inequality")


def groups_upgraded(old: Mapping[str, Any]) -> tuple[list[Cell], list[Vector]]:
    """Return what ``summarise_groups`` returns, from the section of the first schema."""
    cells, vectors = list[Cell](), list[Vector]()
    places = [*(old.get("sites") or {}).items(), ("", old.get("pooled") or {})]
    for site, attribute, of in [(site, name, of) for site, found in places for name, of in found.items()]:
        for group, figures in [*of.get("groups", {}).items(), ("", of.get("all", {}))]:
            for metric, value in {"images": None, **figures}.items():
                low, high = of.get("intervals", {}).get(group, {}).get(metric, (None, None))
                if metric != "cases":
                    cells.append(Cell(metric, site, group=f"{attribute}={group}", value=value, low=low, high=high,
                                      cases=figures.get("cases")))  # fmt: skip
        within = of.get("within", {})
        for gap, value in of.get("gaps", {}).items():
            low, high = of.get("gap_intervals", {}).get(gap, (None, None))
            lowest = of.get("worst", {}).get(gap.removesuffix("_gap"), "") if gap.endswith("_gap") else ""
            part = within[gap]["lowest"] if gap in within else lowest
            cells.append(Cell(gap, site, group=attribute, part=part, value=value, low=low, high=high))
        for gap, one in within.items():
            name = gap.replace("_gap_within", "_of_both")
            cells += [Cell(name, other, group=attribute, value=0.0) for other in one["sites"]]
        for key, groups in of.get("undefined_rates", {}).items():
            rate, _, label = key.rpartition(" ")
            cells += [Cell(rate, group=f"{attribute}={group}", part=label, reason="undefined") for group in groups]
        vectors += [Vector(n, group=attribute, unit="parts", values=tuple(v)) for n, v in of.get("without", {}).items()]
    for site, names in (old.get("kept") or {}).items():
        for group, _, part in (name.partition("/") for name in names):
            where = "" if site == "all sites" else site
            cells.append(Cell("", where, group=group, part=part, reason="suppressed"))
    return cells, vectors


def as_before(document: Mapping[str, Any]) -> Document:
    """Return a document with its figures in the sections of the first schema, beside the cells."""
    results = RunResults.model_validate(document)
    info = results.info
    of: Document = dict(document)

    def metrics(model: str = LAST, split: str = TEST) -> Document:
        cells = pivot(
            (c for c in results.cells if (c.model, c.split) == (model, split) and not c.group), "site", "metric"
        )
        return {
            site: {
                name: c.value for name, c in own.items()
                if c.value is not None or not (c.reason in (NO_VALUE, NOT_COUNTED) or c.reason.startswith("suppressed"))
            }
            for site, own in cells.items()
        }  # fmt: skip

    def fairness(test: Document) -> Document:
        sites = sorted({*info.sites, *test})
        return {
            name: summarize(
                {s: math.nan if (v := test.get(s, {}).get(name)) is None else v for s in sites},
                higher_is_better=higher_is_better(name, info.higher_is_better),
                suppressed=[s for s, names in of["suppressed"].items() if name in names],
                linked=are_linked(results, name),
            ).as_dict()
            for name in dict.fromkeys(n for own in (*test.values(), *of["suppressed"].values()) for n in own)
        }

    of["suppressed"] = {}
    for cell in results.cells:
        if (cell.model, cell.split) == (LAST, TEST) and cell.reason.startswith("suppressed") and not cell.group:
            of["suppressed"].setdefault(cell.site, []).append(cell.metric)
    of["test"], of["validation"] = metrics(), metrics(split=VALIDATION)
    of["fairness"] = fairness(of["test"])
    if not results.cells:
        of["test"] = of["validation"] = of["fairness"] = None
    best = "best" in results.columns
    of["test_best"] = of["test"] if results.best and results.best.is_last else metrics("best") if best else None
    of["fairness_best"] = None if of["test_best"] is None else fairness(of["test_best"])
    of["last_rounds"], of["global_test"] = None, None
    if document.get("best"):
        of["best"] = {**document["best"], "validation": metrics("best", VALIDATION)}
    if results.last_rounds:
        test = metrics(f"last {len(results.last_rounds)}")
        names = [cell.metric for cell in results.cells if cell.split == GLOBAL]
        means = {name: statistics.fmean(global_values(results, name, last=True)) for name in names}
        of["last_rounds"] = {
            "rounds": results.last_rounds, "test": test, "fairness": fairness(test), "global_test": means,
        }  # fmt: skip
    of["inequality"] = None if "inequality" not in document or document["inequality"] is None else {
        **document["inequality"],
        "sites": {
            s: {**of_site, **{k: getattr(results.inequality.sites[s], k) for k in JOINED}}
            for s, of_site in document["inequality"]["sites"].items()
        },
    }  # fmt: skip
    if document.get("global_test"):
        cells = {c.metric: c for c in results.cells if c.split == GLOBAL}
        first = cells.get(info.primary_metric)
        of["global_test"] = {
            **document["global_test"], "metrics": {name: c.value for name, c in cells.items()},
            **({} if first is None else {"low": first.low, "high": first.high, "test_cases": first.cases,
                                         "metric": first.metric, "level": 0.95}),
        }  # fmt: skip
        if cells:
            counts = [one["images"] for one in document["global_test"]["lists"]]
            of["global_test"]["images"] = None if None in counts else sum(counts)
    draws = [v for v in results.vectors if v.unit in ("patients", "volumes", "images", "cases")]
    of["resampled"] = {v.site: list(v.values) for v in draws} or None
    of["resampled_units"] = {v.site: {"unit": v.unit, "count": v.count} for v in draws if v.count is not None} or None
    of["clinical"] = clinical_before(results.cells, results.vectors)
    of["groups"] = groups_before(results)
    return of


def clinical_before(cells: Any, vectors: Any = ()) -> Document:
    found = pivot((cell for cell in cells if cell.split == CLINICAL), "site", "part", "metric")
    tests = {name: own["auc_p_value"].value for name, own in found.pop("", {}).items()}
    bins = {
        v.site: [list(v.values[k : k + 3]) for k in range(0, len(v.values), 3)] for v in vectors if v.unit == "bins"
    }
    every: Document = {}
    for site, classes in found.items():
        for name, own in classes.items():
            figures: Document = {}
            for key, cell in own.items():
                figures[key] = cell.value
                if key == "auc" or key.startswith(("sensitivity_at", "specificity_at")):
                    figures |= {f"{key}_low": cell.low, f"{key}_high": cell.high}
            if name:
                figures["auc_p_value"] = tests.get(name)
            elif site in bins:
                figures["calibration"] = bins[site]
            every.setdefault(site, {})[name or ALL] = figures
    return every


def groups_before(results: RunResults) -> Document | None:
    attributes = attributes_of(results)
    withheld = [cell for cell in results.cells if cell.group and not cell.metric]
    if not attributes and not withheld:
        return None
    kept: Document = {}
    for cell in withheld:
        kept.setdefault(cell.site or "all sites", []).append(cell.group + f"/{cell.part}" * bool(cell.part))
    of: Document = {"attributes": {}, "sites": {}, "pooled": {}, "kept": kept}
    for attribute in attributes:
        places, between = groups_at(results, attribute), gaps_at(results, attribute)
        of["attributes"][attribute] = [group for group in places[""] if group]
        for site, groups in places.items():
            figures = {
                group: {"images": own["images"].value, "cases": own["images"].cases,
                        **{name: cell.value for name, cell in own.items() if name not in ("", "images")}}
                for group, own in groups.items()
            }  # fmt: skip
            gaps = {n: c for n, c in between.get(site, {}).items() if not n.endswith("_of_both")}
            one = {
                "all": figures.pop(""), "groups": figures,
                "gaps": {n: c.value for n, c in gaps.items()},
                "worst": {n.removesuffix("_gap"): c.part for n, c in gaps.items() if c.part and n.endswith("_gap")},
                "intervals": {g: {n: (c.low, c.high) for n, c in own.items() if n} for g, own in groups.items() if g},
                "gap_intervals": {n: (c.low, c.high) for n, c in gaps.items() if not n.startswith("es_")},
            }  # fmt: skip
            if site:
                of["sites"].setdefault(site, {})[attribute] = one
                continue
            one["within"] = {
                n: {"lowest": c.part,
                    "sites": [s for s, own in between.items() if n.replace("_gap_within", "_of_both") in own]}
                for n, c in gaps.items() if n.endswith("_within")
            }  # fmt: skip
            one["without"] = {
                v.metric: list(v.values) for v in results.vectors if v.unit == "parts" and v.group == attribute
            }
            one["undefined_rates"] = {}
            for cell in results.cells:
                if cell.reason == "undefined" and cell.group.partition("=")[0] == attribute:
                    one["undefined_rates"].setdefault(f"{cell.metric} {cell.part}", []).append(
                        cell.group.partition("=")[2]
                    )
            of["pooled"][attribute] = one
    return of
