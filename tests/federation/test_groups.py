"""Test groups of people in a run: sent and withheld values, known gaps, and errors."""

from __future__ import annotations

import copy
import json
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.fuel.utils import fobs
from PIL import Image

from fairflare.exchange.messages import Message
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.server.rounds import RoundFailed
from fairflare.federation.site import groups
from fairflare.federation.transports.local import LocalTransport, run_local
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.site_run import SiteError
from fairflare.reporting.layout import interval
from fairflare.reporting.results import read_results
from fairflare.reporting.table import fairness_table
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.images import ImageTask
from fairflare.tasks.segmentation import SegmentationTask
from fairflare_lab.page.groups import groups as section_of
from fairflare_lab.page.material import describe_run
from fairflare_lab.page.write import build
from fairflare_lab.phantoms import PhantomPlan, class_site
from tests.sections import groups_before
from tests.tiny import run_document
from tests.unit.report_runs import read

SITES = ["site-1", "site-2"]
SMALL: dict[str, Any] = {
    "image_size": [33, 33], "features": [4, 4, 4, 4], "num_classes": 2, "batch_size": 16, "local_epochs": 1,
}  # fmt: skip
DECLARED = {
    "sex": {"kind": "category", "values": ["female", "male"]}, "age": {"kind": "number", "bins": [41.25, 60]},
    "scanner": {"kind": "category", "values": ["Xylo9", "Quartz7"]},
}  # fmt: skip
TEST = 24


def federation(root: Path, declared: Any = None, change: Any = None) -> dict[str, Any]:
    """Make two sites with images of two classes, and attributes; ``change`` edits the content of the second site."""
    blocks = {}
    for number, site in enumerate(SITES):
        rng = np.random.default_rng(number)
        content: dict[str, Any] = {"class_names": ["no", "yes"], "attributes": copy.deepcopy(declared or DECLARED)}
        (root / site / "images").mkdir(parents=True)
        for split, count in (("training", 16), ("validation", 6), ("test", TEST)):
            content[split] = []
            for index in range(count):
                name = f"images/{split}_{index}.png"
                Image.fromarray(rng.integers(0, 255, (8, 8, 3)).astype(np.uint8)).save(root / site / name)
                who = {
                    "sex": ["female", "male"][index // 2 % 2], "age": 20.8125 + 3 * index,
                    "scanner": ["Xylo9", "Quartz7"][int(index >= 3)],
                }  # fmt: skip
                entry = {"image": name, "label": index % 2, "patient": f"Doe{site}{split}{index}", "attributes": who}
                content[split].append(entry)
        del content["test"][0]["attributes"]["sex"]
        if change is not None and number == 1:
            change(content)
        (root / site / "datalist.json").write_text(json.dumps(content))
        blocks[site] = {"data_root": str(root / site)}
    return {"sites": blocks}


def plan(*asked: str, **more: Any) -> Plan:
    of_task = {**SMALL, "groups": list(asked), **more}
    return make_plan("fed_avg", task="classification", sites=SITES, num_rounds=1, settings=of_task)


def done(made: Plan, folder: Path, local: dict[str, Any]) -> dict[str, Any]:
    return run_document(run_local(made, folder, local))


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Message]]:
    """Return site, task and answer of every exchange, as the answer leaves the site."""
    found: list[tuple[str, str, Message]] = []
    answer = LocalTransport._answer

    def watched(self: LocalTransport, site: str, name: str, task: Message) -> Message:
        reply = answer(self, site, name, task)
        found.append((site, name, replace(reply)))
        return reply

    monkeypatch.setattr(LocalTransport, "_answer", watched)
    return found


def bytes_of(message: Message) -> bytes:
    """Return all sent bytes except the update's tensors and a time, as FLARE and pickle write them."""
    stats = {key: value for key, value in message.meta.get("stats", {}).items() if key != "seconds"}
    told = [{**message.meta, "stats": stats}, message.metrics]
    return bytes(fobs.dumps(told)) + pickle.dumps(told) + json.dumps(told).encode()


