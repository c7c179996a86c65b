"""Test every method, and every pair of capabilities: a run is done, or is refused before its first round."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter, ValidationError
from torch import nn

import fairflare
from fairflare.base.acting import needs_of
from fairflare.base.aspect import ASPECTS, Aspect, refusals
from fairflare.base.settings import build, field_names, hints_of
from fairflare.data.datalist import write_datalist
from fairflare.exchange.messages import SiteTask, address, decode_task, encode_task
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.collecting.transport import Listener
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.plan.refusals import facts_of
from fairflare.federation.plan.run_settings import RunSettings, WithoutTraining
from fairflare.federation.server import opening
from fairflare.federation.transports import isolation
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.rule import TwoPhase
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.privacy import ledger
from fairflare.reporting.notes import run_notes
from fairflare.reporting.results import read_results
from tests.methods.own import Plane, Points
from tests.tiny import RESULTS, model_in, run_document

SITES = ("site-1", "site-2", "site-3", "site-4")
SMALL: dict[str, Any] = {
    "image_size": [33, 33], "in_channels": 1, "features": [4, 4, 8, 8], "num_classes": 3, "local_epochs": 1,
    "batch_size": 8,
}  # fmt: skip
WITHOUT_NORMS: dict[str, Any] = {"network": "vit_mini", "image_size": [32, 32], "features": None}
#: Aspects that are tried elsewhere, and where.
ELSEWHERE = {
    "script": "tests/flare/test_script_recipe.py", "products": "tests/federation/test_adapters_run.py",
    "trim": "trimmed, below",
}  # fmt: skip
#: Settings of aspects that a value alone does not switch on; what is in a site's file or data :class:`World` writes.
SETTINGS: dict[str, dict[str, Any]] = {"privacy": WITHOUT_NORMS, "test_global": {}, "clinical": {}}


def switched_on(one: Aspect) -> dict[str, Any]:
    """Return settings that switch an aspect on: its first value, or the first of its setting's type that does."""
    if one.on in SETTINGS:
        return SETTINGS[one.on]
    hint = next(hints_of(cls)[one.on] for cls in (RunSettings, LocalTraining) if one.on in field_names(cls))
    tried = (*one.values, *get_args(hint), True, 1, ["tone"])
    return next({one.on: value} for value in tried if one.is_on({one.on: value}) and fits(hint, value))


def fits(hint: Any, value: Any) -> bool:
    try:
        return bool(TypeAdapter(hint).validate_python(value) == value)
    except ValidationError:
        return False


#: Settings of each capability, first of all aspects that are declared.
CAPABILITIES: dict[str, dict[str, Any]] = {
    **{one.on: switched_on(one) for one in ASPECTS if one.on not in ELSEWHERE},
    "trimmed": {"aggregate": "trimmed_mean", "trim": 0.2},
    "trainable": {"exchange": "trainable"},
    "partial": {},
    "min_cases": {"min_cases": 2},
    "findings": {"findings": ["x", "y", "z"], "num_classes": None},
}
#: Pairs that are refused, and words of the reason; all others run.
REFUSED = {
    ("personalise", "secure"): "may send a site's own model",
    ("secure", "unlabelled"): "weighs sites without a report",
    ("aggregate", "secure"): "needs every site's model",
    ("secure", "trimmed"): "needs every site's model",
    ("norm_statistics", "privacy"): "norms would be told",
    ("personalise", "privacy"): "its choice of steps is not counted",
    ("privacy", "unlabelled"): "it is not counted",
    ("crt_rounds", "privacy"): "draws classes in equal parts, which differential privacy",
    ("findings", "groups"): "groups needs a task with a result for each image",
    ("findings", "unlabelled"): "one class an image",
    ("crt_rounds", "findings"): "crt_rounds needs a classifier",
}
PAIRS = [pair for pair in itertools.combinations(sorted(CAPABILITIES), 2) if {*pair} != {"aggregate", "trimmed"}]
#: Settings of methods that need some at this size, or are quicker with them.
OWN: dict[str, dict[str, Any]] = {
    "fed_mrl": {"weighting.grid": [2, 2]},
    "fed_lwr_last_layer": {"only_layer": "encoder.layer4"},
    "fair_lora": {"adapters.rank": 2},
    "creff": {"gradient_repeats": 1, "classifier_epochs": 5, "feature_steps": 5},
}
#: Methods that are refused with extra rounds, or with secure sums, and words of the reason.
WITHOUT_CRT = {"cffl": "a model of its own", "cgsv": "a model of its own", "creff": "retrains a classifier itself"}


