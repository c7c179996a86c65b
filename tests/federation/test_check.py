"""Test the first exchange of a job: sites report on their data, and impossible combinations end the run early."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fairflare.data.datalist import Datalist, Sample
from fairflare.exchange.messages import Message, says_nothing
from fairflare.federation.collecting.phase import RoundFailed
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.server.check import MAX_LISTS, read_check
from fairflare.federation.transports.local import run_local
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.training import LocalTraining
from fairflare.reporting.notes import run_notes
from fairflare.reporting.results import read_results
from fairflare.reporting.table import fairness_table
from tests.tiny import FUNDUS as TINY
from tests.tiny import run_document
from tests.unit.report_runs import read

from .network import SILENT, SITES, Line, Run, good, misbehave

CLASSES = [f"c{number}" for number in range(3)]


def says(**report: Any) -> Message:
    """Return a site's answer to ``check``."""
    message = says_nothing()
    message.meta["report"] = report
    return message


def own_images(folder: Path, labels: int = 3, **more: Any) -> dict[str, str]:
    """Make a folder of grey images with so many classes, and return the site's block."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng([labels, *folder.name.encode()])  # no two sites have the same images
    splits: dict[str, Any] = {"training": [], "validation": [], "test": []}
    for split, entries in splits.items():
        for number in range(2 * labels):
            name = f"{split}{number}.png"
            Image.fromarray(rng.integers(0, 255, (33, 33), np.uint8)).save(folder / name)
            entries.append({"image": name, "label": number % labels})
    (folder / "datalist.json").write_text(json.dumps({**more, **splits}))
    return {"data_root": str(folder)}


def results_of(folder: Path) -> Path:
    return folder / "server" / "simulate_job" / "fairflare" / "results.json"


def run(folder: Path, local: dict[str, Any], sites: Any = 2, method: str = "fed_avg", **options: Any) -> dict[str, Any]:
    """Do a run in one process, as ``fairflare run --in-process``; return its results, also those of a failed run."""
    settings = {**TINY, **options.pop("settings", {})}
    plan = make_plan(method, task="classification", sites=sites, settings=settings, **{"num_rounds": 1, **options})
    results = results_of(folder)
    said = None
    try:
        run_local(plan, folder, local)
    except RoundFailed as error:
        said = str(error)
    found = run_document(results)
    assert said is None or found["reason"] == said
    return found


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the test fail if any site trains."""
    monkeypatch.setattr(LocalTraining, "train", lambda *rest: pytest.fail("a site has trained"))


def refused(results: dict[str, Any]) -> str:
    assert results["status"] == "failed"
    assert results["rounds"] == []
    assert results["reason"].startswith("check, before any training: ")
    return str(results["reason"])


# ------------------------------------------------------------------------------------------------ made-up data


@pytest.mark.parametrize("real", [{"site-1"}, {"site-1", "site-2"}])
@pytest.mark.parametrize("asked_for", [True, None])
@pytest.mark.usefixtures("untrained")
def test_made_up_data_never_go_beside_real_ones(tmp_path: Path, real: set[str], asked_for: bool | None) -> None:
    """Check sites whose file says nothing, as each hospital has its own, and sites whose file wants synthetic data."""
    run = Run(tmp_path, num_rounds=1)
    run.net.ready = lambda site, task: says(synthetic=site not in real)
    with pytest.raises(RoundFailed) as failed:
        run()
    made_up = ", ".join(site for site in SITES if site not in real)
    assert f"made-up data beside real ones: synthetic at {made_up}, real at {', '.join(sorted(real))}" in str(
        failed.value
    )
    assert f"Set 'data_root' in the fairflare.json of {made_up}" in run.results["reason"]
    assert run.net.asked == []
    # The same through a site of its own.
    local = {"sites": {"site-1": own_images(tmp_path / "data"), "site-2": {"phantom": True}}}
    if asked_for:
        reason = refused(run_of(tmp_path / "r", local))
        assert "synthetic at site-2, real at site-1" in reason