# ------------------------------------------------------------------------------------------------ what leaves


@pytest.mark.parametrize("asked", [(), ("sex",), ("sex", "age")])
def test_nothing_of_an_attribute_leaves_but_the_declared_sums(
    asked: tuple[str, ...], tmp_path: Path, carried: list[tuple[str, str, Message]]
) -> None:
    local = federation(tmp_path / "data")
    done(plan(*asked), tmp_path / "run", local)
    fields = {field.name for field in groups.FIELDS}
    assert {name for _, name, _ in carried} == {"check", "train", "validate"}
    for site, name, reply in carried:
        sent = bytes_of(reply)
        content = json.loads((tmp_path / "data" / site / "datalist.json").read_text())
        people = [entry for split in ("training", "validation", "test") for entry in content[split]]
        for entry in people:  # no value of any one, nor whose it is
            age = entry["attributes"]["age"]
            assert struct.pack("<d", age) not in sent
            assert struct.pack(">d", age) not in sent
            assert str(age).encode() not in sent
            assert entry["patient"].encode() not in sent
        assert b"Xylo9" not in sent
        assert b"Quartz7" not in sent
        assert b"scanner" not in sent
        words = {b"female": "sex", b"41.25": "age"}
        for word, attribute in words.items():
            assert (word in sent) == (attribute in asked and name != "train"), (word, name)
        found = fields & {*reply.meta.get("stats", {}), *reply.meta.get("report", {})}
        if not asked or name == "train":
            assert not found
        elif name == "check":
            assert found == {groups.NAMES}
        else:
            assert found == fields - {"group_dice", groups.KEPT}
            count = sum({"sex": 3, "age": 4}[attribute] for attribute in asked)
            assert reply.meta["stats"][groups.NAMES].count("sex=female") == 1
            assert len(reply.meta["stats"]["group_images"]) == 20 * count  # in parts of the cases
            assert sum(reply.meta["stats"]["group_images"]) == TEST * len(asked)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fair_fed", {"fairfed_attribute": "age"}),
        ("flex_fair", {"flexfair_over": "both", "flexfair_attribute": "age"}),
        (
            "flex_fair",
            {"flexfair_over": "groups", "flexfair_attribute": "age", "flexfair_measure": "demographic_parity"},
        ),
    ],
)
def test_methods_that_act_on_groups_tell_their_declared_sums_alone(
    method: str, settings: dict[str, Any], tmp_path: Path, carried: list[tuple[str, str, Message]]
) -> None:
    local = federation(tmp_path / "data")
    made = make_plan(
        method, task="classification", sites=SITES, num_rounds=2,
        settings={**SMALL, "groups": ["age"], "criterion": "task", **settings},
    )  # fmt: skip
    done(made, tmp_path / "run", local)
    declared = {field.name: field for field in made.rule.report_fields}
    trained = [(site, reply) for site, name, reply in carried if name == "train"]
    assert len(trained) == 2 * len(SITES)
    for site, reply in trained:
        report = reply.meta["report"]
        assert {*report} == {*declared}
        for name, value in report.items():
            assert isinstance(value, list) is (declared[name].kind == "vector"), name
            assert not isinstance(value, list) or len(value) <= 4 * 2 * 4, name  # of groups and classes, not of people
        content = json.loads((tmp_path / "data" / site / "datalist.json").read_text())
        sent = bytes_of(reply)
        for entry in (entry for split in ("training", "validation", "test") for entry in content[split]):
            age = entry["attributes"]["age"]
            assert not any(told in sent for told in (struct.pack("<d", age), struct.pack(">d", age), str(age).encode()))
            assert entry["patient"].encode() not in sent
        assert not any(word in sent for word in (b"Xylo9", b"Quartz7", b"female", b"scanner", b"41.25"))


