"""Test FLARE's federated statistics with sites that answer anything: each loses only its own figures, by name."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.statistics_spec import Bin, Histogram, HistogramType
from nvflare.app_common.app_constant import StatisticsConstants as StC
from nvflare.fuel.utils import fobs

from fairflare.flare.statistics import DATASET, PHASES, SiteStatistics, StatisticsPage, configs

FIRST, SECOND = PHASES
SITES = ["site-1", "site-2", "site-3"]
COUNTS = {"cases": 20, "images": 20, "cases_training": 20, "intensity": 6400, "class": 20, "width": 20}


def honest(phase: str) -> dict[str, Any]:
    """Return a healthy site's report, before it is written."""
    if phase == FIRST:
        ends = {"failure_count": 0, "min": 0, "max": 1}
        return {"count": {DATASET: dict(COUNTS)}} | {n: {DATASET: dict.fromkeys(COUNTS, v)} for n, v in ends.items()}
    told: dict[str, Any] = {
        "intensity": [(0.5, 0.515625, 6400)],
        "class": [(0, 1, 12), (1, 2, 8)],
        "width": [(32, 64, 20)],
    }
    bins = {name: [Bin(*of) for of in told.get(name, [])] for name in COUNTS}
    return {"count": {DATASET: dict(COUNTS)}, "histogram": {
        DATASET: {name: Histogram(HistogramType.STANDARD, of) for name, of in bins.items()}
    }}  # fmt: skip


def sent(phase: str, told: Any) -> Shareable:
    return DXO(DataKind.STATISTICS, {StC.STATISTICS_TASK_KEY: phase, phase: fobs.dumps(told)}).to_shareable()


Answer = Callable[[str, str], Any]


def job(answer: Answer, folder: Path, *, drawn: bool = False) -> tuple[SiteStatistics, list[str]]:
    """Do a whole job, with FLARE's controller, its callbacks and our page; return it with the controller's panics."""
    controller, page = SiteStatistics(configs(), "page", min_clients=len(SITES), precision=6), StatisticsPage()
    panics: list[str] = []
    workspace = SimpleNamespace(get_run_dir=lambda job: str(folder))
    parts = {"page": page}
    engine = SimpleNamespace(get_workspace=lambda: workspace, get_component=parts.get, get_clients=lambda: SITES)
    context = FLContext()
    context.get_engine = lambda: engine
    context.get_job_id = lambda: "job"

    def ask(task: Any, **how: Any) -> None:
        for site in SITES:
            result = answer(site, task.props[StC.STATISTICS_TASK_KEY])
            if result is not None:
                client_task = SimpleNamespace(client=SimpleNamespace(name=site), task=task, result=result)
                controller.results_cb(client_task, context)

    controller.broadcast_and_wait = ask
    controller.system_panic = lambda reason, fl_ctx: panics.append(reason)
    for one in (controller, page):
        for level in ("log_info", "log_warning", "log_error"):
            setattr(one, level, lambda *args, **kwargs: None)
    controller.start_controller(context)
    told = mock.patch("fairflare.reporting.sites.statistics.tell_listeners", return_value=[])  # a page takes a second
    with contextlib.nullcontext() if drawn else told:
        controller.control_flow(Signal(), context)
    return controller, panics


def changed(phase: str, change: Callable[[dict[str, Any]], Any]) -> Answer:
    """Let one site change its report in one phase."""

    def answer(site: str, now: str) -> Any:
        told: Any = honest(now)
        if (site, now) == ("site-2", phase):
            told = change(told) or told
        return told if isinstance(told, Shareable) else sent(now, told)

    return answer