class World:
    """Write the sites' images once for each kind of labels: textures of three classes, with people of two groups."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of = cache(self._written)

    def _written(self, findings: bool, partial: bool, unlabelled: bool, common: bool) -> dict[str, dict[str, Any]]:
        root = self.folder / f"{findings}-{partial}-{unlabelled}-{common}"
        return {site: self._site(root / site, number, findings, partial and number == 1,
                                 {"unlabelled": 4 * unlabelled, "test_global": 6 * (common and not number)})
                for number, site in enumerate(SITES)}  # fmt: skip

    def _site(self, place: Path, number: int, findings: bool, partial: bool, more: Mapping[str, int]) -> dict[str, Any]:
        place.mkdir(parents=True)
        splits: dict[str, list[dict[str, Any]]] = {}
        for split, count in {"training": 9, "validation": 10, "test": 6, **more}.items():
            splits[split] = []
            for k in range(count):
                code = k % (2 if partial and not findings else 3)
                pixels = np.random.default_rng([number, k, len(split)]).integers(0, 255, (33, 33), np.uint8)
                pixels[10 * code : 10 * code + 10] //= 4
                Image.fromarray(pixels).save(place / f"{split}{k}.png")
                label: Any = [(k >> bit) & 1 for bit in range(3)] if findings else code
                if findings and partial:
                    label[2] = None
                entry = {"image": f"{split}{k}.png", "patient": f"{number}{split}{k}"}
                told = {"label": label, "attributes": {"tone": "ab"[k // 2 % 2]}}
                splits[split].append(entry if split == "unlabelled" else entry | told)
        tone = {"tone": {"kind": "category", "values": ["a", "b"]}}
        lists = {name: entries for name, entries in splits.items() if entries}
        write_datalist(place / "datalist.json", lists, class_names=["x", "y", "z"], attributes=tone)
        return {"data_root": str(place), **({"classes": [0, 1]} if partial and not findings else {})}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count privacy by a plain sum of steps, which needs no opacus; and fork processes, which import nothing anew."""
    monkeypatch.setattr(ledger, "epsilon", lambda history, *_: (float(sum(c[2] for c in history)), "sum"))
    forking = multiprocessing.get_context("fork")
    monkeypatch.setattr(isolation.multiprocessing, "get_context", lambda kind: forking)
    monkeypatch.setattr(isolation, "LAST_WORDS", 0.1)  # a fork holds its siblings' pipes, which so never end


