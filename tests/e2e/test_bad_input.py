"""Test bad input in real jobs: it gives one clear message and a failed job, and no result that looks complete."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def site_folder(root, name, cases=6, size=32):
    """Make a site's folder of PNG discs with a datalist."""
    folder = root / name
    folder.mkdir(parents=True)
    rng = np.random.default_rng(len(name))
    y, x = np.mgrid[:size, :size]
    entries = []
    for i in range(cases):
        mask = ((y - rng.integers(10, 22)) ** 2 + (x - rng.integers(10, 22)) ** 2 < 40).astype(np.uint8)
        image = (mask * 120 + rng.integers(0, 80, mask.shape)).astype(np.uint8)
        Image.fromarray(image).save(folder / f"image{i}.png")
        Image.fromarray(mask).save(folder / f"mask{i}.png")
        entries.append({"image": f"image{i}.png", "label": f"mask{i}.png"})
    split = {"training": entries[:-2] or entries[:1], "validation": entries[-2:-1], "test": entries[-1:]}
    (folder / "datalist.json").write_text(json.dumps(split))
    return folder


def test_bad_sites_are_left_out_by_name_and_the_rest_goes_on(job, simulate, tmp_path):
    good, unreadable, unequal = (site_folder(tmp_path / "data", n) for n in ("good", "unreadable", "unequal"))
    one_case = site_folder(tmp_path / "data", "one", cases=3)
    (unreadable / "image0.png").write_bytes(b"not a picture")
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(unequal / "mask1.png")
    sites = {
        "site-1": {"data_root": str(good)},
        "site-2": {"data_root": str(tmp_path / "data" / "nowhere")},
        "site-3": {"data_root": str(unreadable)},
        "site-4": {"data_root": str(unequal)},
        "site-5": {"data_root": str(one_case)},
        "site-6": {"data_rot": str(good)},
    }
    folder = job("fed_lwr", sites=6, num_rounds=1, min_sites=2, max_missed=1, require_all_sites=False)
    run = simulate(folder, threads=6, local={"sites": sites})
    assert run.code == 0, run.log[-3000:]
    results = run.results
    assert results["status"] == "completed"
    assert results["rounds"][0]["accepted"] == ["site-1", "site-5"]  # one training case is enough
    reasons = {x["site"]: x["reason"] for x in results["rounds"][0]["left_out"] if x["phase"] == "train"}
    assert sorted(reasons) == ["site-2", "site-3", "site-4", "site-6"]
    for site, reason in reasons.items():
        assert site in reason
        assert str(tmp_path) not in reason  # no path, no file name leaves a site
        assert "image0.png" not in reason
        assert "mask1.png" not in reason
    local_log = (run.workspace / "site-3" / "log.txt").read_text()
    assert "image0.png" in local_log  # the hospital's own log says which file
    # The broken files of sites 3 and 4 are training images: their test images measure the final model all the same.
    assert sorted(results["test"]) == ["site-1", "site-3", "site-4", "site-5"]


def test_a_typing_mistake_in_a_site_file_ends_the_job_before_training(job, simulate, tmp_path):
    """Check that the message names the nearest right key; for a site without a block, the name it may have meant."""
    good = {"data_root": str(site_folder(tmp_path / "data", "good"))}
    sites = {"site-1": good, "site-2": {"data_rot": good["data_root"]}, "site3": good}
    run = simulate(job("fed_lwr", sites=3, num_rounds=1, min_sites=1), threads=3, local={"sites": sites})
    assert run.code != 0
    assert run.results["status"] == "failed"
    assert run.results["rounds"] == []
    reason = run.results["reason"]
    assert "check, before any training: 2 of 3 site(s) cannot take part" in reason
    assert "site 'site-2': unknown key 'data_rot' in the site file; did you mean 'data_root' or " in reason
    assert "site 'site-3': the site file names data for other sites, but not for this one; did you mean " in reason
    assert [(x["site"], x["phase"]) for x in run.results["left_out"]] == [("site-2", "check"), ("site-3", "check")]
    assert run.results["info"]["said"]["site-1"]["images"] == {"training": 4, "validation": 1, "test": 1}
    assert str(tmp_path) not in reason


def test_a_site_that_says_nonsense_is_left_out_of_every_round(job, simulate):
    """Check that such a message costs that site its rounds only; once it ended the run for all sites."""
    folder = job("fed_avg", num_rounds=2, min_sites=2)
    shutil.copy(Path(__file__).with_name("odd_executor.py"), folder / "app" / "custom")
    config = folder / "app" / "config" / "config_fed_client.json"
    client = json.loads(config.read_text())
    client["executors"][0]["executor"]["path"] = "odd_executor.OddExecutor"
    config.write_text(json.dumps(client))
    run = simulate(folder, threads=3)
    assert run.code == 0, run.log[-3000:]
    results = run.results
    assert results["status"] == "completed"
    why = "site 'site-2': field 'stats' must be a dict, got 'x'"
    for number, record in enumerate(results["rounds"]):
        assert record["sites"] == ["site-1", "site-2", "site-3"]  # it did answer: asked again
        assert record["accepted"] == ["site-1", "site-3"]
        assert record["left_out"] == [{"site": "site-2", "phase": "train", "reason": why}]
        assert f"round {number}, train: site 'site-2' left out: {why}" in run.log
    assert sorted(results["test"]) == ["site-1", "site-2", "site-3"]  # only its training reply was wrong


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (("server", ("workflows", 0, "args", "num_ronds"), 3), ["num_ronds"]),
        (("server", ("workflows", 0, "args", "rule", "path"), "fairflare.methods.fed_lwr.FedLWRR"), ["FedLWRR"]),
        (("client", ("executors", 0, "executor", "args", "training", "args", "optimizr"), "sgd"), ["optimizr"]),
        (
            ("client", ("executors", 0, "executor", "args", "training", "args", "optimizer"), "lion"),
            ["optimizer", "lion"],
        ),
    ],
)
def test_mistakes_in_the_job_folder_fail_it(job, simulate, edit, expected):
    folder = job("fed_lwr", num_rounds=1)
    side, keys, value = edit
    path = folder / "app" / "config" / f"config_fed_{side}.json"
    config = json.loads(path.read_text())
    place = config
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(config))
    run = simulate(folder, threads=3, timeout=120)
    assert run.code != 0
    for word in expected:
        assert word in run.log
    result = run.folder / "results.json"
    assert not result.exists() or run.results["status"] == "failed"