def put(statistic: str, feature: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(told: dict[str, Any]) -> None:
        told[statistic][DATASET][feature] = value

    return change


def histogram(*bins: Any) -> Histogram:
    return Histogram(HistogramType.STANDARD, [Bin(*of) for of in bins])


def instead(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda told: value


def without(statistic: str) -> Callable[[dict[str, Any]], None]:
    return lambda told: told.update({statistic: 7})


HOSTILE: dict[str, Answer] = {
    **{f"count {value!r:.20}": changed(FIRST, put("count", "cases", value)) for value in (
        -1, 1.5, math.nan, math.inf, "20", None, True, 2**62, [20], {"a": 1}, b"20",
    )},
    "an unknown count": changed(FIRST, put("count", "weight", 3)),
    "a number as name": changed(FIRST, put("count", 7, 3)),  # type: ignore[arg-type]
    "another data set": changed(FIRST, lambda told: told["count"].update(more={"cases": 3})),
    "no counts": changed(FIRST, without("count")),
    "counts of a list": changed(FIRST, lambda told: told.update(count=[1])),
    "a list": changed(FIRST, instead([1])),
    "a text": changed(FIRST, instead("x")),
    "no FOBS": changed(FIRST, instead(DXO(DataKind.STATISTICS, {FIRST: b"\xff"}).to_shareable())),
    "not the phase": changed(FIRST, instead(DXO(DataKind.STATISTICS, {SECOND: b""}).to_shareable())),
    "no DXO": changed(FIRST, instead(Shareable())),
    **{f"return code {code}": changed(FIRST, instead(make_reply(code))) for code in (
        ReturnCode.EXECUTION_EXCEPTION, ReturnCode.EXECUTION_RESULT_ERROR, ReturnCode.TASK_UNKNOWN,
        ReturnCode.TASK_RESULT_FILTER_ERROR, "MADE_UP",
    )},
    **{f"bins {bins!r:.30}": changed(SECOND, put("histogram", "width", histogram(*bins))) for bins in (
        [(33, 64, 20)], [(32, 64, 21)], [(32, 64, -1)], [(32, 64, 1.5)], [(32, 64, math.nan)], [(32, 64, "x")],
        [(32, math.nan, 20)], [(math.nan, 64, 20)], [(math.inf, 64, 20)], [(32, 640, 20)], [("a", "b", 20)],
        [(1e300, 1e300, 20)], [(32, 64, 10), (32, 64, 10)], [(-32, 0, 20)], [(32, 64, True)], [(None, 64, 3)],
    )},
    "no histogram": changed(SECOND, put("histogram", "width", 7)),
    "no list of bins": changed(SECOND, put("histogram", "width", Histogram(HistogramType.STANDARD, 7))),
    "bins of a count": changed(SECOND, put("histogram", "cases", histogram((0, 1, 3)))),
    "bins of an unknown": changed(SECOND, put("histogram", "weight", histogram((0, 1, 3)))),
    "bins without records": changed(SECOND, put("histogram", "height", histogram((0, 32, 3)))),
    "histograms of a list": changed(SECOND, lambda told: told.update(histogram=[1])),
    "silent at the second": lambda site, phase: (
        None if (site, phase) == ("site-2", SECOND) else sent(phase, honest(phase))
    ),
    "failed at the second": changed(SECOND, instead(make_reply(ReturnCode.EXECUTION_EXCEPTION))),
}  # fmt: skip


def document(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "fairflare" / "stats.json").read_text()))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a job's output where one site never answers."""
    folder = tmp_path_factory.mktemp("two")
    _, panics = job(lambda site, phase: None if site == "site-2" else sent(phase, honest(phase)), folder)
    assert panics == []
    return document(folder)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_wrong_answer_costs_its_site_the_figures(name: str, of_two: dict[str, Any], tmp_path: Path) -> None:
    controller, panics = job(HOSTILE[name], tmp_path)
    assert panics == []
    assert list(controller.left_out) == ["site-2"]
    reason = controller.left_out["site-2"]
    assert reason.startswith("site 'site-2'")
    assert len(reason) < 360
    assert reason.isprintable()
    found = document(tmp_path)
    assert found["sentences"][0] == f"LEFT OUT, in no figure: {reason}."
    assert found.pop("left_out") == {"site-2": reason}
    assert {**found, "sentences": found["sentences"][1:], "left_out": {}} == of_two


def test_who_is_left_out_is_on_the_page(tmp_path: Path) -> None:
    job(HOSTILE["count -1"], tmp_path, drawn=True)
    page = (tmp_path / "fairflare" / "stats.html").read_text()
    assert "LEFT OUT, in no figure: site &#39;site-2&#39;: cases must be a whole number" in page


def test_honest_answers_are_taken_and_added(tmp_path: Path) -> None:
    controller, panics = job(lambda site, phase: sent(phase, honest(phase)), tmp_path)
    assert (controller.left_out, panics) == ({}, [])
    found = document(tmp_path)
    assert sorted(found["sites"]) == SITES
    assert found["pooled"]["counts"]["cases"] == 60
    assert [of["count"] for of in found["pooled"]["histograms"]["class"]["bins"]] == [36, 24]


def test_without_a_usable_site_the_job_says_why(tmp_path: Path) -> None:
    _, panics = job(lambda site, phase: make_reply(ReturnCode.EXECUTION_EXCEPTION), tmp_path)
    (reason,) = panics
    assert reason.startswith(
        "no site sent usable figures: sites 'site-1', 'site-2', 'site-3': its task failed (EXECUTION_EXCEPTION)"
    )
    assert all(site in reason for site in SITES)
