"""Test the global test: images of no single site, measured once, on the model that all sites share."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import accuracy_score, balanced_accuracy_score, recall_score, roc_auc_score

from fairflare.base.task import SPLIT_GLOBAL
from fairflare.data.datalist import load_datalist
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.transports.local import run_local
from fairflare.reporting.table import fairness_table
from fairflare.reporting.values import global_values
from fairflare_lab.compare.comparison import compare, comparison_of
from fairflare_lab.compare.rows import row_of
from fairflare_lab.page import outcome
from fairflare_lab.page.content import Table
from fairflare_lab.page.material import describe_run
from tests.federation.network import Run, misbehave
from tests.tiny import model_in, run_document
from tests.unit.report_runs import read, read_all

SITES = ["site-1", "site-2", "site-3"]
NAMES = ["a", "b", "c"]
GROUPS = {"head": [0], "rest": [1, 2]}
SMALL: dict[str, Any] = {
    "image_size": [33, 33], "features": [4, 4, 4, 4], "num_classes": 3, "batch_size": 8, "local_epochs": 1,
}  # fmt: skip


def site_with(root: Path, site: str, lists: dict[str, list[int]], seed: int, **more: Any) -> None:
    """Make a site's folder with images of these classes by list; lists of the same name have the same images."""
    content: dict[str, Any] = {"class_names": NAMES, "class_groups": GROUPS, **more}
    for split, labels in lists.items():
        content[split] = []
        for index, label in enumerate(labels):
            name = f"images/{split if split == SPLIT_GLOBAL else f'{site}_{split}'}_{seed}_{index}.png"
            (root / site / "images").mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng([seed, index, len(split)]).integers(0, 200, (8, 8, 3))
            pixels[..., label] += 40
            Image.fromarray(pixels.astype(np.uint8)).save(root / site / name)
            content[split].append({"image": name, "label": label})
    (root / site / "datalist.json").write_text(json.dumps(content))


def own_lists(number: int) -> dict[str, list[int]]:
    return {"training": [0, 1, 2] * 4, "validation": [0, 1, 2], "test": [0, 1, 2, number % 3]}


def federation(root: Path, of_all: dict[str, tuple[list[int], int]], **more: Any) -> dict[str, Any]:
    """Make sites; ``of_all``: for each site with a global list, its classes and the seed of its images."""
    for number, site in enumerate(SITES):
        lists = own_lists(number)
        site_with(root, site, lists, number, **more)
        if site in of_all:
            labels, seed = of_all[site]
            site_with(root, f"{site}-all", {SPLIT_GLOBAL: labels}, seed)
            content = json.loads((root / site / "datalist.json").read_text())
            content |= {SPLIT_GLOBAL: json.loads((root / f"{site}-all/datalist.json").read_text())[SPLIT_GLOBAL]}
            for entry in content[SPLIT_GLOBAL]:
                (root / f"{site}-all" / entry["image"]).rename(root / site / entry["image"])
            (root / site / "datalist.json").write_text(json.dumps(content))
    return {"sites": {site: {"data_root": str(root / site)} for site in SITES}}


def plan(method: str = "fed_avg", **options: Any) -> Plan:
    settings = {**SMALL, **options.pop("settings", {})}
    return make_plan(method, task="classification", sites=SITES, settings=settings, **{"num_rounds": 1, **options})


def done(made: Plan, folder: Path, local: dict[str, Any]) -> tuple[dict[str, Any], torch.nn.Module]:
    place = run_local(made, folder, local)
    model = made.task.build_model()
    model.load_state_dict(model_in(place))
    return run_document(place), model


def outputs(made: Plan, model: torch.nn.Module, local: dict[str, Any], sites: list[str]) -> tuple[Any, Any]:
    found, truth = [], []
    for site in sites:
        data = made.task.open_site(site, local["sites"][site])
        for images, labels in data.batches(SPLIT_GLOBAL, batch_size=5):
            with torch.no_grad():
                found.append(torch.softmax(model.eval()(images).double(), 1))
            truth.append(labels)
    return torch.cat(truth).numpy(), torch.cat(found).numpy()


SHARES = {"site-1": ([0] * 9 + [1] * 3, 7), "site-2": ([0] * 2 + [1] * 5 + [2] * 4, 8), "site-3": ([2] * 6 + [1], 9)}


