"""Test the results store and its tables: strict JSON, never half-written, resumable."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import resource
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fairflare.base.disk.files import csv_text
from fairflare.base.disk.record_log import RecordLog
from fairflare.cli.commands import app
from fairflare.core.cells import Cell
from fairflare.reporting.documents import Compared
from fairflare.reporting.results import (
    SCHEMA_VERSION,
    LeftOut,
    PhaseRecord,
    ResultsStore,
    RoundRecord,
    read_document,
    read_results,
)
from fairflare.reporting.table import SYNTHETIC_NOTE, fairness_table
from fairflare.reporting.values import cells_of
from fairflare_lab.compare.comparison import compare

NAN = math.nan
INFO = {
    "experiment": "exp-1",
    "method": "fed_lwr",
    "job_id": "j-1",
    "versions": {"fairflare": "0.1.0"},
    "seed": 3,
    "sites": ["A", "B", "C"],
    "config": {"rounds": 2, "path": Path("x/y"), "layers": ("a", "b")},
    "synthetic": True,
    "primary_metric": "dice",
}


def record(number: int, **changes: Any) -> RoundRecord:
    complete = RoundRecord(
        current_round=number,
        sites=["A", "B", "C"],
        accepted=["A", "B"],
        left_out=[LeftOut("C", "train", 'timed out, after "5 s"\nin all')],
        phases=[PhaseRecord("train", 1.5, 100, 200, 3, 2), PhaseRecord("anchor", 0.25, 10, 20, 2, 2)],
        validation={"A": {"dice": 0.5 + number, "loss": 0.1}, "B": {"dice": NAN, "loss": 0.2}},
        train={"A": {"loss": 0.3, "num_samples": 12}},
        site_weights=None,
        layers={"conv": {"A": {"cka": 0.9, "dissimilarity": 0.1, "weight": 1.0}, "B": {"cka": NAN, "weight": 0.0}}},
        reports={"A": {"cka": np.array([0.5, NAN]), "n": torch.tensor(4), "note": "ok"}},
    )
    return replace(complete, **changes)


@pytest.fixture
def store(tmp_path: Path) -> ResultsStore:
    return ResultsStore(tmp_path / "run" / "results")


def strict(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def snapshot(store: ResultsStore) -> list[dict[str, Any]]:
    return list(read_document(store.folder)["rounds"])


def finished(folder: Path, *, method: str = "fed_lwr", dice: tuple[float, ...] = (0.9, 0.5, 0.7), **info: Any) -> Any:
    store = ResultsStore(folder)
    store.start(INFO | {"method": method} | info)
    store.add_round(record(0))
    test = {site: {"loss": 1 - value, "dice": value} for site, value in zip("ABC", dice, strict=False)}
    store.finish("completed", cells=cells_of("last", test, {}, {}, {}, {}))
    return read_results(folder)


def kept_log(store: ResultsStore, folder: Path) -> RecordLog:
    """Copy the log, as a checkpoint does."""
    log = RecordLog(folder / "kept.bz2")
    log.take_over(store.log)
    return log


# the store


def test_a_run_from_start_to_finish(store):
    store.start(INFO)
    document = strict(store.folder / "results.json")
    assert document["status"] == "running"
    assert document["schema_version"] == SCHEMA_VERSION == 2
    assert document["info"]["config"] == {"rounds": 2, "path": "x/y", "layers": ["a", "b"]}
    assert document["rounds"] == []
    assert document["finished"] is None

    store.add_round(record(0))
    store.add_round(record(1, site_weights={"A": 0.25, "B": np.float32(0.75)}, layers=None))
    assert strict(store.folder / "results.json")["rounds"] == []
    document = read_document(store.folder)
    assert document["status"] == "running"
    first, second = document["rounds"]
    assert first["validation"]["B"] == {"dice": None, "loss": 0.2}
    assert first["left_out"] == [{"site": "C", "phase": "train", "reason": 'timed out, after "5 s"\nin all'}]
    assert first["phases"][1]["name"] == "anchor"
    assert first["layers"]["conv"]["A"]["dissimilarity"] == 0.1
    assert first["reports"]["A"] == {"cka": [0.5, None], "n": 4, "note": "ok"}
    assert second["site_weights"] == {"A": 0.25, "B": 0.75}
    assert second["layers"] is None

    store.finish("completed", cells=[Cell("dice", "A", value=0.9), Cell("dice", "B", value=NAN, reason="why")])
    document = read_document(store.folder)
    assert document == strict(store.folder / "results.json")
    assert document["status"] == "completed"
    head = {"metric": "dice", "model": "last", "split": "test"}
    assert document["cells"] == [{**head, "site": "A", "value": 0.9}, {**head, "site": "B", "reason": "why"}]
    assert read_results(store.folder).cells == [Cell("dice", "A", value=0.9), Cell("dice", "B", reason="why")]
    assert document["started"] <= document["finished"] <= document["updated"]


FORMULAS = [
    "=cmd|' /C calc'!A0", "@SUM(1)", "+A1", "-A1+2", "\t=A1", " =A1", "\n=A1", "\v=A1", "\xa0=A1", "\ufeff=A1",
    "\uff1dA1", "=1", "-site", "-2 [1, 3]",
]  # fmt: skip


def test_no_cell_of_a_csv_file_is_a_formula():
    """Check texts with any beginning, such as names of sites and metrics; numbers stay numbers."""
    assert csv_text([["a", "x\r=A1"]]) == "a,x =A1\n"  # no line of its own
    found = csv_text([[*FORMULAS, "-0.25", "+1e-3", "-", -0.25, None, "plain"]])
    assert next(csv.reader(io.StringIO(found, newline=""))) == [
        *(f"'{text}" for text in FORMULAS), "-0.25", "+1e-3", "-", "-0.25", "", "plain",
    ]  # fmt: skip


def test_a_run_that_fails_before_it_starts(store):
    store.finish("failed", reason="unknown method")
    assert read_document(store.folder)["status"] == "failed"


def test_completed_can_become_failed_but_not_the_reverse(store):
    store.start(INFO)
    store.finish("completed", cells=[Cell("dice", "A", value=0.5)])
    store.finish("failed", reason="the model could not be saved", cells=[Cell("dice", "A", value=0.1)])
    document = read_document(store.folder)
    assert (document["status"], document["cells"][0]["value"]) == ("failed", 0.5)
    with pytest.raises(ValueError, match="the run is already failed"):
        store.finish("completed")
    with pytest.raises(ValueError, match="the run is already failed"):
        store.add_round(record(0))


def test_refusals(store):
    with pytest.raises(ValueError, match="was not started"):
        store.add_round(record(0))
    with pytest.raises(ValueError, match="was not started"):
        store.finish("completed")
    store.start(INFO)
    with pytest.raises(ValueError, match=r"^status.* got 'done'$"):
        store.finish("done")
    store.add_round(record(1))
    for number in (0, 1):
        with pytest.raises(ValueError, match=rf"the next current_round.* got {number}"):
            store.add_round(record(number))
    with pytest.raises(TypeError, match=r"round holds <object .*of type object"):
        store.add_round(record(2, reports={"A": {"x": [1, object()]}}))
    assert len(read_document(store.folder)["rounds"]) == 1
    with pytest.raises(TypeError, match=r"info holds <function .*of type function"):
        store.start({"f": finished})


def test_an_interrupted_write_leaves_the_old_file(store, monkeypatch):
    store.start(INFO)
    store.add_round(record(0))

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        store.finish("completed", cells=[Cell("dice", "A", value=0.5)])
    document = read_document(store.folder)
    assert (document["status"], len(document["rounds"])) == ("running", 1)


def test_files_are_replaced_as_a_whole(store, tmp_path):
    """Check that an open or linked file keeps its content, as files are never written into."""
    store.start(INFO)
    store.add_round(record(0))
    state = store.state_dict()
    before = {name: (store.folder / name).read_bytes() for name in ("results.json", "rounds.jsonl.bz2")}
    for name in before:
        os.link(store.folder / name, tmp_path / name)
    store.load_state_dict(state | {"last_round": -1}, RecordLog(tmp_path / "none"))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert all((store.folder / name).read_bytes() != content for name, content in before.items())
    others = {"progress.jsonl", ".reserve"}
    assert {path.name for path in store.folder.iterdir()} == {*before, *others}  # nothing half-written


def many(number: int, sites: int = 6, layers: int = 8) -> RoundRecord:
    """Return a round in the manner of Fed-LWR."""
    rng = np.random.default_rng(number)
    names = [f"site-{k}" for k in range(sites)]
    values = {
        f"conv{layer}": {
            site: {"cka": float(1 - x), "dissimilarity": float(x), "weight": float(x)}
            for site, x in zip(names, rng.random(sites) / 10, strict=True)
        }
        for layer in range(layers)
    }
    return record(number, sites=names, layers=values)


def test_digits_of_the_values_by_layer_and_site(store):
    store.start({})
    layers = {"conv": {"A": {"cka": 1 - 1.23456789123e-5, "dissimilarity": 1.23456789123e-5, "weight": 1 / 3}}}
    store.add_round(record(0, layers=layers))
    values = {"cka": 0.999988, "dissimilarity": 1.2345679e-05, "weight": 0.33333333}
    assert read_document(store.folder)["rounds"][0]["layers"] == {"conv": {"A": values}}


def test_the_same_view_of_a_run_that_goes_on_was_killed_or_is_over(store):
    store.start(INFO)
    for number in range(3):
        store.add_round(many(number))
    going_on = read_document(store.folder)
    assert [entry["current_round"] for entry in going_on["rounds"]] == [0, 1, 2]
    store.finish("failed", reason="x")
    assert read_document(store.folder)["rounds"] == going_on["rounds"]


@pytest.mark.parametrize("cut", [1, 30, 10**6])
def test_an_interrupted_append_is_recovered(store, tmp_path, cut):
    store.start(INFO)
    store.add_round(many(0))
    log = kept_log(store, tmp_path)
    saved = store.state_dict()
    store.add_round(many(1))
    path = store.folder / "rounds.jsonl.bz2"
    data = path.read_bytes()
    path.write_bytes(data[: max(len(data) - cut, log.size)])  # killed within the write
    assert [entry["current_round"] for entry in read_document(store.folder)["rounds"]] == [0]
    again = ResultsStore(store.folder)
    again.start(INFO)
    again.load_state_dict(saved, log)
    again.add_round(many(1))
    assert path.read_bytes() == data


def test_a_damaged_record_within_the_log_is_named(store):
    store.start(INFO)
    store.add_round(many(0))
    store.add_round(many(1))
    path = store.folder / "rounds.jsonl.bz2"
    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"rounds\.jsonl\.bz2: record 0 is damaged"):
        read_document(store.folder)


def test_no_room_for_the_rounds_and_still_failed(store):
    """Check that the short final record fits into the reserved space."""
    store.start(INFO)
    assert (store.folder / ".reserve").stat().st_size >= 100_000
    for number in range(12):
        store.add_round(many(number, sites=20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            store.finish("completed", cells=[Cell("dice", "A", value=0.5)])
        store.finish("failed", reason="the disk is full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (store.folder / ".reserve").exists()
    document = strict(store.folder / "results.json")
    assert (document["status"], document["reason"], document["rounds"]) == ("failed", "the disk is full", [])
    assert len(read_document(store.folder)["rounds"]) == 12


def test_going_back_forgets_rounds_and_says_so(store, tmp_path):
    store.start(INFO)
    store.add_round(record(0))
    saved, files, log = store.state_dict(), snapshot(store), kept_log(store, tmp_path)
    store.add_round(record(1))
    store.go_back(saved, log, "all failed")
    assert snapshot(store) == files
    (entry,) = read_document(store.folder)["went_back"]
    assert (entry["from_round"], entry["to_round"], entry["reason"]) == (2, 1, "all failed")
    store.add_round(record(1))
    assert [e["current_round"] for e in read_document(store.folder)["rounds"]] == [0, 1]


def test_resume_in_another_folder(store, tmp_path):
    store.start(INFO)
    store.add_round(record(0))
    store.add_round(record(1))
    saved, log = json.loads(json.dumps(store.state_dict(), allow_nan=False)), kept_log(store, tmp_path)
    store.add_round(record(2))

    other = ResultsStore(tmp_path / "second")
    other.start(INFO | {"job_id": "j-2"})
    other.load_state_dict(saved, log)
    other.add_round(record(2))
    assert snapshot(other) == snapshot(store)
    before, after = read_document(store.folder), read_document(other.folder)
    assert after["rounds"] == before["rounds"]
    assert after["started"] == before["started"]
    assert after["info"]["job_id"] == "j-2"
    assert [entry["next_round"] for entry in after["resumed"]] == [2]


def test_resume_replaces_rows_that_the_checkpoint_does_not_know(store, tmp_path):
    store.start(INFO)
    store.add_round(record(0))
    saved, files, log = store.state_dict(), snapshot(store), kept_log(store, tmp_path)
    store.add_round(record(1))
    again = ResultsStore(store.folder)
    again.start(INFO)
    again.load_state_dict(saved, log)
    assert snapshot(again) == files


def test_results_of_another_schema_are_not_resumed(store):
    store.start(INFO)
    with pytest.raises(ValueError, match="saved results have schema version 99"):
        store.load_state_dict(store.state_dict() | {"schema_version": 99}, store.log)


def test_events(store):
    store.start(INFO)
    store.event("round", current_round=1, dice=NAN, site="A")
    lines = (store.folder / "progress.jsonl").read_text(encoding="utf-8").splitlines()
    event = json.loads(lines[0])
    assert event.pop("time").endswith("+00:00")
    assert event == {"kind": "round", "current_round": 1, "dice": None, "site": "A"}


def test_events_of_several_threads_stay_whole(store):
    store.start(INFO)
    work = [threading.Thread(target=lambda: [store.event("e", text="x" * 500) for _ in range(25)]) for _ in range(4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    lines = (store.folder / "progress.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 100
    assert all(json.loads(line)["text"] == "x" * 500 for line in lines)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a results file"),
        ("[]", "not a results file: .*schema_version"),
        ('{"schema_version": 1, "status": "running"}', "schema version 1, this FairFlare reads 2"),
        ('{"schema_version": 2, "status": "running", "n": 18446744073709551616}', "a whole number of 20 digits"),
        ('{"schema_version": 2, "status": "odd"}', "status.* got 'odd'$"),
    ],
)
def test_unreadable_results(tmp_path, content, message):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_document(tmp_path)
    assert str(tmp_path / "results.json") in str(caught.value)


@pytest.mark.parametrize(
    ("path", "odd", "told"),
    [
        (("rounds",), 7, "rounds is no list"),
        (("rounds", 0), None, r"rounds\[0\] is no object"),
        (("rounds", 0, "current_round"), True, r"rounds\[0\]\.current_round is no whole"),
        (("rounds", 0, "phases", 0, "seconds"), "1", r"rounds\[0\]\.phases\[0\]\.seconds is no"),
        (("rounds", 0, "layers", "conv", "A", "weight"), "x", r"rounds\[0\]\.layers\.conv\.A\.weight is"),
        (("info", "sites"), "A", r"info\.sites is no list"),
        (("cells", 0), [1], r"cells\[0\] "),
        (("cells", 0, "value"), "x", r"cells\[0\]\.value is no number"),
        (("vectors",), [{"metric": "dice", "values": [1, "x"]}], r"vectors\[0\]\.values\[1\] is no number"),
    ],
)
def test_a_part_of_another_kind_is_refused_and_named(tmp_path, path, odd, told):
    finished(tmp_path)
    document = read_document(tmp_path)
    within = document
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = odd
    (tmp_path / "results.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=rf"results\.json: {told}"):
        read_results(tmp_path)
    assert read_document(tmp_path) == document
    done = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert (done.exit_code, "Traceback" in done.output) == (2, False)


def test_an_older_document_has_what_it_lacks_by_default(tmp_path):
    """Check later keys and rounds without warnings: they are read without a message."""
    finished(tmp_path)
    document = read_document(tmp_path)
    for key in ("best", "went_back", "vectors", "inequality", "phases"):
        document.pop(key)
    for key in ("warnings", "suppressed", "test", "values", "details", "notes"):
        document["rounds"][0].pop(key)
    (tmp_path / "results.json").write_text(json.dumps(document))
    found = read_results(tmp_path)
    assert (found.info.seed, found.vectors, found.rounds[0].warnings) == (3, [], [])
    assert found.info.job_id == "j-1"


def test_missing_results(tmp_path):
    with pytest.raises(ValueError, match="no results there"):
        read_document(tmp_path)


# the tables


def test_fairness_table(tmp_path):
    text = fairness_table(finished(tmp_path))
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith("fed_lwr, experiment exp-1, seed 3, 1 round\n")
    assert ["site", "dice", "loss"] in lines  # the primary metric first
    assert ["A", "0.900", "0.100"] in lines
    assert ["average", "0.700", "0.300"] in lines
    assert ["std", "0.163", "0.163"] in lines  # sqrt(0.08 / 3)
    assert ["worst", "0.500", "0.500"] in lines  # of a loss the highest
    assert ["worst", "site", "B?", "B?"] in lines  # that B is behind is not shown
    assert ["range", "0.400", "0.400"] in lines
    assert "C in round 0, train: timed out" in text
    assert text.endswith(SYNTHETIC_NOTE)
    widths = {len(line) for line in text.splitlines() if line[:4] in ("site", "A   ", "B   ", "std ")}
    assert len(widths) == 1


def test_real_data_carry_no_note(tmp_path):
    assert SYNTHETIC_NOTE not in fairness_table(finished(tmp_path, synthetic=False))


def test_a_site_without_test_result_is_shown_and_not_averaged(tmp_path):
    text = fairness_table(finished(tmp_path, dice=(0.9, 0.5)))
    assert ["C", "-", "-"] in [line.split() for line in text.splitlines()]
    assert ["average", "0.700", "0.300"] in [line.split() for line in text.splitlines()]


def test_table_of_a_failed_run(store):
    store.start(INFO)
    store.finish("failed", reason="1 of min_sites=2")
    text = fairness_table(read_results(store.folder))
    assert "The run FAILED after 0 rounds: 1 of min_sites=2. There are no test results, so nothing is said of" in text


def test_compare_over_seeds(tmp_path):
    runs = [
        finished(tmp_path / "1", dice=(0.9, 0.5, 0.7), seed=1),
        finished(tmp_path / "2", dice=(0.8, 0.6, 0.7), seed=2),
        finished(tmp_path / "3", method="fed_avg", dice=(0.9, 0.3, 0.6)),
    ]
    text = compare(runs)
    assert text.startswith("No seed in common with fed_lwr, so not compared: fed_avg.\n")
    lines = [line.split() for line in text.partition("\n\n")[2].splitlines()]
    assert lines[0] == ["method", "runs", "A", "B", "C", "average", "std", "worst"]
    # std over sites 0.1633 and 0.0816: mean 0.1225, and 0.0408 over the seeds
    over_seeds = ("0.85 ± 0.05", "0.55 ± 0.05", "0.700 ± 0.000", "0.700 ± 0.000")
    over_seeds += ("0.12 ± 0.04", "0.55 ± 0.05")
    assert " ".join(lines[2]) == " ".join(("fed_lwr 2", *over_seeds))
    assert " ".join(lines[3]) == "fed_avg 1 0.900 0.300 0.600 0.600 0.245 0.300"
    assert SYNTHETIC_NOTE in text
    assert "| fed_lwr | 2 | 0.700 ± 0.000 |" in compare(runs, style="markdown", per_site=False)
    assert "0.15 ± 0.05" in compare(runs, metric="loss")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"sites": ["A", "B", "D"]}, "their sites"),
        ({"synthetic": False}, "synthetic or real data"),
        ({"num_rounds": 99}, "the number of rounds"),
        ({"config": {"task": {"path": "fairflare.T", "args": {"image_size": 64}}}}, "the task's settings"),
    ],
)
def test_compare_says_when_runs_are_not_comparable(tmp_path, change, what):
    runs = [finished(tmp_path / "1"), finished(tmp_path / "2", method="fed_avg")]
    assert "NOT COMPARABLE" not in compare(runs)
    for key, value in change.items():
        setattr(runs[1].info, key, value)
    assert f"NOT COMPARABLE as they stand: the runs differ in {what}." in compare(runs)


def test_compare_says_which_rows_have_another_task(tmp_path):
    """Check that the table shows whether a row has another head, or another image size."""
    runs = [finished(tmp_path / str(n), method=method) for n, method in enumerate(("fed_avg", "fed_prox", "ldam"))]
    for run, head in zip(runs, ("linear", "linear", "cosine"), strict=True):
        run.info.config = {"task": {"path": "T", "args": {"image_size": 64, "classifier": head}}}
    lines = compare(runs).splitlines()
    assert [line for line in lines if "classifier" in line] == [
        f"  {label}: task.classifier '{head}'"
        for label, head in {"fed_avg": "linear", "fed_prox": "linear", "ldam": "cosine"}.items()
    ]
    assert not any("image_size" in line for line in lines)


def test_compare_sees_another_task_file(tmp_path):
    """Check two networks of the same settings; results without a file's checksum are no reason."""
    runs = [finished(tmp_path / "1"), finished(tmp_path / "2", method="fed_avg")]
    for run, checksum in zip(runs, ("a" * 64, "b" * 64), strict=True):
        run.info.task_file = {"name": "task.py", "sha256": checksum}
    assert "NOT COMPARABLE as they stand: the runs differ in the task's file." in compare(runs)
    runs[0].info.task_file = {}
    assert "NOT COMPARABLE" not in compare(runs)


