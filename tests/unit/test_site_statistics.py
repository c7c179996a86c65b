"""Test ``fairflare stats``: figures against NumPy on the pooled arrays, suppression, sent values, the command."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from nvflare.app_common.abstract.statistics_spec import Bin
from nvflare.app_common.executors.statistics.statistics_task_handler import StatisticsTaskHandler
from nvflare.fuel.utils import fobs
from PIL import Image
from scipy.spatial.distance import jensenshannon
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.core.statistics.site_figures import AXES, COUNTS, drop_few, quantile
from fairflare.data.reading import Reading
from fairflare.flare.statistics import ImageStatistics, statistics_here
from fairflare.recipes import StatsRecipe
from fairflare.reporting.sites.statistics import Bin as FigureBin
from fairflare.reporting.sites.statistics import Histogram, StatsDocument, document_of
from fairflare.tasks.scores.site_statistics import Kind, SiteSums, measure

SPLITS = {"training": 12, "validation": 6, "test": 6}
LEVELS = {"north": (0, 200), "south": (60, 256)}


def image_site(folder: Path, name: str, *, classes: bool = True, patient: str = "", seed: int = 0) -> dict[str, Any]:
    """Write a site of 24 PNGs; return its settings, with all pixels and labels as drawn."""
    rng = np.random.default_rng(seed)
    root = folder / name
    root.mkdir(parents=True)
    content: dict[str, list[dict[str, Any]]] = {}
    pixels, labels = [], []
    for split, count in SPLITS.items():
        content[split] = []
        for k in range(count):
            image = rng.integers(*LEVELS.get(name, (0, 256)), size=(20, 24 if k % 2 else 40), dtype=np.uint8)
            file = root / f"{split}_secret{k}.png"
            Image.fromarray(image).save(file)
            pixels.append(image.ravel())
            entry: dict[str, Any] = {"image": file.name, "spacing": [0.35, 0.35]}
            if patient:
                entry["patient"] = f"{patient}{split}{k // 2}"
            if classes:
                entry["label"] = int(rng.integers(2))
                labels.append(entry["label"])
            else:
                mask = (rng.random(image.shape) < 0.2).astype(np.uint8) * 255
                Image.fromarray(mask).save(root / f"mask_{file.name}")
                entry["label"] = f"mask_{file.name}"
                labels += (mask // 255).ravel().tolist()
            content[split].append(entry)
    (root / "datalist.json").write_text(json.dumps(content))
    return {"settings": {"data_root": str(root)}, "pixels": np.concatenate(pixels), "labels": Counter(labels)}


@pytest.fixture(params=[True, False], ids=["classes", "masks"])
def two_sites(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {name: image_site(tmp_path, name, classes=request.param, seed=k) for k, name in enumerate(LEVELS)}


def settings_of(sites: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: own["settings"] for name, own in sites.items()}


def test_figures_are_those_of_numpy_on_the_pooled_arrays(two_sites: dict[str, dict[str, Any]]) -> None:
    document = statistics_here(settings_of(two_sites), ImageStatistics())
    everything = {**two_sites, "pooled": {
        "pixels": np.concatenate([own["pixels"] for own in two_sites.values()]),
        "labels": two_sites["north"]["labels"] + two_sites["south"]["labels"],
    }}  # fmt: skip
    for name, own in everything.items():
        figures = document.pooled if name == "pooled" else document.sites[name]
        values = (own["pixels"].astype(np.float32) / np.float32(255)).astype(np.float64)
        assert figures.dense() == np.histogram(values, 64, (0, 1))[0].tolist()
        for percent, found in figures.quantiles.items():
            assert abs(found - np.percentile(values, float(percent))) < 1 / 64
        assert figures.mix() == dict(own["labels"])
        several = 2 if name == "pooled" else 1
        assert figures.counts["cases"] == figures.counts["images"] == 24 * several
        assert figures.counts["images_training"] == 12 * several
        assert figures.counts["unusable"] == figures.counts["missing_labels"] == 0
        assert figures.histograms["width"].count_bins("width") == {0: 12 * several, 1: 12 * several}
        assert figures.histograms["spacing"].count_bins("spacing") == {3: 24 * several}
        assert figures.suppressed == []
    assert document.sentences[0].startswith(
        "Furthest from the others in brightness is north: its median intensity is 0."
    )


def test_distances_are_those_of_the_samples(two_sites: dict[str, dict[str, Any]]) -> None:
    document = statistics_here(settings_of(two_sites), ImageStatistics())
    a, b = (np.sort(own["pixels"] / 255.0) for own in two_sites.values())
    levels = (np.arange(4001) + 0.5) / 4001  # W1 is the mean distance of the quantile functions
    exact = np.abs(np.quantile(a, levels) - np.quantile(b, levels)).mean()
    found = document.distances["north"]
    assert found.intensity_wasserstein == pytest.approx(exact, abs=1 / 64)
    assert found.intensity_wasserstein == document.distances["south"].intensity_wasserstein
    mixes = [[own["labels"][0], own["labels"][1]] for own in two_sites.values()]
    assert found.classes_jensen_shannon == pytest.approx(jensenshannon(*mixes, base=2))


def test_a_quantile_lies_where_the_counts_reach_it() -> None:
    assert quantile([0, 4, 0, 4], 50) == 2.0  # the end of the bin with the fourth of eight
    assert quantile([0, 4, 0, 4], 25) == 1.5
    assert quantile([0, 4, 0, 4], 100) == 4.0
    assert np.isnan(quantile([0, 0], 50))


def test_volumes_are_read_whole_and_by_slice(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    volumes = []
    content: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for k in range(9):
        volume = rng.normal(100, 20, size=(12, 10, 6)).astype(np.float32)
        mask = (rng.random(volume.shape) < 0.1).astype(np.uint8)
        for name, array in (("v", volume), ("m", mask)):
            nibabel.save(nibabel.Nifti1Image(array, np.diag([0.5, 0.5, 3.0, 1])), tmp_path / f"{name}{k}.nii.gz")
        content[list(SPLITS)[k // 3]].append({"image": f"v{k}.nii.gz", "label": f"m{k}.nii.gz"})
        low, high = volume.min(), np.percentile(volume, 99)
        volumes.append((np.clip((volume - low) / (high - low), 0, 1), mask))
    (tmp_path / "datalist.json").write_text(json.dumps(content))
    document = statistics_here({"a": {"data_root": str(tmp_path)}}, ImageStatistics(min_cases=1))
    own = document.sites["a"]
    expected = np.histogram(np.concatenate([volume.ravel() for volume, _ in volumes]), 64, (0, 1))[0]
    assert np.abs(np.array(own.dense()) - expected).sum() <= 40  # of 6480 pixels; float32 against float64 at the ends
    assert own.mix()[1] == sum(int(mask.sum()) for _, mask in volumes)
    assert own.counts["images"] == own.counts["cases"] == 9
    assert own.histograms["slices"].count_bins("slices") == {0: 9}
    assert own.histograms["spacing"].count_bins("spacing") == {5: 9}
    assert own.histograms["slice_spacing"].count_bins("slice_spacing") == {6: 9}


# ------------------------------------------------------------------------------------------------ what leaves


def leaving(settings: Mapping[str, Any], **chosen: Any) -> dict[str, Any]:
    """Return all that FLARE's handler hands to the server, decoded."""
    generator = ImageStatistics(**chosen)
    generator.open("north", settings)
    handler = StatisticsTaskHandler("any")
    handler.stats_generator = generator
    return {**generator.features(), "counts": generator.sums.counts(), "bins": generator.sums.bins()}