def test_lists_of_several_sites_are_pooled_as_one(tmp_path: Path) -> None:
    """Compare with scikit-learn on all images together; a mean over the sites would be another number."""
    local = federation(tmp_path / "data", SHARES)
    made = plan(num_rounds=2, test_last=2)
    results, model = done(made, tmp_path / "run", local)
    truth, probabilities = outputs(made, model, local, SITES)
    told = probabilities.argmax(1)
    recalls = recall_score(truth, told, average=None)
    found = results["global_test"]["metrics"]
    assert found["accuracy"] == pytest.approx(accuracy_score(truth, told), rel=1e-12)
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(truth, told), rel=1e-12)
    assert [found[f"recall_{name}"] for name in NAMES] == pytest.approx(recalls.tolist(), rel=1e-12)
    assert found["head"] == pytest.approx(recalls[0])
    assert found["rest"] == pytest.approx(recalls[1:].mean())
    assert found["all"] == pytest.approx((recalls[0] + recalls[1:].mean()) / 2)
    assert found["loss"] == pytest.approx(-np.log(probabilities[np.arange(len(truth)), truth]).mean(), rel=1e-6)
    assert not {"auc_ovo", "f1", "precision_macro"} & set(found)  # of sums alone nobody knows them
    assert (results["global_test"]["images"], results["global_test"]["test_cases"]) == (len(truth), len(truth))
    assert [one["measured_at"] for one in results["global_test"]["lists"]] == SITES
    assert not any("global/" in name for metrics in results["test"].values() for name in metrics)
    # Of the last two models, the mean.
    first = results["rounds"][0]["global_test"]
    assert set(first) == set(found)
    mean = results["last_rounds"]["global_test"]["accuracy"]
    assert mean == pytest.approx((first["accuracy"] + found["accuracy"]) / 2)


def test_one_list_at_all_sites_is_measured_once(tmp_path: Path) -> None:
    same = ([0] * 5 + [1] * 6 + [2] * 4, 7)
    local = federation(tmp_path / "data", dict.fromkeys(SITES, same))
    prints = {load_datalist(tmp_path / "data" / s, site=s, class_labels=True).fingerprint(SPLIT_GLOBAL) for s in SITES}
    assert len(prints) == 1
    made = plan()
    results, model = done(made, tmp_path / "run", local)
    (one,) = results["global_test"]["lists"]
    assert one == {"measured_at": "site-1", "sites": SITES, "images": 15}
    assert [(p["name"], p["asked"]) for p in results["phases"]] == [("validate", 3), ("validate", 1)]
    truth, probabilities = outputs(made, model, local, SITES[:1])
    found = results["global_test"]["metrics"]
    assert found["accuracy"] == pytest.approx(accuracy_score(truth, probabilities.argmax(1)))
    area = roc_auc_score(truth, probabilities, multi_class="ovo", average="macro")
    assert found["auc_ovo"] == pytest.approx(area, rel=1e-9)
    low, high = results["global_test"]["low"], results["global_test"]["high"]
    assert low < found["balanced_accuracy"] < high or (low, high) == (None, None)
    table = fairness_table(read(**results))
    row = next(line.split() for line in table.splitlines() if line.startswith("global test"))
    assert row[2] == f"{found['balanced_accuracy']:.3f}"
    assert "Global test: the common model on 15 images that site-1, site-2, site-3 have, measured once." in table
    exact = list(csv.reader(io.StringIO(fairness_table(read(**results), style="csv"))))
    own = next(dict(zip(exact[0], row, strict=True)) for row in exact if row[0] == "global test")
    assert (float(own["balanced_accuracy"]), own["cases"]) == (found["balanced_accuracy"], "15")
    section = outcome.results(describe_run(read(**results)))
    assert section is not None
    (shown,) = (part for part in section.parts if isinstance(part, Table) and part.name == "sites")
    assert shown.columns[1] == "balanced_accuracy"
    assert next(row[1] for row in shown.totals if row[0] == "global test") == found["balanced_accuracy"]


def test_another_file_size_or_label_is_another_list(tmp_path: Path) -> None:
    def print_of(labels: list[int], seed: int, folder: str) -> str:
        federation(tmp_path / folder, {"site-1": (labels, seed)})
        root = tmp_path / folder / "site-1"
        return load_datalist(root, site="site-1", class_labels=True).fingerprint(SPLIT_GLOBAL)

    first = print_of([0, 1, 2], 7, "a")
    assert print_of([0, 1, 2], 7, "b") == first
    assert print_of([0, 1, 1], 7, "c") != first
    assert print_of([0, 1, 2], 8, "d") != first
    assert print_of([0, 1], 7, "e") != first