def test_a_run_that_asks_for_nothing_is_the_same_with_and_without_attributes(
    tmp_path: Path, carried: list[tuple[str, str, Message]]
) -> None:
    local = federation(tmp_path / "data")
    first = done(plan(), tmp_path / "one", local)
    told = [bytes_of(reply) for _, _, reply in carried]
    carried.clear()
    for site in SITES:
        file = tmp_path / "data" / site / "datalist.json"
        content = json.loads(file.read_text())
        del content["attributes"]
        for split in ("training", "validation", "test"):
            for entry in content[split]:
                del entry["attributes"]
        file.write_text(json.dumps(content))
    second = done(plan(), tmp_path / "two", local)
    assert told == [bytes_of(reply) for _, _, reply in carried]
    assert first["test"] == second["test"]
    written = run_document(tmp_path / "one/server/simulate_job/fairflare/results.json")
    assert written["groups"] is None
    assert first["groups"] is None


def test_a_run_has_them_in_results_table_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAIRFLARE_REPORT", raising=False)
    local = federation(tmp_path / "data")
    results = done(plan("sex", "age"), tmp_path / "run", local)
    found = results["groups"]
    pooled = found["pooled"]["sex"]
    assert found["attributes"] == {
        "sex": ["female", "male", "unknown"],
        "age": ["<41.25", "41.25-60", ">=60", "unknown"],
    }
    assert {name: of["images"] for name, of in pooled["groups"].items()} == {"female": 22, "male": 24, "unknown": 2}
    accuracy = np.mean([results["test"][site]["accuracy"] for site in SITES])
    assert pooled["all"]["accuracy"] == pytest.approx(accuracy, abs=1e-12)  # two test splits of one size
    for site in SITES:
        own = found["sites"][site]["age"]["groups"]
        assert sum(of["images"] for of in own.values()) == TEST
        right = sum(of["accuracy"] * of["images"] for of in own.values() if of["images"])
        assert right / TEST == pytest.approx(results["test"][site]["accuracy"], abs=1e-12)
    text = fairness_table(read(**results))
    assert "Gaps" not in text.partition("equalised_odds")[0]
    assert "unknown" in text
    low, high = pooled["gap_intervals"]["accuracy_gap"]
    assert 0 <= low <= pooled["gaps"]["accuracy_gap"] <= high <= 1
    gap = f"{pooled['gaps']['accuracy_gap']:.3f} {interval(low, high)}"
    assert gap in fairness_table(read(**results), style="markdown")
    assert gap not in text.split("\n\n", 1)[1]  # said first, and else not on the console
    assert "all sites" in text
    section = section_of(describe_run(read(**results)))
    assert section is not None
    first = build(describe_run(read(**results))).first
    assert len([line for line in first if "groups of sex" in line]) == 1
    assert section.parts[0].name == "groups_of_sex"
    page = (tmp_path / "run/server/simulate_job/fairflare/report.html").read_text()
    assert "Groups of people" in page
    assert "accuracy_gap" in page  # as show names it


# ------------------------------------------------------------------------------------------------ what stays