def run_of(folder: Path, local: dict[str, Any], **options: Any) -> dict[str, Any]:
    return run(folder, local, settings={"num_classes": 5, **options.pop("settings", {})}, **options)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("block", "why"),
    [
        ({}, "the site file names data for other sites, but not for this one; did you mean 'hospital-b'?"),
        ({"hospital-c": {}}, "the site file names data for other sites, but not for this one"),
        ({"hospital-c": {"data_rot": "x"}}, "unknown key 'data_rot' in the site file; did you mean 'data_root' or "),
        ({"hospital-c": {"phantom": False}}, "key 'phantom' in the site file is not usable"),
        ({"hospital-c": {"data_root": "/x", "phantom": True}}, "key 'phantom' in the site file is not usable"),
        ({"hospital-c": {"data_root": "/nowhere/at/all"}}, "the data folder does not exist"),
    ],
)
def test_a_mistake_in_a_site_file_ends_the_job(tmp_path: Path, block: dict[str, Any], why: str) -> None:
    """Check the default: the site is named, does not train on synthetic data, and is not left out without a message."""
    local = {"sites": {f"hospital-{x}": own_images(tmp_path / x, 5) for x in "ab"} | block}
    results = run(tmp_path / "run", local, ["hospital-a", "hospital-b", "hospital-c"])
    reason = refused(results)
    assert "1 of 3 site(s) cannot take part: site 'hospital-c': " + why in reason
    assert "?." not in reason
    assert re.search(r"[.?] Correct it there and start again", reason)
    assert "/nowhere" not in reason
    assert [(x["site"], x["phase"]) for x in results["left_out"]] == [("hospital-c", "check")]
    assert "hospital-c before round 0, check: site 'hospital-c': " + why in fairness_table(read(**results))


def test_others_go_on_without_it_where_they_may(tmp_path: Path) -> None:
    local = {"sites": {f"hospital-{x}": own_images(tmp_path / x, 5) for x in "ab"} | {"hospital-c": {"data_rot": "x"}}}
    results = run(tmp_path / "run", local, list(local["sites"]), require_all_sites=False, min_sites=2)
    assert results["status"] == "completed"
    assert results["rounds"][0]["accepted"] == ["hospital-a", "hospital-b"]
    assert sorted(results["info"]["said"]) == ["hospital-a", "hospital-b"]
    assert "Took part in rounds: hospital-a 1/1, hospital-b 1/1, hospital-c 0/1." in fairness_table(read(**results))
    failed = run(tmp_path / "more", local, list(local["sites"]), require_all_sites=False, min_sites=3)
    assert "2 of 3 site(s) ready, min_sites=3" in refused(failed)


@pytest.mark.usefixtures("untrained")
def test_a_job_that_allows_no_phantom(tmp_path: Path) -> None:
    results = run(tmp_path / "a", {}, settings={"allow_phantom": False})
    assert "key 'data_root' in the site file is not usable" in refused(results)


def test_a_site_may_ask_for_made_up_data_where_the_job_allows_none(tmp_path: Path) -> None:
    results = run(tmp_path, {"phantom": True}, settings={"allow_phantom": False})
    assert results["status"] == "completed"
    assert results["info"]["synthetic"] is True


def test_a_late_site_of_another_kind_is_left_out(tmp_path: Path) -> None:
    """Check a site that was silent in the first exchange and trains later."""

    def other(site: str, name: str, task: Message) -> Message:
        reply = good(site, name, task)
        reply.meta["stats"]["synthetic"] = True
        return reply

    run = Run(tmp_path, misbehave("site-2", "train", other), num_rounds=1, check_timeout=0.3)
    run.net.ready = lambda site, task: SILENT if site == "site-2" else says(synthetic=False)
    run()
    assert run.results["rounds"][0]["accepted"] == ["site-1", "site-3"]
    assert "its data are made up, and the others' are not; the two are never mixed" in run.left_out()["site-2"][1]