class Phases(Listener):
    """Keep the names of the phases that a run began, and its notes."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.notes: list[str] = []

    def event(self, kind: str, details: Mapping[str, Any]) -> None:
        self.begun += [details["phase"]] if kind == "phase" else []
        self.notes += [details["text"]] if kind == "note" else []


def done(
    folder: Path, world: World, method: str = "fed_avg", capabilities: Collection[str] = (), sites: int = 3,
    jobs: int = 1, change: Callable[[dict[str, Any]], Any] = lambda blocks: None, settings: Mapping[str, Any] = {},
    **options: Any,
) -> dict[str, Any] | str:  # fmt: skip
    """Return the results of a run, or the reason why it was refused before any training; fail if it fails later."""
    kind = tuple(name in capabilities for name in ("findings", "partial", "unlabelled", "test_global"))
    blocks = {site: {**block} for site, block in world.of(*kind).items() if site in SITES[:sites]}
    if "privacy" in capabilities:
        blocks["site-1"] |= {"privacy": {"epsilon": 1000, "noise": 2.0}, "state_root": str(folder / "root")}
    change(blocks)
    asked = {**SMALL, **OWN.get(method, {})}
    for name in capabilities:
        asked |= CAPABILITIES[name]
    asked = {name: value for name, value in {**asked, **settings}.items() if value is not None}
    seen, usual = Phases(), {"num_rounds": 2, "min_sites": 2, "bootstrap": 0}
    try:
        plan = make_plan(method, task="classification", sites=sites, settings=asked, **{**usual, **options})
        results = run_document(run_local(plan, folder / "run", {"sites": blocks}, listeners=[seen], jobs=jobs))
    except (ValueError, RoundFailed) as error:
        if "train" in seen.begun:
            pytest.fail(f"it failed after its first round had begun: {error}")
        return str(error)
    assert results["status"] == "completed"
    absent = {left["site"] for left in results["left_out"]}
    assert {left["site"] for of in results["rounds"] for left in of["left_out"]} <= absent
    assert absent <= {site for site in blocks if blocks[site]["data_root"] == NOWHERE}
    return results


NOWHERE = "/nowhere"  # a folder that is not there: the site cannot take part


def absent(blocks: dict[str, Any]) -> None:
    blocks[max(blocks)]["data_root"] = NOWHERE


def test_all_capabilities_are_named() -> None:
    assert {name for pair in REFUSED for name in pair} <= {*CAPABILITIES}
    assert {*OWN, *WITHOUT_CRT} <= {*all_methods()}


def by_the_table(capabilities: Collection[str]) -> str:
    """Return why the table of aspects refuses capabilities together; empty if it does not."""
    asked = {name: value for one in capabilities for name, value in CAPABILITIES[one].items()}
    run = {name: value for name, value in asked.items() if name in field_names(RunSettings)}
    half = {name: value for name, value in asked.items() if name in field_names(LocalTraining)}
    of_task = {name: value for name, value in asked.items() if name == "findings"}
    task = make_plan("fed_avg", task="classification", settings=of_task).task
    more = {"no_outcomes": "one with several findings an image" * ("findings" in asked)}
    more |= {"privacy": "site-1"} if "privacy" in capabilities else {}
    facts = facts_of(RunSettings(**run), FedAvg(), LocalTraining(**half), task, **more)
    return next(refusals(facts), "").removesuffix("; set crt_rounds=0")


@pytest.mark.many("privacy+secure", "groups+secure", "crt_rounds+unlabelled", "crt_rounds+findings")
@pytest.mark.parametrize("capabilities", [*PAIRS, *((name,) for name in CAPABILITIES)], ids="+".join)
def test_every_pair_of_capabilities_runs_or_is_refused_beforehand(
    capabilities: tuple[str, ...], world: World, tmp_path: Path
) -> None:
    """Check that a run is refused exactly where the table of aspects says so, with the table's text."""
    found, why = done(tmp_path, world, capabilities=capabilities), by_the_table(capabilities)
    if {*capabilities} == {"partial", "secure"}:  # two sites of this world annotate a structure, known in the check
        why = "a secure sum of its weights would show theirs: it needs 3. Leave it out of the task"
    assert isinstance(found, str) is bool(why), found
    assert why in str(found)


def test_the_table_refuses_these_pairs() -> None:
    found = {pair: why for pair in PAIRS if (why := by_the_table(pair))}
    assert found.keys() == REFUSED.keys()
    assert all(REFUSED[pair] in why for pair, why in found.items())


