"""Test bad input in real jobs: it gives one clear message and a failed job, and no result that looks complete."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from fairflare.federation.transports.local import run_local
from tests.tiny import RESULTS, run_document

from .conftest import tiny_recipe

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


def check_left_out(results, site_of, tmp_path):
    """Check that bad sites are left out by name; ``site_of``: what a site has -> its name."""
    assert results["status"] == "completed"
    able = sorted(site_of[what] for what in ("good", "one case") if what in site_of)  # one training case is enough
    assert results["rounds"][0]["accepted"] == able
    reasons = {x["site"]: x["reason"] for x in results["rounds"][0]["left_out"] if x["phase"] == "train"}
    assert sorted(reasons) == sorted(set(site_of.values()) - {*able})
    for site, reason in reasons.items():
        assert site in reason
        assert str(tmp_path) not in reason  # no path, no file name leaves a site
        assert "image0.png" not in reason
        assert "mask1.png" not in reason
    # Unreadable and unequal files are training images: their test images measure the final model all the same.
    assert sorted(results["test"]) == sorted(site_of[what] for what in site_of if what not in ("no folder", "typo"))


def test_bad_sites_are_left_out_by_name_and_the_rest_goes_on(tmp_path, caplog):
    good, unreadable, unequal = (site_folder(tmp_path / "data", n) for n in ("good", "unreadable", "unequal"))
    one_case = site_folder(tmp_path / "data", "one", cases=3)
    (unreadable / "image0.png").write_bytes(b"not a picture")
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(unequal / "mask1.png")
    has = {
        "good": {"data_root": str(good)},
        "no folder": {"data_root": str(tmp_path / "data" / "nowhere")},
        "unreadable": {"data_root": str(unreadable)},
        "unequal": {"data_root": str(unequal)},
        "one case": {"data_root": str(one_case)},
        "typo": {"data_rot": str(good)},
    }
    few = {"num_rounds": 1, "max_missed": 1, "require_all_sites": False}
    site_of = {what: f"site-{number}" for number, what in enumerate(has, 1)}
    plan = tiny_recipe("fed_lwr", sites=6, min_sites=2, **few).plan
    local = {"sites": {site: has[what] for what, site in site_of.items()}}
    check_left_out(run_document(run_local(plan, tmp_path / "here", local)), site_of, tmp_path)
    assert "image0.png" in caplog.text  # the hospital's own log says which file


def test_a_typing_mistake_in_a_site_file_ends_the_job_before_training(tmp_path):
    """Check that the message names the nearest right key; for a site without a block, the name it may have meant."""
    good = {"data_root": str(site_folder(tmp_path / "data", "good"))}
    sites = {"site-1": good, "site-2": {"data_rot": good["data_root"]}, "site3": good}
    plan = tiny_recipe("fed_lwr", sites=3, num_rounds=1, min_sites=1).plan
    with pytest.raises(RuntimeError, match="cannot take part"):
        run_local(plan, tmp_path / "run", {"sites": sites})
    results = run_document(tmp_path / "run" / RESULTS)
    assert results["status"] == "failed"
    assert results["rounds"] == []
    reason = results["reason"]
    assert "check, before any training: 2 of 3 site(s) cannot take part" in reason
    assert "site 'site-2': unknown key 'data_rot' in the site file; did you mean 'data_root' or " in reason
    assert "site 'site-3': the site file names data for other sites, but not for this one; did you mean " in reason
    assert [(x["site"], x["phase"]) for x in results["left_out"]] == [("site-2", "check"), ("site-3", "check")]
    assert results["info"]["said"]["site-1"]["images"] == {"training": 4, "validation": 1, "test": 1}
    assert str(tmp_path) not in reason


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (("server", ("workflows", 0, "args", "num_ronds"), 3), ["num_ronds"]),
        (
            ("client", ("executors", 0, "executor", "args", "training", "args", "optimizer"), "lion"),
            ["optimizer", "lion"],
        ),
    ],
)
def test_mistakes_in_the_job_folder_fail_it(job, simulate, edit, expected):
    folder = job("fed_lwr", sites=2, num_rounds=1)
    side, keys, value = edit
    path = folder / "app" / "config" / f"config_fed_{side}.json"
    config = json.loads(path.read_text())
    place = config
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(config))
    run = simulate(folder, threads=1, timeout=120)
    assert run.code != 0
    for word in expected:
        assert word in run.log
    result = run.folder / "results.json"
    assert not result.exists() or run.results["status"] == "failed"
