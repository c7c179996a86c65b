"""Test that runs of a comparison that are refused before their first round are replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairflare_lab.cli.compare.runs import PLAN_FILE, Runner
from fairflare_lab.cli.compare.series import Series, read_entry
from tests.unit.report_runs import document


def test_only_a_run_without_rounds_is_replaced(tmp_path: Path) -> None:
    series = Series([read_entry("fed_avg")], seeds=[0], task="segmentation", sites=2, rounds=1)
    place = tmp_path / "runs" / "fed_avg-seed0"
    place.mkdir(parents=True)
    (place / PLAN_FILE).write_text(json.dumps({"plan": {"num_rounds": 7}, "local": {}, "simulator": False}))

    def there(**more: Any) -> None:
        (place / "results.json").write_text(json.dumps(document("fed_avg", 0, {"a": 0.5, "b": 0.4}) | more))

    there(status="failed", reason="check: no data", test=None)
    with pytest.raises(ValueError, match="holds a run of other settings"):
        Runner(series, tmp_path, {})
    assert place.exists()
    there(status="failed", reason="check: no data", test=None, rounds=[])
    assert Runner(series, tmp_path, {}).all[0].state == "waiting"
    assert not place.exists()
