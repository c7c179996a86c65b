"""Make folders of runs for the tests of the report: results as a run writes them, with invented figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairflare.reporting.documents import SCHEMA_VERSION, RunResults, encode_value
from fairflare.reporting.findings import site_findings
from fairflare.reporting.standing import standing_notes
from tests.sections import upgraded


def round_of(number: int, sites: Sequence[str], values: Mapping[str, float], **more: Any) -> dict[str, Any]:
    return {
        "current_round": number,
        "sites": list(sites),
        "accepted": list(sites),
        "left_out": [],
        "phases": [
            {"name": "train", "seconds": 1.5, "bytes_out": 2_000_000, "bytes_in": 2_000_000, "asked": 3, "answered": 3}
        ],
        "validation": {site: {"dice": values[site] * number / 10, "loss": 0.5} for site in sites},
        "train": {site: {"loss": 0.4, "num_samples": 10} for site in sites},
        "site_weights": {site: 1 / len(sites) for site in sites},
        "layers": None,
        "reports": {},
        "values": {},
        "details": {},
        "warnings": [],
        "notes": [],
        "test": {},
        **more,
    }


def document(label: str, seed: int, values: Mapping[str, float], rounds: int = 2, **head: Any) -> dict[str, Any]:
    """Return the document of a completed run; ``values`` are its dice by site on the test splits."""
    sites = list(values)
    info = {
        "experiment": "",
        "job_id": "in_process",
        "method": label,
        "label": label,
        "primary_metric": "dice",
        "higher_is_better": {"dice": True, "loss": False},
        "num_rounds": rounds,
        "seed": seed,
        "sites": sites,
        "connected": sites,
        "measured": "common",
        "config": {
            "seed": seed,
            "rule": {"path": f"a.{label}", "args": {"q": 1.0}},
            "task": {"path": "t.Task", "args": {}},
        },
        "versions": {"fairflare": "0.2.0", "torch": "2.13.0"},
        "said": {site: {"images": {"training": 10}, "synthetic": True, "device": "cpu"} for site in sites},
        "synthetic": True,
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "status": "completed",
        "reason": "",
        "started": f"2026-01-0{1 + seed % 9}T00:00:00.000+00:00",
        "updated": "2026-01-09T00:00:00.000+00:00",
        "finished": "2026-01-09T00:00:00.000+00:00",
        "resumed": [],
        "went_back": [],
        "info": {**info, **head.pop("info", {})},
        "test": {site: {"dice": value, "loss": 1 - value} for site, value in values.items()},
        "fairness": None,
        "left_out": [],
        "phases": [],
        "best": None,
        "test_best": None,
        "fairness_best": None,
        "last_rounds": None,
        "rounds": [round_of(n, sites, values) for n in range(rounds)],
        **head,
    }


def read(**parts: Any) -> RunResults:
    """Read a document of these parts, as a run's own is read; NaN is what a file has as null."""
    return RunResults.model_validate(encode_value(upgraded(parts), "results"))


def on_sites(results: RunResults) -> list[str]:
    """Return what is said of a run's sites: first, and in the notes."""
    metric = results.inequality.metric or results.info.primary_metric
    return [*(one.text for one in site_findings(results, metric)), *standing_notes(results)]


def read_all(runs: Sequence[Mapping[str, Any]]) -> list[RunResults]:
    return [read(**run) for run in runs]


def write_run(folder: Path, content: Any) -> Path:
    """Write results where ``fairflare run`` has them; a text is written as it is."""
    place = folder / "server" / "simulate_job" / "fairflare"
    place.mkdir(parents=True)
    text = content if isinstance(content, str) else json.dumps(upgraded(content))
    (place / "results.json").write_text(text, encoding="utf-8")
    return folder


def write_comparison(folder: Path, runs: Sequence[Mapping[str, Any]]) -> Path:
    """Write runs as ``fairflare compare`` leaves them."""
    for run in runs:
        write_run(folder / "runs" / f"{run['info']['label']}-seed{run['info']['seed']}", run)
    return folder


def large(folder: Path, methods: int = 8, sites: int = 6, seeds: int = 3, layers: int = 41, rounds: int = 30) -> Path:
    """Write a comparison with weights by layer in every run."""
    names = [f"site-{k + 1}" for k in range(sites)]
    numbers = [
        {
            f"down_{layer // 4}.convs.conv_{layer}.adn": {
                site: {
                    "cka": 0.99,
                    "dissimilarity": 1e-4 * (1 + (k * layer + n) % 7),
                    "weight": ((3 * k + 2 * layer) % 7 + n % 3 + 1) / 40,
                }
                for k, site in enumerate(names)
            }
            for layer in range(layers)
        }
        for n in range(rounds)
    ]
    layers_text = [json.dumps(by_layer) for by_layer in numbers]
    for method in range(methods):
        for seed in range(seeds):
            values = {site: 0.5 + 0.05 * ((method * 3 + k * 5 + seed * 2) % 9) for k, site in enumerate(names)}
            run = document(f"method_{method}", seed, values, rounds)
            for n, record in enumerate(run["rounds"]):
                record["layers"], record["reports"] = (
                    f"@{n}@",
                    {site: {"mu": 0.1 * (n % 3 + k)} for k, site in enumerate(names)},
                )
            text = json.dumps(upgraded(run))
            for n in range(rounds):
                text = text.replace(f'"@{n}@"', layers_text[n])
            write_run(folder / "runs" / f"method_{method}-seed{seed}", text)
    return folder