def test_a_resumed_run_keeps_to_its_kind_of_data(tmp_path: Path) -> None:
    first = Run(tmp_path, num_rounds=1, experiment="e")
    first.net.ready = lambda site, task: says(synthetic=True)
    first()
    assert first.results["info"]["synthetic"] is True
    rest = Run(tmp_path, num_rounds=2, experiment="e", job="rest")
    rest.net.ready = lambda site, task: says(synthetic=False)
    with pytest.raises(RoundFailed, match=r"rounds before .* made-up data, and site-1"):
        rest()
    assert rest.net.asked == []
    assert len(rest.net.checks) == 1


# ------------------------------------------------------------------------------------------------ one that differs


class Three(Line):
    """Define a task of three classes."""

    classes = 3  # type: ignore[assignment]


REAL: dict[str, Any] = {
    "synthetic": False, "num_classes": 3, "class_names": CLASSES, "class_groups": ["head 0", "tail 1", "tail 2"],
}  # fmt: skip
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "made up": ({"synthetic": True}, "its data are of another kind (made up or real) than those of most sites"),
    "names": ({"class_names": CLASSES[::-1]}, "its datalist names the classes otherwise than those of most sites"),
    "groups": ({"class_groups": ["head 1"]}, "its datalist groups the classes otherwise than those of most sites"),
    "more": ({"num_classes": 9, "class_names": None}, "it has 9 classes, the job has num_classes=3"),
}


def with_odd(folder: Path, odd: dict[str, dict[str, Any]], usual: dict[str, Any] = REAL, **more: Any) -> Run:
    """Do a run that may continue without a site, in which some sites report other facts than the rest."""
    run = Run(folder, task=Three(), **{"num_rounds": 2, "require_all_sites": False, **more})
    run.net.ready = lambda site, task: says(**{**usual, **odd.get(site, {})})
    return run


def check_goes_on_without(run: Run, out: str, why: str) -> None:
    rest = [site for site in run.net.names if site != out]
    assert run.results["status"] == "completed"
    assert {tuple(sites) for _, sites in run.net.asked} == {tuple(rest)}  # train and test alike
    assert sorted(run.results["test"]) == rest
    assert all(record["accepted"] == rest for record in run.results["rounds"])
    assert run.results["info"]["synthetic"] is False
    assert sorted(run.results["info"]["said"]) == rest
    phase, reason = run.left_out()[out]
    assert phase == "train"
    assert reason.startswith(f"site {out!r}: {why}")
    (warned,) = (line for line in run.net.warned if line.startswith(f"check: site {out!r} is not ready"))
    assert why in warned
    assert f"{out} 0/" in fairness_table(read(**run.results))


@pytest.mark.parametrize("out", ["site-1", "site-3"])
@pytest.mark.parametrize("odd", ODD)
def test_a_site_that_differs_is_left_out_where_that_may_be(tmp_path: Path, odd: str, out: str) -> None:
    said, why = ODD[odd]
    run = with_odd(tmp_path, {out: said}, min_sites=2)
    run()
    check_goes_on_without(run, out, why)
    strict = with_odd(tmp_path, {out: said}, require_all_sites=True, job="strict")
    with pytest.raises(RoundFailed, match="check, before any training"):
        strict()
    assert strict.net.asked == []
    few = with_odd(tmp_path, {out: said}, min_sites=3, job="few")
    with pytest.raises(RoundFailed, match=rf"2 of 3 site.*min_sites=3.* site '{out}': "):
        few()


@pytest.mark.parametrize("odd", ODD)
def test_a_network_of_months_is_not_vetoed_on_resume(tmp_path: Path, odd: str) -> None:
    said, why = ODD[odd]
    with_odd(tmp_path, {}, num_rounds=1, experiment="e")()
    rest = with_odd(tmp_path, {"site-2": said}, experiment="e", job="rest")
    rest()
    assert rest.results["info"]["resumed_at_round"] == 1
    assert rest.results["rounds"][1]["accepted"] == ["site-1", "site-3"]
    assert rest.left_out(1)["site-2"][1].startswith(f"site 'site-2': {why}")