def test_only_declared_sums_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    dumps = fobs.dumps
    monkeypatch.setattr(fobs, "dumps", lambda *args, **more: sent.append(dumps(*args, **more)) or sent[-1])
    own = image_site(tmp_path, "north", patient="Mrs Miller ")
    document = statistics_here({"north": own["settings"]}, ImageStatistics())
    assert document.sites["north"].counts["cases"] == 12  # patients
    assert len(sent) >= 4
    for message in sent:
        for secret in (b"secret", b"Miller", b"patient", b".png", str(tmp_path).encode()):
            assert secret not in message
    told = [fobs.loads(message) for message in sent]
    for answer in (one for one in told if isinstance(one, dict) and "count" in one):
        for by_feature in (of["images"] for of in answer.values()):
            assert by_feature.keys() <= {*COUNTS, *AXES}
            for value in by_feature.values():
                numbers = [value] if isinstance(value, (int, float)) else [x for b in value.bins for x in b]
                assert isinstance(value, (int, float)) or all(isinstance(one, Bin) for one in value.bins)
                assert all(isinstance(one, (int, float)) for one in numbers)


def test_what_few_cases_have_stays(tmp_path: Path) -> None:
    own = image_site(tmp_path, "north", patient="p")["settings"]
    found = leaving(own, min_cases=4)["counts"]  # 6, 3 and 3 patients
    assert found["cases"] == 12
    assert "cases_validation" not in found
    assert "images_test" not in found
    assert found["cases_training"] == 6
    none = statistics_here({"north": {**own, "min_cases": 13}}, ImageStatistics())  # the site's own floor is larger
    assert none.sites["north"].counts == {"min_cases": 13, "synthetic": 0}
    assert none.sites["north"].histograms == {}
    assert none.sites["north"].suppressed == ["everything"]
    assert any(line.startswith("SUPPRESSED: north has fewer cases") for line in none.sentences)


