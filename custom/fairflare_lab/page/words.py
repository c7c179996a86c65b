"""The page's summary: sentences that say no more than the intervals do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from fairflare.reporting.documents import Inequality
from fairflare.reporting.groups import captions
from fairflare.reporting.layout import counted, interval, number, p_value
from fairflare.reporting.no_effect import nothing_learnt
from fairflare.reporting.standing import more_unequal, tested, who_is_behind
from fairflare.reporting.values import in_words, title_of
from fairflare_lab.compare.differences import (
    BETTER,
    MEASURES,
    NOISE,
    NOT_KNOWN,
    ONE_SEED,
    OTHER_SITES,
    UNSEEN,
    WORSE,
    Difference,
)
from fairflare_lab.page.material import Material, PageRow
from fairflare_lab.page.outcome import intervals, test_images

VISIBLE = 0.005  # a smaller gap would be shown as 0.00
ENOUGH_SEEDS = 5
CALLED = {"average": "The average", "std": "The spread (std)", "worst": "The worst site"}


def synthetic(material: Material) -> str:
    """Which of the data are generated; empty: none is known to be."""
    runs = material.runs + material.others
    count = sum(run.info["synthetic"] for run in runs)
    if not count:
        return ""
    which = "The data are" if count == len(runs) else f"The data of {count} of {len(runs)} runs are"
    return f"{which} SYNTHETIC (generated images): these figures say nothing about patients."


def answer(material: Material) -> str:
    """What was found, in one sentence: who was fairer than the reference, and which site is behind."""
    if not material.tested:
        return "There are no test results, so nothing is said of fairness."
    label = material.reference or material.rows[0].label
    row = next(row for row in material.rows if row.label == label)
    said = [_fairer(material, label)] if len(material.rows) > 1 else []
    whose = f"With {label}, " if material.reference else f"{title_of(row.runs[0].document)}: "
    return ". ".join([*(f"{text[0].upper()}{text[1:]}" for text in said), whose + _behind(row, material)])


def _fairer(material: Material, reference: str) -> str:
    spreads = [d for d in material.differences if d.measure == "std"]
    if not any(math.isfinite(d.low) for d in spreads):
        return f"whether a method is fairer than {reference} cannot be said of these runs"
    lost = {d.label for d in material.differences if d.measure != "std" and d.verdict == WORSE}
    better = [
        f"{d.label} (spread {number(d.mean, (d.high - d.low) / 2)}"
        + (", but a worse average or worst site)" if d.label in lost else ")")
        for d in spreads
        if d.verdict == BETTER
    ]
    if better and all(d.label in lost for d in spreads if d.verdict == BETTER):
        return f"no method was fairer than {reference} without a loss: {', '.join(better)}"
    if better:
        return f"fairer than {reference} on these data: {', '.join(better)}"
    return f"no method was shown to be fairer than {reference} on these data"


def _behind(row: PageRow, material: Material) -> str:
    """Say which site is last, by how much, and whether chance explains that; or that nothing was learnt."""
    metric = in_words(material.metric)
    nothing = [text for run in row.runs for text in nothing_learnt(run.document, material.metric)]
    if len(nothing) == len(row.runs):
        return f"{nothing[0][0].lower()}{nothing[0][1:]}"
    known = [one for run in row.runs if (one := tested(run.document, material.metric))]
    sign = 1 if material.higher else -1
    gaps: dict[str, list[float]] = {}
    for one in known:
        for site, of in one["sites"].items():
            if of["expected"] is not None:
                gaps.setdefault(site, []).append(sign * (of["expected"] - of["value"]))
    if gaps:
        last = max(gaps, key=lambda site: statistics.fmean(gaps[site]))
        shown, together = (sum(found) for found in ([last in one["behind"] for one in known], map(more_unequal, known)))
        gap, equal = statistics.fmean(gaps[last]), statistics.fmean(one["chance_gap"] for one in known)
        side, end = ("below", "lowest") if material.higher else ("above", "highest")
        if gap < VISIBLE and not shown:
            what = f"no site is 0.01 or more {side} expectation"
        else:
            value, worst = row.at(last).mean, (min if material.higher else max)(row.at(site).mean for site in gaps)
            place = f"has the {end} {metric}" if value == worst else f"is furthest {side} its expectation in {metric}"
            away = f"{gap:.2f}" if gap >= VISIBLE else f"{gap:.1g}"
            equally = f"the {number(_expected(known, last))} expected if all sites were equal"
            what = f"{_site(last)} {place}, {number(value)}, {away} {side} {equally}"

        def runs(count: int) -> str:
            return f" in {count} of {len(known)} runs" if len(known) > 1 else ""

        if shown:
            return f"{what}. Chance does not explain that{runs(shown)}."
        if together:
            more = "" if len(known) > 1 else f" (p {p_value(known[0]['p_value'])})"
            return f"{what}. Together the sites are more unequal than chance explains{runs(together)}{more}."
        return f"{what}. That may be chance: the {end} of equally good sites would be about {equal:.2f} {side}."
    found = [summary for summary in row.summaries if math.isfinite(summary.worst)]
    if not found:
        return "no site has a value."
    last = found[0].worst_site if len(found) == 1 else statistics.mode(summary.worst_site for summary in found)
    if all(summary.range == 0 for summary in found):
        return f"all sites have the same {metric}."
    return f"{_site(last)} has the worst {metric}; whether chance explains that is not known."


def _expected(known: Sequence[Inequality], site: str) -> float:
    """Return what a site is expected to have if all sites were equal, on average over runs."""
    told = [one["sites"][site]["expected"] for one in known if site in one["sites"]]
    return statistics.fmean(value for value in told if value is not None)


def _site(name: str) -> str:
    """A site's name in a sentence, which says that it is one."""
    return name if name.lower().startswith("site") else f"site {name}"