@pytest.mark.parametrize("odd", ["made up", "names", "groups"])
def test_without_a_majority_the_run_ends_and_says_so(tmp_path: Path, odd: str) -> None:
    run = with_odd(tmp_path, {"site-2": ODD[odd][0]}, sites=SITES[:2])
    with pytest.raises(RoundFailed, match="No side is that of most sites") as failed:
        run()
    assert run.net.asked == []
    assert "site-1" in str(failed.value)
    assert "site-2" in str(failed.value)
    four = [*SITES, "site-4"]
    tie = with_odd(tmp_path, dict.fromkeys(four[:2], ODD[odd][0]), sites=four, job="tie")
    with pytest.raises(RoundFailed, match="No side is that of most sites"):
        tie()


def test_most_of_those_that_say_decide(tmp_path: Path) -> None:
    """Check that silent sites are on no side, and that two liars of five are left out, each with its reason."""
    five = [*SITES, "site-4", "site-5", "site-6"]
    odd = {"site-1": ODD["names"][0], "site-4": {"class_names": ["x", "y", "z"]}, "site-6": {"class_names": None}}
    run = with_odd(tmp_path, odd, sites=five)
    run()
    assert run.results["rounds"][0]["accepted"] == ["site-2", "site-3", "site-5", "site-6"]
    assert sorted(run.left_out()) == ["site-1", "site-4"]
    jobs = with_odd(tmp_path, dict.fromkeys(SITES[:2], ODD["more"][0]), job="job")
    with pytest.raises(RoundFailed, match="num_classes=3, the sites have 9 classes"):
        jobs()  # then it is the job that is wrong


def test_the_rounds_before_decide_of_which_kind_the_data_are(tmp_path: Path) -> None:
    with_odd(tmp_path, {}, num_rounds=1, experiment="e")()
    made_up = {"synthetic": True}
    rest = with_odd(tmp_path, dict.fromkeys(SITES[1:], made_up), experiment="e", job="rest", min_sites=1)
    rest()  # most sites are of another kind now
    assert rest.results["rounds"][1]["accepted"] == ["site-1"]
    assert rest.results["info"]["synthetic"] is False
    all_ = with_odd(tmp_path, dict.fromkeys(SITES, made_up), experiment="e", job="all", num_rounds=3)
    with pytest.raises(RoundFailed, match=r"the rounds before .* real data, and site-1"):
        all_()


def test_one_site_does_not_say_for_all_what_is_measured(tmp_path: Path) -> None:
    run = with_odd(tmp_path, {"site-2": {"personal": True}})
    run()
    assert run.results["info"]["measured"] == "common"
    most = with_odd(tmp_path, {site: {"personal": True} for site in SITES[:2]}, job="most")
    most()
    assert most.results["info"]["measured"] == "personal"


# ------------------------------------------------------------------------------------------------ who is there


def test_a_silent_site_is_waited_for_and_named(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=1, check_timeout=0.3)
    run.net.ready = lambda site, task: SILENT if site == "site-2" else says_nothing()
    run()
    assert run.results["status"] == "completed"
    assert run.results["rounds"][0]["accepted"] == SITES  # it was only slow
    assert any("check: site 'site-2' is not ready: no answer within 0.3" in line for line in run.net.warned)
    few = Run(tmp_path, num_rounds=1, check_timeout=0.3, min_sites=3, job="few")
    few.net.ready = run.net.ready
    with pytest.raises(RoundFailed, match=r"2 of 3 site.*site-2: no answer"):
        few()
    assert few.net.asked == []