def test_compare_sees_other_structures_and_names_the_run_of_each(tmp_path):
    runs = [finished(tmp_path / "1"), finished(tmp_path / "2", method="fed_avg")]
    for run, shared in zip(runs, ("lens", "iris"), strict=True):
        run.footing = Compared(how="shared", shared=[shared], structures={"A": [shared], "B": ["lens", "iris"]})
        run.cells.append(Cell(f"own/{run.info.primary_metric}", "A", value=0.5))
        del run.columns
    told = compare(runs)
    assert "NOT COMPARABLE as they stand: the runs differ in the structures that are compared." in told
    for label, shared in (("fed_lwr", "lens"), ("fed_avg", "iris")):
        line = next(
            line for line in told.splitlines() if line.startswith(f"In 1 of 1 run of {label}: The sites annotate")
        )
        assert line.endswith(f"those that all have: {shared}.")
    runs[0].footing = Compared()  # all sites annotate all structures
    assert "the runs differ in the structures that are compared." in compare(runs)
    assert "In 1 of 1 run of fed_avg: The sites annotate, or mark, different structures" in compare(runs)
    runs[0].footing = runs[1].footing
    assert "NOT COMPARABLE" not in compare(runs)


def test_compare_names_what_cannot_be_compared(tmp_path):
    runs = [finished(tmp_path / "1"), finished(tmp_path / "2", method="fed_avg")]
    runs[1].cells = [Cell("accuracy", "A", value=0.5)]
    del runs[1].columns
    with pytest.raises(ValueError, match=r"'fed_avg', .*, seed 3 has .* 'dice'; it"):
        compare(runs)