def of_run(material: Material) -> list[str]:
    """What one run reached."""
    (row,) = material.rows
    (run,) = row.runs
    document, rounds = run.document, counted(len(run.rounds), "round")
    ends = {
        "completed": f"completed after {rounds}.",
        "running": f"goes on, or was cut off, after {rounds}: nothing here is final.",
        "failed": f"FAILED after {rounds}: {document['reason'] or 'no reason is recorded'}",
    }
    lines = [f"The run {ends[document['status']]}"]
    if not material.tested:
        return [*lines, "There are no test results."]
    (found,) = row.summaries
    which = "each site's own model" if run.info["measured"] == "personal" else "the last common model"
    lines.append(
        f"{in_words(material.metric)} on the sites' test splits, of {which}: {number(found.mean)} on average over "
        f"{found.num_sites} sites, each counting once; standard deviation between sites {number(found.std)}; worst "
        f"value {number(found.worst)} ({found.worst_site}), best {number(found.best)} ({found.best_site})."
    )
    if material.metric == run.info["primary_metric"]:
        lines += _measured_on(material) + who_is_behind(document)[:1]
    lines += captions(document)  # of groups of people, where these were asked for
    if found.excluded:
        lines.append(f"Without a value, and not in these figures: {', '.join(found.excluded)}.")
    if found.suppressed:
        kept = ", ".join(found.suppressed)
        lines.append(f"Suppressed, fewer cases than the site's min_cases, and not in these figures: {kept}.")
    lines.append("This is one run: how much of it is luck of the seed, it cannot say (fairflare compare --seeds).")
    return lines


def _measured_on(material: Material) -> list[str]:
    """How many independent cases and images the figures are of."""
    sites = intervals(material).values()
    counts = {
        "cases": [int(site["test_cases"]) for site in sites if site["test_cases"] is not None],
        "images": list(test_images(material).values()),
    }
    if counts["cases"] == counts["images"]:
        del counts["images"]
    told = [
        f"{sum(of)} test {what}, {' to '.join(map(str, dict.fromkeys((min(of), max(of)))))} at a site"
        for what, of in counts.items()
        if of
    ]
    return [f"Measured on {'; '.join(told)}."] if told else []