def test_expected_sites_that_are_not_connected_are_named(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=2)
    run.net.expected = lambda: [*SITES, "site-4", "site-5"]  # type: ignore[method-assign]
    run()
    info = run.results["info"]
    assert (info["sites"], info["connected"]) == ([*SITES, "site-4", "site-5"], SITES)
    assert any("not connected, though the job names them: site-4, site-5" in line for line in run.net.warned)
    shown = fairness_table(read(**run.results))
    assert "Expected, and not connected: site-4, site-5 (2 of 5)." in shown
    assert "site-3 2/2, site-4 0/2, site-5 0/2." in shown
    assert "No site was left out" not in shown


def test_whoever_fails_the_round_is_in_the_results(tmp_path: Path) -> None:
    run = Run(tmp_path, misbehave("site-2", "train", "site 'site-2' burnt down"), num_rounds=2, min_sites=3)
    with pytest.raises(RoundFailed):
        run()
    assert [(one["site"], one["phase"]) for one in run.results["left_out"]] == [("site-2", "train")]
    assert "site-2 in round 0, train: site 'site-2' burnt down" in fairness_table(read(**run.results))


def test_nothing_but_a_small_message_is_sent(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=2, experiment="e")()
    (sent,) = run.net.checks
    assert sent.params is None
    assert sent.meta["directives"] == {}
    assert run.results["rounds"][0]["phases"][0]["name"] == "train"


def test_a_site_joins_and_another_comes_back_with_other_images(tmp_path: Path) -> None:
    """Check that both continue the experiment; a setting that only follows the number of sites may change."""
    local: dict[str, Any] = {name: str(tmp_path / name) for name in ("state_root", "checkpoint_root")}
    local["sites"] = {site: own_images(tmp_path / site) for site in SITES[:2]}
    options: dict[str, Any] = {"settings": {"num_classes": 3}, "experiment": "study"}
    assert run(tmp_path / "first", local, **options)["status"] == "completed"
    local["sites"][SITES[2]] = own_images(tmp_path / SITES[2])
    joined = run(tmp_path / "second", local, 3, num_rounds=2, **options)
    assert joined["status"] == "completed", joined["reason"]
    assert joined["info"]["resumed_with"] == [f"new in the job: {SITES[2]}", "num_rounds was 1, is 2"]
    assert SITES[2] in joined["rounds"][1]["accepted"]
    label = tmp_path / SITES[0] / "datalist.json"
    entries = json.loads(label.read_text())
    entries["training"][0]["label"] = 2 - entries["training"][0]["label"]
    label.write_text(json.dumps(entries))
    changed = run(tmp_path / "third", local, 3, num_rounds=3, **options)
    assert changed["status"] == "completed", changed["reason"]
    wanted = f"site '{SITES[0]}' has other images or labels than in its first round"
    assert changed["info"]["resumed_with"] == ["num_rounds was 2, is 3", wanted]
    assert f"Resumed: {wanted}." in run_notes(read_results(results_of(tmp_path / "third")))


@pytest.mark.parametrize("where", [0, 5000, 9999])
def test_one_byte_of_a_file_changes_its_list(tmp_path: Path, where: int) -> None:
    """Check changes at the beginning, middle and end of a file of the same size; also in one file of a series."""
    found = []
    for number in range(2):
        content = bytearray(10_000)
        content[where] = number
        (tmp_path / "a.npy").write_bytes(content)
        (tmp_path / "series").mkdir(exist_ok=True)
        (tmp_path / "series" / "0.dcm").write_bytes(content)
        for image in ("a.npy", "series"):
            sample = Sample(image=tmp_path / image, label=1)
            found.append(Datalist("a", tmp_path, {"training": (sample,)}).fingerprint("training"))
    assert len(set(found)) == 4


# ------------------------------------------------------------------------------------------------ classes and priors