def test_groups_of_few_cases_stay_and_go_with_another(tmp_path: Path, carried: list[tuple[str, str, Message]]) -> None:
    """Check ``unknown`` with one image: it could be solved for alone, so the smallest other group is withheld too."""
    local = federation(tmp_path / "data")
    local["sites"]["site-2"]["min_cases"] = 5
    results = done(plan("sex", "scanner"), tmp_path / "run", local)
    found = results["groups"]
    assert set(found["kept"]) == {"site-2"}
    kept = found["kept"]["site-2"]
    assert {"sex=unknown", "sex=female"} <= set(kept)
    assert "sex=male" not in kept
    assert {"scanner=Xylo9", "scanner=Quartz7", "scanner=unknown"} <= set(kept)  # 3 and 21 of 24: none can be told
    home = found["sites"]["site-2"]["sex"]["groups"]
    assert home["male"]["accuracy"] is not None
    assert home["female"]["accuracy"] is None
    assert home["female"].get("images") is None
    assert found["pooled"]["sex"]["groups"]["female"]["images"] == 11  # of site-1 alone
    stats = next(reply.meta["stats"] for site, name, reply in carried if (site, name) == ("site-2", "validate"))
    assert np.isnan(stats["group_images"][0])
    assert np.isnan(stats["group_images"][2])
    assert not any(value in (3.0, 11.0, 1.0) for value in stats["group_images"])
    text = " ".join(fairness_table(read(**results)).split())
    assert "suppressed" in text
    assert "Groups of people that stay at a site, some only to hide another one" in text
    assert (
        "site-2: scanner=Quartz7, scanner=Xylo9, scanner=unknown, sex=female, sex=unknown (suppressed: fewer than "
        in text
    )
    assert section_of(describe_run(read(**results))).notes[1] in text


def test_a_site_with_few_test_cases_sends_no_group(tmp_path: Path, carried: list[tuple[str, str, Message]]) -> None:
    local = federation(tmp_path / "data")
    local["sites"]["site-2"] |= {"min_cases": TEST + 1, "classes": "all"}
    results = done(plan("sex"), tmp_path / "run", local)
    assert set(results["groups"]["sites"]) == {"site-1"}
    stats = next(reply.meta["stats"] for site, name, reply in carried if (site, name) == ("site-2", "validate"))
    assert not {field.name for field in groups.FIELDS} - {groups.NAMES} & set(stats)


def test_sums_by_class_stay_where_metrics_by_class_do(tmp_path: Path, carried: list[tuple[str, str, Message]]) -> None:
    local = federation(tmp_path / "data")
    local["sites"]["site-2"] |= {"metrics_by_class": False, "classes": "all"}
    results = done(plan("sex"), tmp_path / "run", local)
    stats = next(reply.meta["stats"] for site, name, reply in carried if (site, name) == ("site-2", "validate"))
    assert not {"group_cells", "group_confusion", "group_histogram"} & set(stats)
    own = results["groups"]["sites"]["site-2"]["sex"]["groups"]["male"]
    assert own["accuracy"] is not None
    assert "sensitivity" not in own


def test_segmentation_has_dice_by_group() -> None:
    from fairflare.tasks.segmentation import SegmentationTask

    task = SegmentationTask(image_size=(32, 32), features=(4, 4, 8, 8, 8, 4), phantom_cases=0.3)
    data = task.open_site("site-1", {})
    model = task.build_model()
    labels, dice = task.outcomes(model, data, "test", torch.device("cpu"))
    assert labels is None
    measured = task.evaluate(model, data.batches("test", batch_size=7), torch.device("cpu"))
    assert dice.mean() == pytest.approx(measured["dice"], abs=1e-6)
    numbers = np.arange(len(dice)) % 2
    table = groups.GroupTable("s", (None, dice), {"sex": numbers}, range(len(dice)),
                              ["sex=F", "sex=M", "sex=unknown"], 10, 5)  # fmt: skip
    told, held = table.sent(1, False)  # of one structure it is no sum by class
    found = np.array(told["group_dice"]).reshape(3, 20, 1, 3).sum(1)
    assert found[1, 0].tolist() == pytest.approx(
        [sum(numbers), dice[numbers == 1].sum(), (dice[numbers == 1] ** 2).sum()]
    )
    assert held == []