def of_comparison(material: Material) -> list[str]:
    """Who is better than the reference, beyond noise.

    Args:
        material: with a reference.
    """
    found = material.differences
    row = next(row for row in material.rows if row.label == material.reference)
    seeds = sorted({run.seed for run in material.runs if run.seed is not None})
    lines = [
        f"{counted(len(material.rows), 'method')}, {counted(len(material.runs), 'complete run')}, "
        f"seed{'s' if len(seeds) != 1 else ''} "
        f"{', '.join(map(str, seeds)) or 'not recorded'}. {in_words(material.metric)} on the test splits; "
        f"{'higher' if material.higher else 'lower'} is better.",
        *_measured_on(material),
        f"{row.label}, which the others are compared with, has {_reached(row)}.",
    ]
    others = [other.label for other in material.rows if other.label != material.reference]
    without = [label for label in others if not any(d.label == label for d in found)]
    if all(d.verdict == ONE_SEED for d in found) and found:
        lines.append(
            "There is one seed only, so nothing can be said of noise, and no method can be called better or worse."
        )
        return [*lines, *_unpaired(without, row.label)]
    by_measure = {measure: [d for d in found if d.measure == measure] for measure in MEASURES}
    lines += [
        _measure_in_words(measure, of, row.label, in_words(material.metric)) for measure, of in by_measure.items() if of
    ]
    tests = sum(math.isfinite(d.p_holm) for d in found if d.measure in MEASURES)
    if tests > 1:
        lines.append(
            f"Better and worse are told after Holm's correction for {tests} tests: were there no difference anywhere, "
            "one page in twenty would have one of these words by luck."
        )
    return [*lines, *_unpaired(without, row.label)]


def _unpaired(labels: Sequence[str], reference: str) -> list[str]:
    return [f"No seed in common with {reference}, so not compared: {', '.join(labels)}."] if labels else []


def _reached(row: PageRow) -> str:
    mean, std, worst = (row.over(attribute) for attribute in ("mean", "std", "worst"))
    if not math.isfinite(mean.mean):
        return "no value"
    count = sum(math.isfinite(summary.mean) for summary in row.summaries)
    return (
        f"{number(mean.mean, mean.sd)} on average over the sites, a standard deviation of {number(std.mean, std.sd)} "
        f"between them, and {number(worst.mean, worst.sd)} at the worst site"
        + (f" (means ± standard deviation over {count} seeds)" if count > 1 else "")
    )


def _measure_in_words(measure: str, found: Sequence[Difference], reference: str, metric: str) -> str:
    more = f" (use {ENOUGH_SEEDS} seeds or more)" if all(len(d.values) < ENOUGH_SEEDS for d in found) else ""
    verdicts: dict[str, tuple[str, Callable[[Difference], str]]] = {  # how it is said, and what behind each row
        BETTER: (f"better than {reference}", lambda d: f" ({interval(d.low, d.high, d.mean)})"),
        WORSE: (f"worse than {reference}", lambda d: f" ({interval(d.low, d.high, d.mean)})"),
        NOISE: (NOISE, lambda d: f" (a difference of {number(d.smallest)} would have been seen)"),
        UNSEEN: (f"{UNSEEN}, as only a difference larger than {metric} itself could have been detected{more}",
                 lambda d: ""),
        OTHER_SITES: ("not the same sites, so nothing is said", lambda d: ""),
        ONE_SEED: ("one common seed, so nothing can be said", lambda d: ""),
        NOT_KNOWN: ("how sure is not known", lambda d: f" ({number(d.mean, sign='+')})"),
    }  # fmt: skip
    parts = [
        f"{said}: {', '.join(d.label + about(d) for d in of)}"
        for verdict, (said, about) in verdicts.items()
        if (of := [d for d in found if d.verdict == verdict])
    ]
    return f"{CALLED[measure]}: {'; '.join(parts)}."