MADE_UP = """MADE_UP = Aspect("made up", "made_up", settings=("made_up",), excludes=(
    Excludes("aggregate", "made_up needs the mean, not {aggregate}", but=("mean",)),
))
"""
#: Changes of a copy of the package: file, a text in it, and what is written before this text.
CHANGES = [
    ("federation/plan/run_settings.py", '    secure: Literal["", "sums"] = ""', "    made_up: Flag = False\n"),
    ("federation/plan/run_settings.py", "        secure: ``", "        made_up: whether the made-up aspect is on.\n"),
    ("base/aspect.py", "#: All aspects of a run.", MADE_UP),
    ("base/aspect.py", "    PRIVATE,", "    MADE_UP,\n"),
]
TRIES = """
from fairflare.federation.plan.plan import make_plan
print(make_plan("fed_avg", settings={"made_up": True}).run.made_up)
make_plan("fed_avg", settings={"made_up": True, "aggregate": "median"})
"""


def test_a_made_up_aspect_is_one_setting_and_one_row(tmp_path: Path) -> None:
    """Add a setting and an entry of the table to a copy of the package: no other file has to know the aspect."""
    package = tmp_path / "fairflare"
    shutil.copytree(Path(fairflare.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    assert len({file for file, *_ in CHANGES}) == 2
    for file, before, added in CHANGES:
        content = (package / file).read_text()
        assert content.count(before) == 1
        (package / file).write_text(content.replace(before, added + before))
    tried = subprocess.run(
        [sys.executable, "-c", TRIES], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert tried.stdout == "True\n"
    assert tried.stderr.endswith("ValueError: made_up needs the mean, not median\n")


@pytest.mark.many("scaffold")
@pytest.mark.parametrize("method", all_methods())
def test_every_method_has_the_same_bits_in_processes_and_extra_rounds_or_is_refused(
    method: str, world: World, tmp_path: Path
) -> None:
    """Compare the models of two rounds and an extra one, of sites one after the other and in two processes."""
    with_crt = done(tmp_path / "0", world, method, ["crt_rounds"])
    if method in WITHOUT_CRT:
        assert WITHOUT_CRT[method] in str(with_crt)
        assert not isinstance(done(tmp_path / "0", world, method), str)
    else:
        assert not isinstance(with_crt, str), with_crt
    some = done(tmp_path / "1", world, method, [] if method in WITHOUT_CRT else ["crt_rounds"], jobs=2)
    assert not isinstance(some, str), some
    first, second = (model_in(tmp_path / run / "run" / RESULTS) for run in "01")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())


@pytest.mark.many("fed_lwr", "cgsv")
@pytest.mark.parametrize("method", all_methods())
def test_every_method_without_one_site_under_secure_sums(method: str, world: World, tmp_path: Path) -> None:
    """Check a site that is known to be absent: of three sites none trains; of four the others do, or are too few."""
    options: dict[str, Any] = {
        "capabilities": ["secure"],
        "change": absent,
        "require_all_sites": False,
        "num_rounds": 1,
    }
    why = done(tmp_path / "three", world, method, **options)
    found = done(tmp_path / "four", world, method, sites=4, **options)
    rule = build(all_methods()[method].rule, all_methods()[method].server)
    if rule.reads_models or isinstance(rule, TwoPhase):
        assert isinstance(found, str)
        needs = str(rule.reads_models or "3 of 4 site(s) ready, min_sites=3, secure sums of this method need 4 sites")
        assert needs in found
    else:
        assert not isinstance(found, str), found
        assert [of["accepted"] for of in found["rounds"]][:1] == [list(SITES[:3])]
    assert str(rule.reads_models or "2 of 3 site(s) ready, min_sites=3") in str(why)


# ------------------------------------------------------------------------------------------------ known beforehand


def test_secure_sums_need_three_sites_whatever_is_set() -> None:
    assert [RunSettings(secure="sums", min_sites=n).min_sites for n in (1, 2, 3, 5)] == [3, 3, 3, 5]
    assert (RunSettings(min_sites=2).min_sites, WithoutTraining(secure="sums").min_sites) == (2, 1)
    with pytest.raises(ValueError, match=r"min_sites=3 .* at least 3.* has 2 site"):
        make_plan("fed_avg", sites=2, secure="sums")


@pytest.mark.parametrize(("capabilities", "least"), [((), 3), (("secure",), 2)])
def test_a_budget_that_ends_too_early_for_a_round_is_refused_and_its_remedies_help(
    capabilities: tuple[str, ...], least: int, world: World, tmp_path: Path
) -> None:
    """Check a site that can train one of two rounds, where a round needs it: no budget is spent."""
    steps = 2  # of a round: an epoch of 9 images, 8 in a batch; the sum of steps is the epsilon here
    spent: list[float] = []

    def budget(epsilon: float) -> Callable[[dict[str, Any]], None]:
        spent.append(epsilon)
        return lambda blocks: blocks["site-1"]["privacy"].update(epsilon=epsilon)

    def tried(name: str, epsilon: float, **options: Any) -> dict[str, Any] | str:
        options = {"capabilities": ["privacy", *capabilities], "min_sites": least, **options}
        return done(tmp_path / name, world, change=budget(epsilon), **options)

    why = tried("short", 1.5 * steps)
    assert "privacy budgets end (site-1 after 1 of 2 round(s)), and the last round would have fewer than 3 sites" in why
    assert "(min_sites=3). Set num_rounds=1 at most, or let the files of these sites have a larger epsilon" in why
    assert not [*(tmp_path / "short" / "root").rglob(ledger.LEDGER)]
    assert not isinstance(tried("fewer", 1.5 * steps, num_rounds=1), str)
    assert not isinstance(tried("larger", 2.5 * steps), str)


class NoEmbed(Plane):
    """Define a network with a head and no embed(images)."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(OrderedDict(body=nn.Linear(4, 6), head=nn.Linear(6, 2)))


class Embedding(nn.Sequential):
    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs)


class NoClasses(Plane):
    """Define data that do not count their classes, and a network that cRT can train."""

    def build_model(self) -> nn.Module:
        return Embedding(OrderedDict(body=nn.Linear(4, 6), head=nn.Linear(6, 2)))

    def open_site(self, site: str, settings: Any) -> Any:
        data = Points(site)
        data.class_counts = lambda split: None  # type: ignore[method-assign, assignment, return-value]
        return data


def measuring(change: Callable[[dict[str, float]], Any]) -> Plane:
    class Measures(Plane):
        def evaluate(self, *args: Any) -> Any:
            return change(super().evaluate(*args))

    return Measures()


@pytest.mark.parametrize(
    ("task", "crt", "why"),
    [
        (NoEmbed(), 1, "crt_rounds needs .* a module head"),
        (NoClasses(), 1, "which the task's data do not have"),
        (measuring(lambda own: {"loss": 1.0}), 0, "gives no 'accuracy', its primary metric"),
        (measuring(lambda own: own | {"kappa": 0.5}), 0, "whether more of 'kappa' is better"),
        (measuring(lambda own: own | {"accuracy": 55.0}), 0, r"'accuracy' must lie in \[0, 1\], got 55"),
        (measuring(lambda own: None), 0, "check failed with TypeError"),
    ],
)
def test_what_a_task_of_ones_own_lacks_is_told_before_any_training(
    task: Plane, crt: int, why: str, tmp_path: Path
) -> None:
    plan = make_plan("fed_avg", task="classification", sites=2, num_rounds=1, crt_rounds=crt)
    seen = Phases()
    with pytest.raises(RoundFailed, match=f"^check, before any training: .*{why}"):
        run_local(replace(plan, task=task), tmp_path, listeners=[seen])
    assert seen.begun == ["check"]


def test_extra_rounds_at_a_site_without_labels_are_refused_beforehand(world: World, tmp_path: Path) -> None:
    """Check a site that could learn from its unlabelled images alone in the method's own rounds."""

    def open_lists(blocks: dict[str, Any]) -> None:
        file = tmp_path / "open" / "datalist.json"
        copytree(blocks["site-1"]["data_root"], file.parent)
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {"training": [], "validation": [], "test": []}))
        blocks["site-1"]["data_root"] = str(file.parent)

    why = done(tmp_path, world, capabilities=["unlabelled", "crt_rounds"], change=open_lists)
    assert "site 'site-1': it has no labelled training image; set unlabelled=consistency (with crt_rounds=0)" in why