@pytest.mark.parametrize("kind", ["classification", "segmentation"])
def test_no_figure_is_of_a_class_or_structure_with_few_cases(kind: Kind, tmp_path: Path) -> None:
    """Compare sites without and with three images of a rare class, or masks that mark a rare structure."""
    found: dict[int, list[Any]] = {1: [], 5: []}
    for rare in (False, True):
        own = image_site(tmp_path / str(rare), "north", classes=kind == "classification")["settings"]
        listed = Path(own["data_root"]) / "datalist.json"
        content = json.loads(listed.read_text())
        for split in SPLITS if rare else ():
            if kind == "classification":
                content[split].append({**content[split][0], "image": f"{split}_rare.png", "label": 2})
                Image.fromarray(np.full((50, 50), 9, np.uint8)).save(Path(own["data_root"]) / f"{split}_rare.png")
            else:
                mask = Path(own["data_root"]) / content[split][0]["label"]
                pixels = np.array(Image.open(mask))
                pixels[0, np.flatnonzero(pixels[0] == 0)[:3]] = 2  # pixels that were background
                Image.fromarray(pixels).save(mask)
        listed.write_text(json.dumps(content))
        if kind == "segmentation":
            own = {**own, "mask_values": {"0": 0, "2": 2, "255": 1}}
        for least, of in found.items():
            sums = measure("north", own, kind, Reading(), least)
            of.append((sums.counts(), sums.bins()))
    assert found[5][0] == found[5][1]
    assert found[1][0] != found[1][1]
    assert found[5][0][0]["images"] == sum(SPLITS.values())


def test_a_difference_tells_nothing() -> None:
    sums = SiteSums(5)
    for k in range(20):
        case = ("patient", str(k))
        sums.cases["training"].add(case)
        sums.images["training"] += 1
        sums.records["width"][0 if k < 12 else 1 if k < 18 else 2][case] += 1  # 12, 6 and 2 cases
    records, shown = sums.bins()["width"]
    assert (records, shown) == (20, {0: 12})  # 6 goes with 2: from 20 - 12 nobody tells them apart
    sums.records["spacing"][3]["patient", "0"] += 1
    assert "spacing" not in sums.bins()
    assert drop_few({0: 30, 1: 9}, {0: 30, 1: 9}, 5) == {0: 30, 1: 9}


def test_what_cannot_be_used_is_counted_and_said(tmp_path: Path) -> None:
    own = image_site(tmp_path, "north", classes=False)["settings"]
    root = Path(own["data_root"])
    for k in range(3):
        (root / f"mask_training_secret{k}.png").unlink()
    (root / "training_secret5.png").write_bytes(b"no image")
    Image.fromarray(np.zeros((20, 40), np.uint8)).save(root / "mask_training_secret4.png")
    document = statistics_here({"north": own}, ImageStatistics(min_cases=1))
    counts = document.sites["north"].counts
    assert (counts["missing_labels"], counts["unusable"], counts["empty_masks"], counts["images"]) == (3, 1, 1, 20)
    assert any("cannot be used, in no figure: north 4" in line for line in document.sentences)
    assert "secret" not in document.model_dump_json()


def test_a_figure_that_nobody_declared_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'a' sent figures .*'weight'"):
        document_of({"a": ({"weight": 3}, {})})
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Histogram(records=-3, bins=[])
    beside = Histogram(records=3, bins=[FigureBin(low=33.0, high=65.0, count=3)])
    with pytest.raises(ValueError, match="site 'a': width: no bin begins at 33"):
        document_of({"a": ({"cases": 3}, {"width": beside})})


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_writes_page_and_document(two_sites: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = CliRunner().invoke(app, ["stats", "-d", str(tmp_path), "-o", str(out)])
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.startswith("Furthest from the others in brightness is north")
    document = StatsDocument.model_validate_json((out / "stats.json").read_text())
    assert document == statistics_here(settings_of(two_sites), ImageStatistics())
    page = (out / "stats.html").read_text()
    assert page.count("<svg") == 1
    assert "Furthest from the others in brightness is north" in page
    assert {path.name for path in out.iterdir()} == {"stats.html", "stats.json"}
    again = CliRunner().invoke(app, ["stats", "-d", str(tmp_path), "-o", str(out)])
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr
    assert CliRunner().invoke(app, ["stats", "-d", str(tmp_path), "-o", str(out), "--overwrite"]).exit_code == 0
    shown = CliRunner().invoke(app, ["stats", "-d", str(tmp_path), "--sites", "south", "--json"])
    assert list(StatsDocument.model_validate_json(shown.stdout).sites) == ["south"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give --data"),
        (["-d", "{}", "--sites", "east"], "has no east; it has north, south"),
        (["-d", "{}", "--set", "bins=3"], "bins"),
        (["-d", "{}", "--bundle"], "--bundle goes with --job"),
        (["-d", "{}", "--set", "window=[40,80]"], "window needs intensity='window'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    for name in LEVELS:
        image_site(tmp_path, name)
    ran = CliRunner().invoke(app, ["stats", *(word.format(tmp_path) for word in words)])
    assert ran.exit_code == 2, ran.output
    assert told in ran.stderr.replace("\n", " ")


def test_the_job_names_only_classes_that_kits_allow(tmp_path: Path) -> None:
    from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

    from fairflare.provision import job_classes

    StatsRecipe(min_cases=7).export(str(tmp_path))
    named = set()
    for file in (tmp_path / "stats" / "app" / "config").glob("*.json"):
        named |= {line.split('"')[3] for line in file.read_text().splitlines() if '"path"' in line}
    assert len(named) == 8
    assert named <= {*job_classes(), *DEFAULT_CLASS_ALLOW_LIST}
    assert not (tmp_path / "stats" / "app" / "custom").exists()
