"""Test ``--json``: one document on standard output, with the declared keys and the figures of the tables."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fairflare.cli import commands
from fairflare.cli.data import doctor
from fairflare.data.datalist import SPLITS, write_datalist
from fairflare.methods.base.catalog import all_methods
from tests.sections import upgraded
from tests.unit.report_runs import document

PAGE = Path(__file__).parents[2] / "docs" / "command_line.md"


def asked(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(commands.app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout, parse_constant=pytest.fail)  # no NaN
    assert found.pop("version") == 1
    return found


def documented(row: str) -> set[str]:
    """Return the keys that the page names for a command, or for a part of its document."""
    (line,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return set(re.findall(r"`(\w+)`", line))


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = []
    for label, better in (("fed_avg", 0.0), ("fed_lwr", 0.1)):
        for seed in (0, 1):
            values = {"a": 0.5 + better + 0.01 * seed, "b": 0.3 + better, "c": 0.7}
            folders.append(tmp_path / f"{label}{seed}")
            folders[-1].mkdir()
            (folders[-1] / "results.json").write_text(json.dumps(upgraded(document(label, seed, values))))
    return folders


def test_list_has_every_method() -> None:
    found = asked("list")
    assert sorted(method["name"] for method in found["methods"]) == sorted(all_methods())
    assert documented("`list`") == {*found, *found["methods"][0]}


def test_describe_has_the_values_of_a_run() -> None:
    found = asked("describe", "fed_mrl", "mu_policy", "image_size")
    values = {one["name"]: (one["value"], one["paper"]) for group in found["groups"] for one in group["settings"]}
    assert values == {"mu_policy": ("fixed", "qmix"), "image_size": ([48, 48], "[224, 224]")}
    group = found["groups"][0]
    assert documented("`describe`") == {*found, *group, *group["settings"][0]}


def test_one_run_has_the_figures_of_its_table(runs: list[Path]) -> None:
    found = asked("show", runs[1], "--metric", "dice")["run"]
    values = {"a": 0.51, "b": 0.3, "c": 0.7}
    dice = found["metrics"]["dice"]
    assert (found["label"], found["seed"], found["status"], dice["sites"]) == ("fed_avg", 1, "completed", values)
    expected = [statistics.fmean(values.values()), statistics.pstdev(values.values()), 0.3, "b"]
    assert [dice[name] for name in ("average", "std", "worst")] == pytest.approx(expected[:3])
    assert dice["worst_site"] == "b"
    assert documented("`show` of one run") == {"run", *found, *dice}


def test_several_runs_have_the_figures_of_the_csv(runs: list[Path]) -> None:
    found = asked("show", *runs)["comparison"]
    done = CliRunner().invoke(commands.app, ["show", *map(str, runs), "--csv"])
    for row, line in zip(found["rows"], csv.DictReader(io.StringIO(done.stdout)), strict=True):
        for name in ("average", "std", "worst"):
            assert (row[name]["mean"], row[name]["sd"] or 0) == pytest.approx(
                (float(line[f"{name} mean"]), float(line[f"{name} sd"])), abs=1e-9
            )
        assert (row["label"], row["seeds"]) == (line["method"], [0, 1])
    average = next(one for one in found["differences"] if one["measure"] == "average")
    assert average["values"] == pytest.approx({"0": 0.2 / 3, "1": 0.2 / 3})
    assert documented("`show` of several") == {"comparison", *found}
    assert documented("a row of a comparison") == {*found["rows"][0]}
    assert documented("a difference") == {*average}


def test_an_undefined_figure_is_null(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(upgraded(document("fed_avg", 0, {"a": 0.5, "b": 0.3}) | {"test": None})))
    assert asked("show", path)["run"]["metrics"] == {}
    path.write_text(json.dumps(upgraded(document("fed_avg", 0, {"a": 0.5, "b": 0.3}) | {"test": {"a": {"dice": 0.5}}})))
    assert asked("show", path)["run"]["metrics"]["dice"]["sites"] == {"a": 0.5, "b": None}


def test_check_data_has_every_problem(tmp_path: Path) -> None:
    splits: dict[str, list[dict[str, Any]]] = {}
    rng = np.random.default_rng(0)
    for split in SPLITS:
        splits[split] = []
        for k in range(8):
            name = f"{split}{k}.png"
            Image.fromarray(rng.integers(0, 256, (40, 32)).astype(np.uint8)).save(tmp_path / name)
            splits[split].append({"image": name, "label": k % 2, "patient": f"{split}{k}"})
    write_datalist(tmp_path / "datalist.json", splits)
    found = asked("check-data", tmp_path)
    assert (found["usable"], found["grave"], found["problems"]) == (8 * len(SPLITS), 0, [])
    assert found["sites"][0]["counts"]["training"] == {"class_0": 4, "class_1": 4}
    assert found["sites"][0]["sizes"] == [{"width": 32, "height": 40, "images": 8 * len(SPLITS)}]
    (tmp_path / "training0.png").write_bytes(b"no image")
    found = asked("check-data", tmp_path, code=1)
    assert found["usable"] == 8 * len(SPLITS) - 1
    assert found["grave"] >= 1
    kinds = {*found, *found["problems"][0], *found["sites"][0]}
    assert documented("`check-data`") == kinds | {"width", "height", "images"}
    assert any("training0.png" in problem["text"] for problem in found["problems"])
    for number in (1, 2):
        (tmp_path / f"training{number}.png").write_bytes(b"no image")
    (one,) = asked("check-data", tmp_path, code=1)["problems"]
    assert " -- 2 more such: " in one["text"]
    assert len(asked("check-data", tmp_path, "--all", code=1)["problems"]) == 3


def test_doctor_tells_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked("doctor")["findings"]
    assert {"python", "fairflare", "GPU", "disk"} <= {one["what"] for one in found}
    monkeypatch.setattr(doctor, "examine", lambda *_: [doctor.KitFinding("port 1", "problem", "not free: [red]")])
    problem = asked("doctor", code=1)["findings"]
    assert problem == [{"what": "port 1", "state": "problem", "text": "not free: [red]"}]
    assert documented("`doctor`") == {"findings", *problem[0], "ok", "warning", "problem"}


@pytest.mark.parametrize(
    "line",
    [
        "show nothing", "describe fed_lwrr", "list --markdown", "check-data nothing", "doctor --set x",
        "compare fed_avg --sites all",
    ],
)  # fmt: skip
def test_mistakes_print_no_document(line: str) -> None:
    done = CliRunner().invoke(commands.app, [*line.split(), "--json"])
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)


def test_what_a_task_file_prints_goes_to_standard_error(tmp_path: Path) -> None:
    task = tmp_path / "loud.py"
    task.write_text("print('hello')\nfrom fairflare.tasks.segmentation import SegmentationTask as Task\n")
    (tmp_path / "fairflare.json").write_text('{"sites": {"a": {}}}')
    done = CliRunner().invoke(commands.app, ["check-data", str(tmp_path), "--task-file", str(task), "--json"])
    assert "hello" in done.stderr
    assert json.loads(done.stdout)["problems"]


def test_the_page_names_every_exit_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    codes = re.findall(r"^\| (\d+) \|", text.partition("## Exit codes")[2].partition("\n## ")[0], re.MULTILINE)
    assert codes == ["0", "1", "2", "130", "143"]