# ------------------------------------------------------------------------------------------------ nothing to act on


@pytest.mark.many("unlabelled", "trainable", "listed")
@pytest.mark.parametrize(
    ("capabilities", "settings", "options", "fact"),
    [
        pytest.param((), {"unlabelled": "consistency"}, {}, "a site with images that lack labels", id="unlabelled"),
        pytest.param(("unlabelled",), {}, {}, "", id="listed"),
        pytest.param((), {"exchange": "trainable"}, {}, "a tensor that it leaves out", id="trainable"),
        pytest.param((), {"test_every": 2}, {}, "a round of such a number before the last one", id="every"),
        pytest.param((), {"test_last": 3}, {"num_rounds": 1}, "a second round", id="last"),
        pytest.param((), {**WITHOUT_NORMS, "norm_statistics": "site"}, {}, "a batch norm with running", id="site"),
        pytest.param(
            (), {**WITHOUT_NORMS, "norm_statistics": "recalibrated"}, {}, "a batch norm with running", id="recalibrated"
        ),
    ],
)
def test_a_setting_that_finds_nothing_to_act_on_says_so(
    capabilities: tuple[str, ...], settings: dict[str, Any], options: dict[str, Any], fact: str, world: World,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Check the notes of a run, whose model has the bits of a run without the setting."""
    results = done(tmp_path / "with", world, capabilities=capabilities, settings=settings, **options)
    assert not isinstance(results, str), results
    told = [f"it acts only with {fact}"] * bool(fact)
    assert len(results["info"]["in_vain"]) == len(told)
    for text, part in zip(results["info"]["in_vain"], told, strict=True):
        assert re.match(rf"\w+='?[^ ]*'? would do nothing: {part}.*, and there is none; leave it out$", text)
        assert f"{text}." in run_notes(read_results(tmp_path / "with" / "run" / RESULTS))
    if fact:
        plain = WITHOUT_NORMS if "network" in settings else {}
        done(tmp_path / "without", world, settings=plain, **options)
        one, other = (model_in(tmp_path / name / "run" / RESULTS) for name in ("with", "without"))
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_every_declared_fact_is_looked_for(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: set[str] = set()
    monkeypatch.setattr(opening, "idle", lambda parts, names, facts: looked.update(facts) or [])
    assert not isinstance(done(tmp_path, world, num_rounds=1), str)
    classes = {RunSettings, *(half for method in all_methods().values() for half in (method.rule, method.training))}
    declared = {need.other for cls in classes for need in needs_of(cls).values() if need and need.fact}
    assert len(declared) == 8
    assert looked == declared


# ------------------------------------------------------------------------------------------------ what travels


@pytest.mark.parametrize("apart", [False, True])
def test_what_travels_beside_a_model_arrives_beside_it(apart: bool) -> None:
    """Check the model and the tensors beside it at a site, also where each site gets a model of its own."""
    own, beside = {"w": torch.ones(2)}, {"w": torch.zeros(2), "c": torch.ones(1)}
    asked = SiteTask("train", {} if apart else own, 0, 1, 0, beside=beside)
    message = encode_task(replace(asked, each=(lambda site: own) if apart else None))
    got = decode_task("train", address(message, "site-1"), "site-1")
    again = got.carrying({}).carrying(got.tensors)
    for found in (got, again):
        assert {name: of.tolist() for name, of in found.state.items()} == {"w": [1, 1]}
        assert {name: of.tolist() for name, of in found.beside.items()} == {"w": [0, 0], "c": [1]}
    assert (got.carrying({}).state, got.carrying({}).beside) == ({}, {})