def test_what_a_site_says(tmp_path: Path) -> None:
    local = {"sites": {s: own_images(tmp_path / s, class_names=CLASSES) for s in SITES[:2]}}
    results = run(tmp_path / "run", local, settings={"num_classes": 3})
    assert results["status"] == "completed"
    assert results["info"]["synthetic"] is False
    assert results["info"]["said"]["site-1"] == {
        "images": {"training": 6, "validation": 6, "test": 6}, "synthetic": False, "num_classes": 3,
        "class_names": CLASSES, "class_groups": None, "prior": None, "device": "cpu", "computing": None,
        "personal": False, "suppressed": None, "min_cases": None, "global_list": None,
        "other_images": None, "marked": {"c0": 6, "c1": 6, "c2": 6},
    }  # fmt: skip
    recalls = {name for name in results["test"]["site-1"] if name.startswith("recall_")}
    assert recalls == {"recall_c0", "recall_c1", "recall_c2"}


def test_metrics_of_any_class_names_travel_under_safe_names(tmp_path: Path) -> None:
    """Check blanks, accents and other scripts: names stay readable, distinct, and the same at every site."""
    names = ["bone loss", "Caf\u00e9 (1)", "\u80ba", "\u8111"]
    groups = {"very rare": [1, 2]}
    local = {"sites": {s: own_images(tmp_path / s, 4, class_names=names, class_groups=groups) for s in SITES[:2]}}
    results = run(tmp_path / "run", local, settings={"num_classes": 4})
    assert results["status"] == "completed", results["reason"]
    found = {name for name in results["test"]["site-1"] if name.startswith("recall_")}
    assert {"recall_bone_loss", "recall_Cafe_1_"} < found
    assert len(found) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9_/.-]+", name) for name in results["test"]["site-1"])
    assert results["test"]["site-1"]["very_rare"] >= 0
    assert results["info"]["higher_is_better"]["accuracy"] is True
    assert results["info"]["said"]["site-1"]["class_names"] == names
    twins = ["bone loss", "bone_loss"]
    alike = {site: own_images(tmp_path / "alike" / site, 2, class_names=twins) for site in SITES[:2]}
    reason = refused(run(tmp_path / "two", {"sites": alike}, settings={"num_classes": 2}))
    assert "two of its metrics would have the same name; rename a class or a group there" in reason
    assert "bone" not in reason


@pytest.mark.long
def test_own_images_have_neither_names_nor_groups_of_a_phantom(tmp_path: Path) -> None:
    """Check also images with as many classes as the phantom has."""
    local = {"sites": {s: own_images(tmp_path / s, 23) for s in SITES[:2]}}
    results = run(
        tmp_path / "run", local, settings={"phantom": "endoscopy", "phantom_samples": 200, "phantom_test": 200}
    )
    names = set(results["test"]["site-1"])
    assert {f"recall_class_{number}" for number in range(23)} <= names
    assert not names & {"head", "medium", "tail", "all"}
    assert sum(name.startswith("recall_") for name in names) == 23


@pytest.mark.usefixtures("untrained")
def test_another_number_of_classes_than_the_jobs(tmp_path: Path) -> None:
    """Check that a folder of three classes does not train the phantom's five outputs."""
    local = {"sites": {s: own_images(tmp_path / s) for s in SITES[:2]}}
    reason = refused(run(tmp_path / "run", local))
    assert "the job has num_classes=5, the sites have 3 classes at most (site-1: 3, site-2: 3)" in reason
    assert "Set num_classes=3" in reason
    assert "label of split 'training' is no class of the task (num_classes=2)" in refused(
        run(tmp_path / "two", local, settings={"num_classes": 2})
    )


@pytest.mark.usefixtures("untrained")
def test_named_classes_must_be_the_jobs(tmp_path: Path) -> None:
    local = {"sites": {s: own_images(tmp_path / s, class_names=CLASSES) for s in SITES[:2]}}
    reason = refused(run(tmp_path / "run", local))
    assert "the datalist names 3 classes, the job has num_classes=5; set num_classes=3 of the task" in reason
    local["sites"]["site-2"] = own_images(tmp_path / "other", class_names=CLASSES[::-1])
    reason = refused(run(tmp_path / "names", local, settings={"num_classes": 3}))
    assert "name the classes differently: c0, c1, c2 at site-1; c2, c1, c0 at site-2" in reason


