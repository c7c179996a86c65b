"""Test a site with a line of 1 MB/s, and a site that loses its line within a round, in FLARE's POC mode."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairflare.recipes import FairRecipe
from tests.tiny import run_document

from .conftest import TINY
from .lines import Line
from .poc_tools import SERVER, PocSystem, poc_system, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.walk, pytest.mark.timeout(1200)]

SITES = ["site-1", "site-2", "site-3"]
MEGABYTE = 1_000_000
GRACE = 20.0
MODEL = {**TINY, "features": [16, 16, 32, 64, 128, 16], "phantom_cases": 0.1, "batch_size": 2}  # 2 MB


def through(poc: PocSystem, site: str, rate: float | None) -> Line:
    """Lead a site's traffic over a line of its own."""
    path = poc.kit(site) / "startup" / "fed_client.json"
    content = json.loads(path.read_text())
    service = content["servers"][0]["service"]
    host, _, port = service["target"].partition(":")
    line = Line(int(port), rate)
    service["target"] = f"{host}:{line.port}"
    path.write_text(json.dumps(content))
    return line


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[tuple[PocSystem, Line, Line]]:
    with poc_system(tmp_path / "poc", SITES) as system:
        system.env["NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT"] = "3"
        for name in (SERVER, *SITES):
            system.allow(name)
        slow, cut = through(system, "site-2", MEGABYTE), through(system, "site-3", None)
        try:
            yield system, slow, cut
        finally:
            system.close()
            slow.close()
            cut.close()


def phase_of(results: dict[str, Any], number: int, name: str) -> dict[str, Any]:
    return next(p for p in results["rounds"][number]["phases"] if p["name"] == name)


def test_a_slow_and_a_cut_line(lines: tuple[PocSystem, Line, Line], tmp_path: Path) -> None:
    """Check that the wait for the cut site ends with the grace, that it returns, and that the slow one never misses."""
    poc, slow, cut = lines
    hold = tmp_path / "hold"
    hold.mkdir()
    wait = {"folder": str(hold), "batch": 1, "epoch": 1}
    for site in SITES:
        own = {"num_threads": 1, **({"wait": wait, "save_seconds": 1e-9} if site == "site-3" else {})}
        poc.edit_local(site, "fairflare.json", lambda c, own=own: c.update(own))
    poc.start()
    recipe = FairRecipe(
        "fed_avg", sites=SITES, num_rounds=4, min_sites=2, phase_timeout=600, straggler_grace=GRACE,
        settings={**MODEL, "local_epochs": 1}, task_file=Path(__file__).with_name("waiting_task.py"),
    )  # fmt: skip
    recipe.export(str(tmp_path / "jobs"))
    job = poc.submit(tmp_path / "jobs" / recipe.name)
    events = poc.run_dir(job) / "fairflare" / "progress.jsonl"

    def told(kind: str, **wanted: Any) -> bool:
        lines = events.read_text().splitlines() if events.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return any(e["kind"] == kind and all(e.get(k) == v for k, v in wanted.items()) for e in found)

    wait_for("site-3 in the middle of its second training", (hold / "reached").exists, 400)
    cut.cut()
    lost_at = time.monotonic()
    (hold / "go_on").touch()  # it trains to the end of its round, and cannot say so
    wait_for("the end of round 1", lambda: told("round_done", current_round=1), 400)
    without = time.monotonic() - lost_at
    cut.mend()
    said = poc.wait(job, 600)
    results = run_document(poc.download(job) / "fairflare")
    figures = {n: [round(p["seconds"], 1) for p in r["phases"]] for n, r in enumerate(results["rounds"])}
    print("seconds by round", figures, "without site-3", round(without, 1))
    print("carried", slow.carried, cut.carried, said[-200:])
    assert results["status"] == "completed"
    assert [r["accepted"] for r in results["rounds"][:2]] == [SITES, ["site-1", "site-2"]]
    (left,) = results["rounds"][1]["left_out"]
    assert left["site"] == "site-3"
    assert "no answer within" in left["reason"]
    heard = {site: results["rounds"][1]["train"][site]["seconds"] for site in SITES[:2]}
    # The slow one's model goes both ways at 1 MB/s; then the grace, and no more.
    size = phase_of(results, 1, "train")["bytes_in"] / 2
    assert size > 1.5 * MEGABYTE
    others = max(heard.values()) + 2 * size / MEGABYTE
    assert phase_of(results, 1, "train")["seconds"] < others + GRACE + 15
    assert phase_of(results, 1, "train")["seconds"] > size / MEGABYTE
    for record in results["rounds"]:
        assert "site-2" in record["accepted"]
    assert "site-3" in results["rounds"][3]["accepted"]
    assert sorted(results["test"]) == SITES
    assert slow.carried > 4 * 2 * size