def test_a_patient_is_in_one_part_the_same_in_every_run() -> None:
    """Check 30 patients with 4 images each; with min_cases there are no parts."""
    whose = [("patient", str(i // 4)) for i in range(120)]
    dice, numbers = np.random.default_rng(0).uniform(size=(120, 1)), np.arange(120) // 4 % 2

    def table(site: str, scores: Any) -> groups.GroupTable:
        return groups.GroupTable(site, (None, scores), {"sex": numbers}, whose, ["sex=F", "sex=M"], 10, 5)

    told, _ = table("s", dice).sent(1, True)
    parts = np.array(told["group_cases"]).reshape(2, 20, 2)
    assert parts.sum(1).tolist() == [[15, 15 * 16], [15, 15 * 16]]
    assert sorted(parts[:, :, 0].sum(0).tolist()) == [1] * 10 + [2] * 10
    again, _ = table("s", dice[::-1]).sent(1, True)
    other, _ = table("t", dice).sent(1, True)
    assert again["group_cases"] == told["group_cases"]
    assert other["group_cases"] != told["group_cases"]
    floor, _ = table("s", dice).sent(2, True)
    assert floor["group_cases"] == [15, 240, 15, 240]
    stats = {field.name: floor.get(field.name) for field in groups.FIELDS}
    assert groups.read_groups("s", stats, ["sex"], 1, 10, 5)["sex=F"]["cases"].tolist() == [[15, 240]]
    assert groups.read_groups("s", stats, ["sex"], 1, 10, 5, ["sex=F", "sex=M"], 120)
    with pytest.raises(ReportError, match=r"'group_images' counts 120 .*'sex', .*119"):
        groups.read_groups("s", stats, ["sex"], 1, 10, 5, images=119)
    with pytest.raises(ReportError, match=r"the 2 groups .*has 2: 'another order'"):
        groups.read_groups("s", stats, ["sex"], 1, 10, 5, ["sex=M", "sex=F"])


# ------------------------------------------------------------------------------------------------ errors


def edited(key: str, value: Any) -> Any:
    def change(content: dict[str, Any]) -> None:
        content["test"][3]["attributes"][key] = value

    return change


@pytest.mark.parametrize(
    ("asked", "change", "words"),
    [
        ("weight", None, "'site-1'.*: the run asks for groups="),
        ("sex", edited("sex", "Secret"), "entry 3 of 'test': attribute 'sex' must"),
        ("sex", edited("sexx", "F"), "'site-2'.*entry 3 .* not declared"),
        ("age", edited("age", "Secret"), "'site-2'.*attribute 'age' must"),
        ("sex", lambda c: c["attributes"]["sex"].update(values=["male", "female"]), "the attributes differently"),
        ("sex", lambda c: c.update(attributes=["Secret"]), "'site-2'.*'attributes' must give"),
    ],
)  # fmt: skip
def test_bad_input_ends_the_run_before_it_begins(asked: str, change: Any, words: str, tmp_path: Path) -> None:
    local = federation(tmp_path / "data", change=change)
    with pytest.raises(RoundFailed, match=words) as caught:
        run_local(plan(asked), tmp_path / "run", local)
    assert "Secret" not in str(caught.value)


def test_a_task_that_tells_nothing_of_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageTask, "outcome_names", lambda self: [])
    with pytest.raises(RoundFailed, match="groups needs a task with a result"):
        run_local(plan("sex"), tmp_path / "run", federation(tmp_path / "data"))


def test_groups_of_a_task_with_findings_are_refused_in_words() -> None:
    task: Any = ClassificationTask(findings=["edema", "mass"], image_size=(33, 33))
    data: Any = SimpleNamespace(attributes={"sex": ("F", "M", "unknown")})
    with pytest.raises(SiteError, match=r"with several findings .*take groups out"):
        groups.check_asked("a", task, data, ["sex"])


def test_an_attribute_is_asked_for_once() -> None:
    with pytest.raises(ValueError, match="groups must name each attribute once"):
        plan("sex", "sex")


def test_a_reply_that_cannot_be_used() -> None:
    stats: dict[str, Any] = {field.name: None for field in groups.FIELDS}
    assert groups.read_groups("s", stats, ["sex"], 2, 10, 5) is None
    stats |= {groups.NAMES: ["sex=F", "sex=M"], "group_images": [1.0]}
    with pytest.raises(ReportError, match=r"'s': field 'group_images' .*expected 2"):
        groups.read_groups("s", stats, ["sex"], 2, 10, 5)
    with pytest.raises(ReportError, match=r"'group_names' must .*age, got 'sex=F'"):
        groups.read_groups("s", stats, ["age"], 2, 10, 5)


# ------------------------------------------------------------------------------------------------ gaps put in


class Oracle(torch.nn.Module):
    """Define a task that predicts the class that an image was drawn as, by its pixels."""

    def __init__(self, known: dict[bytes, int], classes: int) -> None:
        super().__init__()
        self.known, self.classes = known, classes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        drawn = [self.known[image.numpy().tobytes()] for image in inputs.mul(255).round().to(torch.uint8)]
        return 9.0 * torch.eye(self.classes)[drawn]


PLAN: dict[str, Any] = {
    "phantom": "dermoscopy7", "num_samples": 80, "num_test": 56, "num_own_test": 120, "image_size": 32,
    "num_sites": 2, "partition": "iid", "corrupted_sites": 0, "attributes": True, "attribute_shares": (0.5, 0.5),
}  # fmt: skip
AS_TASK: dict[str, Any] = {
    "phantom": "dermoscopy7", "phantom_samples": 80, "phantom_test": 56, "phantom_own_test": 120,
    "image_size": (32, 32), "phantom_sites": 2, "partition": "iid", "corrupted_sites": 0, "attributes": True,
}  # fmt: skip


@pytest.mark.parametrize("noise", [0.0, 0.4])
@pytest.mark.parametrize("prevalence", [0.0, 0.5])
def test_a_phantom_shows_the_gaps_that_were_put_in(noise: float, prevalence: float) -> None:
    """Check an oracle of the drawn class: it is wrong only for dark images that are drawn as the next class."""
    from fairflare.reporting.groups import summarise_groups

    task = ClassificationTask(**AS_TASK, attribute_noise=noise, attribute_prevalence=prevalence)
    classes, sums, seen = task.classes, {}, {}
    for index, site in enumerate(SITES):
        data = task.open_site(site, {})
        clean = ClassificationTask(**AS_TASK, attribute_prevalence=prevalence).open_site(site, {})
        images, labels = next(iter(data.batches("test", batch_size=1000)))
        as_labelled, _ = next(iter(clean.batches("test", batch_size=1000)))
        same = [bool(torch.equal(a, b)) for a, b in zip(images, as_labelled, strict=True)]
        drawn = [int(label) if own else (int(label) + 1) % classes for label, own in zip(labels, same, strict=True)]
        known = {i.mul(255).round().to(torch.uint8).numpy().tobytes(): d for i, d in zip(images, drawn, strict=True)}
        tones = np.array(data.group_numbers("test", "tone"))
        wrong = 1 - np.mean(np.array(same)[tones == 1])
        assert np.array(same)[tones == 0].all()
        assert wrong == pytest.approx(noise, abs=0.5 / (tones == 1).sum() + 1e-12)
        request: Any = type("Asked", (), {"groups": ("tone",), "group_bins": 50, "calibration_bins": 10})
        table = groups.table_of(site, task, Oracle(known, classes), data, torch.device("cpu"), request)
        told, _ = table.sent(1, True)
        stats = {field.name: told.get(field.name) for field in groups.FIELDS}
        sums[site] = groups.read_groups(site, stats, ["tone"], classes, 50, 10)
        seen[site] = (labels.numpy(), np.array(drawn), tones)
        assert index < 2
    found = groups_before(read(groups=summarise_groups(sums, {})))["pooled"]["tone"]
    labels, drawn, tones = (np.concatenate([of[k] for of in seen.values()]) for k in range(3))
    accuracy = [(labels == drawn)[tones == t].mean() for t in (0, 1)]
    assert found["groups"]["light"]["accuracy"] == pytest.approx(1.0)
    assert found["groups"]["dark"]["accuracy"] == pytest.approx(accuracy[1], abs=1e-12)
    assert found["gaps"]["accuracy_gap"] == pytest.approx(1 - accuracy[1], abs=1e-12)
    if noise:
        assert found["gaps"]["equalised_odds"] > 0.2
        assert found["worst"]["accuracy"] == "dark"
        assert found["gaps"]["es_accuracy"] < found["all"]["accuracy"]
    else:
        assert found["gaps"]["equalised_odds"] == found["gaps"]["equal_opportunity"] == 0.0
        assert found["gaps"]["es_accuracy"] == found["all"]["accuracy"] == 1.0
    share = [[(drawn[tones == t] == c).mean() for t in (0, 1)] for c in range(classes)]
    assert found["gaps"]["demographic_parity"] == pytest.approx(max(abs(a - b) for a, b in share), abs=1e-12)
    if prevalence and not noise:
        assert found["gaps"]["demographic_parity"] > 0.3


def test_prevalence_is_in_the_labels_and_nothing_else_moves() -> None:
    plain = class_site(PhantomPlan(**PLAN), 0)
    more = class_site(PhantomPlan(**PLAN, attribute_prevalence=0.5), 0)
    dark = plain.attributes["test"] == 1
    assert (plain.attributes["test"] == more.attributes["test"]).all()
    assert (plain.labels["test"] == more.labels["test"])[~dark].all()
    raised = (more.labels["test"] == 6)[dark].mean() - (plain.labels["test"] == 6)[dark].mean()
    assert 0.3 < raised <= 0.5 + 0.5 / dark.sum()


def test_what_depends_on_an_attribute_needs_attributes() -> None:
    with pytest.raises(ValueError, match="attribute_noise is set, but attributes"):
        PhantomPlan(attribute_noise=0.1)


class Outliner(torch.nn.Module):
    """Define a task that outlines the whole gland of every image, by its pixels."""

    def __init__(self, known: dict[bytes, torch.Tensor]) -> None:
        super().__init__()
        self.known = known

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        whole = [self.known[image.numpy().tobytes()] for image in inputs.mul(255).round().to(torch.uint8)]
        return 20.0 * torch.stack(whole).float() - 10.0


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_prostate_phantom_shows_the_gap_that_was_put_in(noise: float) -> None:
    """Check a perfect outline: its Dice is 1, except for patients of whom one half of the gland is outlined."""
    from fairflare.reporting.groups import summarise_groups

    size: dict[str, Any] = {"image_size": (32, 32), "phantom_cases": 2.0}
    task, clean = SegmentationTask(**size, attributes=True, attribute_noise=noise), SegmentationTask(**size)
    sums, dice, zones = {}, [], []
    for site in ("site-4", "site-5"):  # about half of the patients have an enlarged zone
        data, whole = task.open_site(site, {}), clean.open_site(site, {})
        (images, masks), (same, truth) = (next(iter(d.batches("test", batch_size=1000))) for d in (data, whole))
        assert torch.equal(images, same)  # nothing of it is in the images
        known = {i.mul(255).round().to(torch.uint8).numpy().tobytes(): t for i, t in zip(images, truth, strict=True)}
        request: Any = type("Asked", (), {"groups": ("zone",), "group_bins": 50, "calibration_bins": 10})
        table = groups.table_of(site, task, Outliner(known), data, torch.device("cpu"), request)
        told, _ = table.sent(1, True)
        stats = {field.name: told.get(field.name) for field in groups.FIELDS}
        sums[site] = groups.read_groups(site, stats, ["zone"], 1, 50, 10)
        own = np.array(data.group_numbers("test", "zone"))
        halved = [not torch.equal(m, t) for m, t in zip(masks, truth, strict=True)]
        patients = np.array(halved)[::4][own[::4] == 1]
        assert patients.mean() == pytest.approx(noise, abs=0.5 / len(patients) + 1e-12)
        assert not np.array(halved)[own == 0].any()
        for m, t in zip(masks.numpy().astype(bool), truth.numpy().astype(bool), strict=True):
            dice.append(2 * (m & t).sum() / (m.sum() + t.sum()))
        zones.append(own)
    found = groups_before(read(groups=summarise_groups(sums, {})))["pooled"]["zone"]
    of = [np.array(dice)[np.concatenate(zones) == k].mean() for k in (0, 1)]
    assert of[0] == 1.0
    assert found["groups"]["small"]["dice"] == pytest.approx(1.0, abs=1e-6)
    assert found["gaps"]["dice_gap"] == pytest.approx(1 - of[1], abs=1e-6)
    assert of[1] == pytest.approx(1 - noise / 3, abs=0.04)
    if noise:
        assert found["worst"]["dice"] == "enlarged"
        assert found["gap_intervals"]["dice_gap"][0] > 0
    else:
        assert found["gaps"]["dice_gap"] == pytest.approx(0.0, abs=1e-6)


def test_the_zone_is_that_of_the_anatomy_and_moves_nothing() -> None:
    plain, more = (SegmentationTask(phantom_cases=0.5, attributes=on).open_site("site-5", {}) for on in (False, True))
    for split in ("training", "test"):
        for a, b in zip(*(next(iter(d.batches(split, batch_size=1000))) for d in (plain, more)), strict=True):
            assert torch.equal(a, b)
    assert plain.attributes == {}
    assert more.attributes == {"zone": ("small", "enlarged", "unknown")}
    from fairflare_lab.phantoms import PELVIS

    drawn = {site: PELVIS.patients(site, size=(16, 16, 1), cases=20) for site in ("site-3", "site-5")}
    shares = {site: np.mean([p.group for part in found.values() for p in part]) for site, found in drawn.items()}
    assert shares["site-3"] == pytest.approx(0.15, abs=0.06)
    assert shares["site-5"] == pytest.approx(0.6, abs=0.08)
    with pytest.raises(ValueError, match="attribute_noise"):
        make_plan("fed_avg", task="segmentation", sites=SITES, num_rounds=1, settings={"attribute_noise": 0.5})


def test_a_left_out_site_tells_its_groups(tmp_path: Path) -> None:
    from fairflare_lab.compare.at_left_out import evaluate_unseen
    from fairflare_lab.compare.group_gaps import collect_left_out

    settings = {
        "local_epochs": 1, "image_size": [32, 32], "features": [4, 4, 8, 8, 8, 4], "phantom_cases": 0.2,
        "attributes": True, "groups": ["zone"],
    }  # fmt: skip
    given: dict[str, Any] = {
        "method": "fed_avg", "task": "segmentation", "sites": SITES, "num_rounds": 1, "settings": settings,
    }  # fmt: skip
    run_local(make_plan(**given), tmp_path)
    found = evaluate_unseen(given, tmp_path, "site-5", {})
    data = make_plan(**given).task.open_site("site-5", {})
    numbers = np.array(data.group_numbers("test", "zone"))
    assert {name: sum(of["images"]) for name, of in found.groups.items()} == {
        "zone=small": (numbers == 0).sum(), "zone=enlarged": (numbers == 1).sum(), "zone=unknown": 0,
    }  # fmt: skip
    run = read_results(tmp_path / "server/simulate_job/fairflare")
    (of_seed,) = collect_left_out([(run, found)])["fed_avg"]
    assert groups_before(of_seed)["pooled"]["zone"]["all"]["dice"] == pytest.approx(found.metrics["dice"], abs=1e-6)
    kept = evaluate_unseen(given, tmp_path, "site-5", {"sites": {"site-5": {"min_cases": 2}}})
    assert kept.groups == {}  # one test case
    assert kept.metrics == {}