def test_groups_come_from_the_datalists_and_must_be_the_same(tmp_path: Path) -> None:
    groups = {"head": [0], "tail": [1, 2]}
    local = {"sites": {s: own_images(tmp_path / s, class_names=CLASSES, class_groups=groups) for s in SITES[:2]}}
    results = run(tmp_path / "run", local, settings={"num_classes": 3})
    assert results["status"] == "completed"
    assert results["info"]["said"]["site-1"]["class_groups"] == ["head 0", "tail 1", "tail 2"]
    of_site = results["test"]["site-2"]
    assert of_site["tail"] == pytest.approx((of_site["recall_c1"] + of_site["recall_c2"]) / 2)
    others = {"head": [0, 1], "tail": [2]}
    local["sites"]["site-2"] = own_images(tmp_path / "other", class_names=CLASSES, class_groups=others)
    reason = refused(run(tmp_path / "groups", local, settings={"num_classes": 3}))
    assert "group the classes differently: head 0, tail 1, tail 2 at site-1; head 0, head 1, tail 2 at site-2" in reason
    local["sites"]["site-2"] = own_images(tmp_path / "metric", class_names=CLASSES, class_groups={"accuracy": [0]})
    assert "'class_groups' is not usable" in refused(run(tmp_path / "named", local, settings={"num_classes": 3}))


def test_a_patient_in_two_splits_is_named_at_home_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = {"sites": {s: own_images(tmp_path / s) for s in SITES[:2]}}
    file = tmp_path / "site-2/datalist.json"
    content = json.loads(file.read_text())
    for split in ("training", "test"):
        content[split][0]["patient"] = "Anna-1953"
    file.write_text(json.dumps(content))
    results = run(tmp_path / "run", local, settings={"num_classes": 3})
    assert "site-2': the datalist is not usable: a patient is in both 'training' and 'test'" in refused(results)
    assert "Anna-1953" in caplog.text  # the site's own log
    sent = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and b"Anna-1953" in path.read_bytes()]
    assert not sent


def test_a_rare_class_that_no_site_has_is_named(tmp_path: Path) -> None:
    local = {"sites": {s: own_images(tmp_path / s, class_names=[*CLASSES, "rare"]) for s in SITES[:2]}}
    assert run(tmp_path / "run", local, settings={"num_classes": 4})["status"] == "completed"


def test_classes_stay_at_home_where_the_site_says_so(tmp_path: Path) -> None:
    local = {"metrics_by_class": False, "sites": {s: own_images(tmp_path / s) for s in SITES[:2]}}
    results = run(tmp_path / "run", local)
    assert results["status"] == "completed"
    assert results["info"]["said"]["site-1"]["num_classes"] is None


@pytest.mark.parametrize("method", ["bsm_fl", "bsm_kd", "fed_mas"])
def test_a_task_that_a_method_cannot_learn_is_refused_at_once(method: str) -> None:
    with pytest.raises(ValueError, match=rf"'{method}' cannot learn segmentation: "):
        make_plan(method, task="segmentation")


def test_what_a_setting_can_mend_is_said() -> None:
    with pytest.raises(ValueError, match="'logit_adjusted' needs classes; set"):
        make_plan("fed_ism", task="segmentation", settings={"criterion": "logit_adjusted"})
    assert make_plan("fed_ism", task="segmentation").task.has_classes is False