def test_no_site_is_the_worst_of_equals(tmp_path):
    text = fairness_table(finished(tmp_path / "1", dice=(0.5, 0.5, 0.5)))
    (line,) = (line for line in text.splitlines() if line.startswith("worst site"))
    assert line.split()[2] == "-"


@pytest.mark.parametrize("width", [30, 50, 80])
def test_wide_tables_are_cut_between_columns(tmp_path, width):
    runs = [finished(tmp_path / str(i), dice=(0.9, 0.5, 0.7), seed=i) for i in range(2)]
    table, _, _ = compare(runs, width=width).partition("\nFigures are")
    first, *blocks = [block.splitlines() for block in table.split("\n\n")]
    assert max(map(len, first)) <= width
    assert max(len(line) for block in blocks for line in block) <= width
    assert {block[0].split()[0] for block in blocks} == {"method"}
    whole = compare(runs).partition("\n\n")[2].splitlines()[0].split()
    assert [name for block in blocks for name in block[0].split()[1:]] == whole[1:]


def test_compare_leaves_out_incomplete_runs_and_says_so(tmp_path):
    failed = ResultsStore(tmp_path / "f")
    failed.start(INFO)
    runs = [finished(tmp_path / "1", label="Fed-LWR | paper"), read_results(tmp_path / "f")]
    text = compare(runs)
    line = r"1 of 2 runs did not complete and are left out: 'fed_lwr', begun 20[\d:T-]+, seed 3: running\.\n"
    assert re.match(line, text), text
    assert "| Fed-LWR \\| paper | 1 |" in compare(runs, style="markdown")
    with pytest.raises(ValueError, match="none of the 1 runs is complete"):
        compare(runs[1:])
    with pytest.raises(ValueError, match="no test results for metric 'auc'"):
        compare(runs, metric="auc")
    with pytest.raises(ValueError, match=r"^style.* got 'html'$"):
        compare(runs, style="html")  # type: ignore[arg-type]