@pytest.mark.long
def test_comparisons_have_the_global_test_as_columns(tmp_path: Path) -> None:
    local = federation(tmp_path / "data", dict.fromkeys(SITES, ([0] * 5 + [1] * 6 + [2] * 4, 7)))
    runs = []
    for seed in (0, 1):
        for method in ("fed_avg", "fed_prox"):
            made = plan(method, seed=seed, test_last=2, num_rounds=2)
            runs.append(done(made, tmp_path / f"{method}{seed}", local)[0])
    of = [run["global_test"]["metrics"] for run in runs[::2]]
    rows = list(csv.DictReader(io.StringIO(compare(read_all(runs), style="csv", per_site=False))))
    assert float(rows[0]["global/balanced_accuracy mean"]) == np.mean([m["balanced_accuracy"] for m in of])
    assert float(rows[0]["global/head sd"]) == pytest.approx(np.std([m["head"] for m in of]))
    text = compare(read_all(runs))
    assert "global/accuracy" in text
    assert text.count("Global test: the common model on 15 images") == 1
    tests = [of for run in runs[::2] for of in (run["rounds"][0]["global_test"], run["global_test"]["metrics"])]
    values = [test["accuracy"] for test in tests]
    assert [v for run in read_all(runs[::2]) for v in global_values(run, "accuracy", last=True)] == values
    row = row_of("a", read_all(runs[::2]), "global/head+global/rest", last=True)  # as the paper's own tables ask for it
    both = [(test["head"] + test["rest"]) / 2 for test in tests]
    assert [summary.mean for summary in row.summaries] == pytest.approx(both)
    asked = comparison_of(read_all(runs), metric="global/head+global/rest")
    assert [d.measure for d in asked.differences if d.label == asked.rows[1].label][:1] == ["average"]
    older = [{**run, "cells": [cell for cell in run["cells"] if cell["split"] != "global"]} for run in runs]
    assert "global/" not in compare(read_all(older))


@pytest.mark.many
@pytest.mark.parametrize("method", ["fed_bn", "ditto", "solo", "cffl"])
def test_only_a_model_that_all_share_is_measured(tmp_path: Path, method: str) -> None:
    local = federation(tmp_path / "data", SHARES)
    results, model = done(made := plan(method), tmp_path / "run", local)
    found = results["global_test"]
    if method == "ditto":  # its common model, not those of the sites
        truth, probabilities = outputs(made, model, local, SITES)
        assert found["metrics"]["accuracy"] == pytest.approx(accuracy_score(truth, probabilities.argmax(1)))
        return
    assert found["metrics"] == {}
    assert "No global test: no model is the same at all sites" in fairness_table(read(**results))
    assert [phase["asked"] for phase in results["phases"]] == [3]


@pytest.mark.long
def test_too_few_cases_and_classes_that_stay_at_home(tmp_path: Path) -> None:
    local = federation(tmp_path / "data", SHARES)
    for block in local["sites"].values():
        block["classes"] = "all"  # of what a site withholds nobody can see that the site looked for it
    local["sites"]["site-3"]["min_cases"] = 8  # it has 7 images: not a word of this list leaves
    results, model = done(made := plan(), tmp_path / "few", local)
    assert SPLIT_GLOBAL in results["info"]["said"]["site-3"]["suppressed"]
    assert results["info"]["said"]["site-3"]["global_list"] is None
    assert [one["measured_at"] for one in results["global_test"]["lists"]] == SITES[:2]
    truth, probabilities = outputs(made, model, local, SITES[:2])
    assert results["global_test"]["metrics"]["accuracy"] == pytest.approx(
        accuracy_score(truth, probabilities.argmax(1))
    )
    del local["sites"]["site-3"]["min_cases"]
    local["sites"]["site-2"]["metrics_by_class"] = False
    results, model = done(plan(), tmp_path / "home", local)
    truth, probabilities = outputs(made, model, local, SITES)
    found = results["global_test"]["metrics"]
    assert found["accuracy"] == pytest.approx(accuracy_score(truth, probabilities.argmax(1)))
    assert not {"balanced_accuracy", "head", "recall_a"} & set(found)  # made of what stays


def check_says(*sites: str, fingerprint: str = "x") -> Any:
    from fairflare.exchange.messages import SiteReply, encode_reply

    def answer(site: str, task: Any) -> Any:
        lists = ["training", "validation", "test", *([SPLIT_GLOBAL] if site in sites else [])]
        facts: dict[str, Any] = {"splits": lists, "images": [10] * len(lists)}
        facts |= {"global_list": fingerprint} if site in sites else {}
        return encode_reply(SiteReply("ok", report=facts), task.current_round)

    return answer


def test_where_a_site_fails_the_next_one_is_asked(tmp_path: Path) -> None:
    def broken(site: str, name: str, task: Any) -> Any:
        from tests.federation.network import good

        return "gone" if task.meta["measure"] == [SPLIT_GLOBAL] else good(site, name, task)

    run = Run(tmp_path / "a", misbehave("site-1", "validate", broken), num_rounds=1, min_sites=2)
    run.net.ready = check_says("site-1", "site-2", "site-3")
    results = run().results
    assert [sites for name, sites in run.net.asked if name == "validate"] == [SITES, SITES[:1], SITES[1:2]]
    found = results["global_test"]
    assert found["metrics"] == {"dice": pytest.approx(0.4)}
    assert [one["measured_at"] for one in found["lists"]] == ["site-2"]
    assert found["reason"] == ""
    alone = Run(tmp_path / "b", misbehave("site-1", "validate", broken), num_rounds=1, min_sites=2)
    alone.net.ready = check_says("site-1")
    found = alone().results["global_test"]
    assert found["metrics"] == {}
    assert "gone" in found["reason"]
    assert "No global test: gone" in fairness_table(read(**alone.results))
    without = Run(tmp_path / "c", num_rounds=1)().results
    assert without["global_test"] is None