@pytest.mark.parametrize(
    ("method", "task", "given", "why"),
    [
        ("cgsv", "segmentation", {"secure": "sums"}, "secure='sums': CGSV .*another method"),
        ("fed_ce", "segmentation", {"secure": "sums"}, "secure='sums': FedCE .*another method"),
        ("fed_avg", "classification", {"secure": "sums", "aggregate": "median"}, "secure='sums': aggregate=.*"),
        ("fed_avg", "segmentation", {"crt_rounds": 1}, "crt_rounds needs .*set crt_rounds=0"),
        ("fed_avg", "classification", {"optimizer": "task"}, "optimizer='task' needs .*'sgd'"),
        ("fed_avg", "segmentation", {"criterion": "fedlc"}, "criterion='fedlc' .*criterion to 'task'"),
        ("fair_lora", "classification", {"fairlora_attribute": ""}, "fair_lora needs fairlora_attribute, .*"),
    ],
)  # fmt: skip
def test_a_setting_that_does_not_fit_is_not_blamed_on_the_task(method: str, task: str, given: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"^(method '{method}': )?{why}$") as found:
        make_plan(method, task=task, settings=given)
    assert "choose another task" not in str(found.value)


@pytest.mark.parametrize("method", ["fed_mas", "bsm_kd"])
def test_a_network_without_a_projection_head_is_refused_at_once(method: str) -> None:
    wanted = f"'{method}': .*projection .*projector_dim$"
    with pytest.raises(ValueError, match=wanted):
        make_plan(method, settings={"projector_dim": None})


def test_a_site_says_which_prior_it_holds(tmp_path: Path) -> None:
    results = run(tmp_path, {}, method="fed_mas")
    (held,) = {found["prior"] for found in results["info"]["said"].values()}
    assert len(held) == 16


@pytest.mark.usefixtures("untrained")
def test_different_priors_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=1)
    run.net.ready = lambda site, task: says(prior="aa" if site == "site-1" else "bb")
    with pytest.raises(RoundFailed, match="'aa' at site-1; 'bb' at site-2, site-3"):
        run()


@pytest.mark.usefixtures("untrained")
def test_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    local = {"sites": {s: own_images(tmp_path / s, 5) for s in SITES[:2]}}
    (tmp_path / "site-2" / "validation0.png").write_bytes(b"no picture")
    reason = refused(run(tmp_path / "run", local))
    assert "site 'site-2'" in reason
    assert "validation" in reason
    assert "png" not in reason


# ------------------------------------------------------------------------------------------------ a site's words


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"splits": ["training"], "images": [-1]}, r"'images\[0\]'.* got -1"),
        ({"splits": ["training"], "images": [1, 2]}, "'images' has 2 entries, .*'splits' has 1"),
        ({"images": [1]}, "'images' has 1 entries, .*'splits' has 0"),
        ({"splits": ["x"] * (MAX_LISTS + 1), "images": [1] * (MAX_LISTS + 1)}, "more than 100 lists"),
        ({"synthetic": "no"}, "'synthetic' must be true or false"),
        ({"num_classes": 0}, "'num_classes' must lie in"),
        ({"class_names": [3]}, "'class_names' must list names"),
        ({"class_names": ["x"] * 20_000}, "10000 classes"),
        ({"class_groups": ["x" * 200] * 501}, "have 100200 characters, more than 100000"),
        ({"class_names": ["x" * 100] * 500, "class_groups": ["y" * 101] * 500}, "have 100500 characters"),
        ({"prior": 3}, "'prior' must be a text"),
        ([], "'report' must be a dict"),
    ],
)
def test_every_value_is_checked(tmp_path: Path, report: Any, why: str) -> None:
    message = says_nothing()
    message.meta["report"] = report
    with pytest.raises(ReportError, match=why):
        read_check("site-1", message, 0)
    run = Run(tmp_path, num_rounds=1)
    run.net.ready = lambda site, task: message if site == "site-1" else says_nothing()
    with pytest.raises(RoundFailed, match="1 of 3 site"):
        run()


def test_words_are_printable() -> None:
    found = read_check("a", says(prior="a\x1b[31m", splits=["t\n"], images=[1], class_names=["\x07b"]), 0)
    assert found["prior"] == "a [31m"
    assert found["images"] == {"t ": 1}
    assert found["class_names"] == [" b"]
