"""Test the papers' published sets in miniature: names, key files, and the papers' protocols.

Sizes are the published ones scaled down; what is expected is counted here from the source, not taken from the package.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.data.datalist import SPLITS, DataError
from fairflare.data.preparers import Dealing, Item, prepare_images
from fairflare.data.preparers.__main__ import main
from fairflare.data.preparers.dealing import deal
from fairflare.data.preparers.tables import Images
from fairflare.data.preparers.writing import Form
from fairflare_lab.sets.layouts import compare_counts, list_table_images, pair_images, person_of_images, public_set
from fairflare_lab.sets.published import FED_MAS, FEDISM, FEDMRL, HYPERKVASIR, ISIC2018, ISIC2019, PREPARERS

from .image_files import draw, lists
from .test_paper_sets import isic2019, messidor2, one_hot, rif, rsna, write_rows

prepare_hyperkvasir = PREPARERS["hyperkvasir"].prepare
prepare_isic2018 = PREPARERS["isic2018"].prepare
prepare_isic2019 = PREPARERS["isic2019"].prepare
prepare_messidor2 = PREPARERS["messidor2"].prepare
prepare_prostate_mri = PREPARERS["prostate-mri"].prepare
prepare_rif = PREPARERS["rif"].prepare
prepare_rsna = PREPARERS["rsna"].prepare
prepare_tones = PREPARERS["isic2019-tones"].prepare

TRUTH = "ISIC2018_Task3_Training_GroundTruth"
LESIONS = "ISIC2018_Task3_Training_LesionGroupings.csv"


def small(path: Path, seed: int) -> Path:
    return draw(path, seed, (4, 4))


def isic2018(root: Path, counts: Mapping[str, int], lesions: str | None) -> dict[str, int]:
    """Write two images of each lesion; ``lesions``: where their file lies; return the class of each image."""
    labels: list[int] = []
    for label, name in enumerate(ISIC2018):
        labels += [label] * counts[name]
    names = [f"ISIC_{24306 + i:07d}" for i in range(len(labels))]
    for i, name in enumerate(names):
        small(root / f"ISIC2018_Task3_Training_Input/{name}.jpg", i)
    write_rows(root / TRUTH / f"{TRUTH}.csv", one_hot(ISIC2018, labels, names))
    if lesions is not None:
        rows = [f"{n},HAM_{i // 2:07d},histo" for i, n in enumerate(names)]
        write_rows(root / lesions, ["image,lesion_id,diagnosis_confirm_type", *rows])
    return dict(zip(names, labels, strict=True))


def scaled(names: Any, counts: Any, share: int) -> dict[str, int]:
    """Return even numbers, so that a lesion has two images of one class."""
    return {name: max(4, 2 * round(count / share / 2)) for name, count in zip(names, counts, strict=True)}


def stems(entries: list[dict[str, Any]]) -> list[str]:
    return [Path(entry["image"]).stem for entry in entries]


def manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


# --- names and key files ------------------------------------------------------------------------------------


def test_names_are_found_with_other_endings(tmp_path: Path) -> None:
    for name in ("a/IM1.JPG", "a/IM2.png", "b/IM3.JPEG", "b/IM2.tif", "c/x.y.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    images = Images(tmp_path)
    found = {
        name: images.find(name) for name in ("IM1.jpg", "a/IM1.jpg", "IM1", "IM3.png", "IM2.PNG", "x.y", "x.y.JPG")
    }
    assert {name: path and path.name for name, path in found.items()} == {
        "IM1.jpg": "IM1.JPG", "a/IM1.jpg": "IM1.JPG", "IM1": "IM1.JPG", "IM3.png": "IM3.JPEG", "IM2.PNG": "IM2.png",
        "x.y": "x.y.png", "x.y.JPG": "x.y.png",
    }  # fmt: skip
    assert images.find("IM4.jpg") is None
    with pytest.raises(DataError, match=r"several images are called 'IM2\.jpg'"):
        images.find("IM2.jpg")


@pytest.mark.parametrize("place", ["messidor-2.csv", "IMAGES/Messidor-2.csv", None])
def test_messidor2_as_its_two_publishers_name_it(tmp_path: Path, place: str | None, caplog: Any) -> None:
    """Check images that are ``.JPG`` on disk and ``.jpg`` in the grades' table; pairs come with the images."""
    source = messidor2(tmp_path / "s")
    table = source / "messidor_data.csv"
    table.write_text(table.read_text().replace(".JPG", ".jpg"))
    pairs = source / "messidor-2.csv"
    text = pairs.read_text()
    pairs.unlink()
    if place is not None:
        (source / place).write_text(text)
    with caplog.at_level(logging.WARNING):
        written = prepare_messidor2(source, tmp_path / "out", dealing=replace(FEDMRL, sites=2))
    told = "59 of 59 images have no key of a patient"
    assert (told in caplog.text) == (place is None)
    assert [told in note for note in manifest(tmp_path / "out")["notes"]] == [True] * (place is None)
    owner: dict[str, set[tuple[str, str]]] = {}
    pair_of = {Path(name).stem: n for n, row in enumerate(text.split()[1:]) for name in row.split(";")}
    for site, folder in written.items():
        for split in SPLITS:
            for stem in stems(lists(folder)[split]):
                owner.setdefault(str(pair_of[stem]), set()).add((site, split))
    torn = sum(len(places) > 1 for places in owner.values())
    assert (torn == 0) == (place is not None)


@pytest.mark.parametrize("place", [LESIONS, f"{TRUTH}/{LESIONS}", None])
def test_isic2018_lesions_wherever_their_file_lies(tmp_path: Path, place: str | None, caplog: Any) -> None:
    labels = isic2018(tmp_path / "s", dict.fromkeys(ISIC2018, 20), place)
    with caplog.at_level(logging.WARNING):
        written = prepare_isic2018(tmp_path / "s", tmp_path / "out")
    places: dict[int, set[tuple[str, str]]] = {}
    for site, folder in written.items():
        for split in SPLITS:
            for stem in stems(lists(folder)[split]):
                places.setdefault(sorted(labels).index(stem) // 2, set()).add((site, split))
    assert len(places) == 70
    torn = sum(len(found) > 1 for found in places.values())
    assert "ISIC 2018: expected [1113, 6705, 514, 327, 1099, 115, 142] (sum 10015), found [20, 20" in caplog.text
    content = json.loads((written["site-1"] / "datalist.json").read_text())
    assert content["class_names"] == list(ISIC2018)
    assert all(entry["label"] == labels[Path(entry["image"]).stem] for entry in content["training"])
    if place is not None:
        assert torn == 0
        assert not manifest(tmp_path / "out")["notes"]
        number = sorted(labels).index(Path(content["training"][0]["image"]).stem)
        assert content["training"][0]["patient"] == f"HAM_{number // 2:07d}"
        return
    assert torn > 35  # so much was lost without a word
    said = f"140 of 140 images have no key of a patient .* Lesions are read from {re.escape(LESIONS)}"
    assert re.search(said, caplog.text)
    assert re.search(said, manifest(tmp_path / "out")["notes"][0])


def test_check_data_says_again_what_was_missing(tmp_path: Path) -> None:
    isic2018(tmp_path / "s", dict.fromkeys(ISIC2018, 4), None)
    prepare_isic2018(tmp_path / "s", tmp_path / "out", dealing=replace(FEDMRL, sites=2))
    for place in ("out", "out/site-1"):
        told = " ".join(CliRunner().invoke(app, ["check-data", str(tmp_path / place)]).output.split())
        assert "prepare noted: 28 of 28 images have no key of a patient" in told
        assert "classes of 'test_global'" not in told  # it is no site's own


def test_isic2019_says_how_many_images_have_no_lesion(tmp_path: Path, caplog: Any) -> None:
    source = isic2019(tmp_path / "s")
    (source / "tables").mkdir()
    (source / "ISIC_2019_Training_Metadata.csv").rename(source / "tables/ISIC_2019_Training_Metadata.csv")
    with caplog.at_level(logging.WARNING):
        prepare_isic2019(source, tmp_path / "out", dealing=Dealing(partition="iid", sites=2))
    lacking = sum(i % 5 == 0 for i in range(96))
    assert f"{lacking} of 96 images have no key of a patient" in caplog.text


def test_rsna_pictures_do_not_say_whose_they_are(tmp_path: Path) -> None:
    prepare_rsna(rsna(tmp_path / "s", pictures=True), tmp_path / "out", dealing=Dealing())
    assert manifest(tmp_path / "out")["notes"][0].startswith("80 of 80 images have no key of a patient")
    prepare_rsna(rsna(tmp_path / "d", 30), tmp_path / "dicom", dealing=Dealing())
    assert manifest(tmp_path / "dicom")["notes"] == []


def test_a_lesion_with_two_tones_has_that_of_most_of_its_images(tmp_path: Path, caplog: Any) -> None:
    """Check tones from pixels, which differ between images of one lesion."""
    names = [f"ISIC_{i:07d}" for i in range(120)]
    labels = [i // 3 % 8 for i in range(120)]
    source = tmp_path / "s"
    for i, name in enumerate(names):
        small(source / f"ISIC_2019_Training_Input/{name}.jpg", i)
    write_rows(source / "ISIC_2019_Training_GroundTruth.csv", one_hot(ISIC2019, labels, names, ["UNK"]))
    write_rows(
        source / "ISIC_2019_Training_Metadata.csv",
        ["image,lesion_id", *(f"{n},BCN_{i // 3}" for i, n in enumerate(names))],
    )
    tones = ["dark" if np.random.default_rng(i).random() < 0.4 else "light" for i in range(120)]
    write_rows(source / "tones.csv", ["image,skin_tone", *(f"{n},{t}" for n, t in zip(names, tones, strict=True))])
    with caplog.at_level(logging.WARNING):
        written = prepare_tones(source, tmp_path / "out", tones="tones.csv")
    own = [Counter(tones[3 * lesion : 3 * lesion + 3]) for lesion in range(40)]
    assert f"{sum(len(counts) > 1 for counts in own)} lesions have images of both tones" in caplog.text
    seen: dict[int, set[str]] = {}
    for site, folder in written.items():
        found = lists(folder)
        assert found["test"] == found["test_global"] == lists(written["light-1"])["test"]
        for stem in [*stems(found["training"]), *stems(found["validation"])]:
            lesion = int(stem[-7:]) // 3
            seen.setdefault(lesion, set()).add(site)
            assert own[lesion][site.partition("-")[0]] >= 2
        for tone in ("light", "dark"):
            assert all(own[int(stem[-7:]) // 3][tone] >= 2 for stem in stems(found[f"test_{tone}"]))
    assert all(len(sites) == 1 for sites in seen.values())
    tested = {int(stem[-7:]) // 3 for stem in stems(lists(written["light-1"])["test"])}
    assert tested.isdisjoint(seen)
    assert len(tested) + len(seen) == 40


def test_rif_says_which_settings_a_run_needs(tmp_path: Path, capsys: Any) -> None:
    assert main(["rif", "--source", str(rif(tmp_path / "s")), "--out", str(tmp_path / "out")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("A run on it needs: "))
    needs = {"in_channels": 3, "num_classes": 2, "labels": [[1, 2], [2]], "class_names": ["disc", "cup"]}
    assert manifest(tmp_path / "out")["task"] == needs
    given = list(line.removeprefix("A run on it needs: ").split(" --set "))
    assert given[:2] == ["--task segmentation", "in_channels=3"]
    assert given[2:] == ["num_classes=2", "'labels=[[1,2],[2]]'", '\'class_names=["disc","cup"]\'']
    for place in ("out", "out/Drishti-GS", "out/fairflare.json"):  # who checks them need not give these
        checked = CliRunner().invoke(app, ["check-data", str(tmp_path / place)])
        assert checked.exit_code == 0
        assert "as the data's manifest says: in_channels=3, num_classes=2, labels=[[1, 2], [2]]" in checked.output
    prepare_rif(tmp_path / "s", tmp_path / "again")
    assert manifest(tmp_path / "again")["task"] == needs


# --- the protocols ------------------------------------------------------------------------------------------


def test_fedmrl_holds_a_fifth_out_before_it_deals(tmp_path: Path) -> None:
    counts = scaled(ISIC2018, ISIC2018.values(), 40)
    labels = isic2018(tmp_path / "s", counts, f"{TRUTH}/{LESIONS}")
    written = prepare_isic2018(tmp_path / "s", tmp_path / "out")
    assert list(written) == [f"site-{n}" for n in (1, 2, 3, 4)]
    first = lists(written["site-1"])["test_global"]
    held = Counter(labels[stem] for stem in stems(first))
    for label, name in enumerate(ISIC2018):  # a fifth of each class, whole lesions
        assert abs(held[label] - counts[name] / 5) <= 2
    assert held.total() == pytest.approx(sum(counts.values()) / 5, abs=2 * len(ISIC2018))
    own: list[str] = []
    trained: list[str] = []
    for folder in written.values():
        found = lists(folder)
        assert set(found) == {*SPLITS, "test_global"}
        assert found["test_global"] == first
        assert all((folder / entry["image"]).is_file() for entry in found["test_global"])
        own += stems(found["test"])
        trained += stems(found["training"]) + stems(found["validation"])
    assert sorted(own) == sorted(stems(first))  # each is one site's own test
    assert sorted(own + trained) == sorted(labels)  # no image twice, none lost
    pairs = {sorted(labels).index(stem) // 2 for stem in own}
    assert pairs.isdisjoint(sorted(labels).index(stem) // 2 for stem in trained)
    validated = sum(len(lists(folder)["validation"]) for folder in written.values())
    assert validated / len(labels) == pytest.approx(0.08, abs=0.02)


def test_a_sites_own_test_has_its_classes() -> None:
    """Check that a site gets its share of the held-out images of each of its classes."""
    items = [
        Item(f"{c}-{i}", f"{c}-{i}", np.zeros((2, 2), np.uint8), c) for c, n in enumerate((400, 200)) for i in range(n)
    ]
    dealing = Dealing(partition="dirichlet", sites=4, alpha=0.5, global_test=True, fractions=(0.72, 0.08, 0.2))
    sites = deal(items, dealing, 3)
    rest = {name: Counter(item.mask for item in own if not item.splits) for name, own in sites.items()}
    test = {name: Counter(item.mask for item in own if item.splits == ("test",)) for name, own in sites.items()}
    for c, n in enumerate((400, 200)):
        assert sum(found[c] for found in rest.values()) == 0.8 * n
        for name in sites:
            assert abs(test[name][c] - rest[name][c] / 4) < 1


def test_hyperkvasir_folds_are_of_all_images(tmp_path: Path) -> None:
    counts = [max(5, round(count / 40)) for count in HYPERKVASIR.values()]
    labels: dict[str, int] = {}
    for label, (name, count) in enumerate(zip(HYPERKVASIR, counts, strict=True)):
        tract = ("lower-gi-tract", "upper-gi-tract")[label % 2]
        for i in range(count):
            path = tmp_path / f"s/labeled-images/{tract}/pathological-findings/{name}/{label:02d}{i:03d}-51aa.jpg"
            labels[small(path, 1000 * label + i).stem] = label
    dealing = replace(FED_MAS, sites=3, min_size=5)
    written = prepare_hyperkvasir(tmp_path / "s", tmp_path / "out", dealing=dealing)
    tested: list[str] = []
    home: dict[str, set[str]] = {}
    for fold in range(1, 6):
        found = {site: lists(folder, f"datalist_fold{fold}.json") for site, folder in written.items()}
        whole = stems(found["site-1"]["test_global"])
        assert all(own["test_global"] == found["site-1"]["test_global"] for own in found.values())
        of = Counter(labels[stem] for stem in whole)
        for label, count in enumerate(counts):  # every class is in every fold
            assert of[label] in (count // 5, -(-count // 5))
        for site, own in found.items():
            for split in SPLITS:
                for stem in stems(own[split]):
                    home.setdefault(stem, set()).add(site)
        others = [stem for own in found.values() for split in SPLITS[:2] for stem in stems(own[split])]
        assert sorted(others + whole) == sorted(labels)
        assert sorted(stem for own in found.values() for stem in stems(own["test"])) == sorted(whole)
        tested += whole
    assert sorted(tested) == sorted(labels)  # once in five folds
    assert all(len(sites) == 1 for sites in home.values())
    content = json.loads((written["site-1"] / "datalist.json").read_text())
    assert [len(members) for members in content["class_groups"].values()] == [7, 9, 7]
    assert manifest(tmp_path / "out")["notes"][0].startswith(f"{len(labels)} of {len(labels)} images have no key")


def test_fedism_tests_every_site_on_its_own_quality(tmp_path: Path) -> None:
    source = rsna(tmp_path / "s", 200, pictures=True)
    written = prepare_rsna(
        source, tmp_path / "out", images=150, dealing=replace(FEDISM, size=16, min_size=1, sites=5, corrupt_sites=1)
    )
    last = list(written)[-1:]
    assert [site for site, told in manifest(tmp_path / "out")["sites"].items() if told["corrupted"]] == last
    clean, bad = (lists(written["site-1"])[f"test_{quality}"] for quality in ("clean", "corrupted"))
    assert len(clean) == len(bad) == 30
    trained = [stem for folder in written.values() for split in SPLITS[:2] for stem in stems(lists(folder)[split])]
    assert len(trained) == 120
    assert set(trained).isdisjoint(stems(clean))
    for site, folder in written.items():
        found = lists(folder)
        assert (found["test_clean"], found["test_corrupted"]) == (clean, bad)
        assert found["test"] == (bad if site in last else clean)
    share = sum(len(lists(written[s])["training"]) for s in last) / (0.9 * 120)
    assert share == pytest.approx(0.2, abs=0.06)  # the second pool has as many as its sites


@pytest.mark.parametrize("count", [6, 4, 2, 1])
def test_fedisms_corruption_ratios(count: int) -> None:
    """Check 30, 20, 10 and 5 % of 20 sites (FedISM+, Fig. 6)."""
    items = [Item(f"i{i}", f"i{i}", np.zeros((2, 2), np.uint8), i % 4) for i in range(2000)]
    sites = deal(items, replace(FEDISM, corrupt_sites=count), 0)
    bad = [
        name for name, own in sites.items() if any(i.name.endswith("_corrupted") and "test" in i.splits for i in own)
    ]
    assert bad == [f"site-{n}" for n in range(21 - count, 21)]


def test_sites_whose_images_or_patients_are_called_alike(tmp_path: Path) -> None:
    """Check two hospitals with a patient p1 and an image i1 each: they stay two, wherever they are dealt or shown."""
    rows = ["image,label,site,patient"]
    for site in ("A", "B"):
        for i in range(24):
            small(tmp_path / f"s/{site}/i{i}.png", i + 100 * (site == "B"))
            rows.append(f"{site}/i{i}.png,{i // 2 % 2},{site},p{i // 2}")
    write_rows(tmp_path / "s/list.csv", rows)
    written = prepare_images(tmp_path / "s", tmp_path / "out", csv="list.csv", dealing=Dealing(global_test=True))
    a, b = (lists(written[site]) for site in ("A", "B"))
    assert a["test_global"] == b["test_global"]
    assert len(a["test_global"]) == len(a["test"]) + len(b["test"])
    assert {entry["patient"] for entry in a["test_global"]} == {
        f"{site}/{entry['patient']}" for site, own in (("A", a), ("B", b)) for entry in own["test"]
    }
    assert (written["A"] / b["test"][0]["image"]).read_bytes() == (written["B"] / b["test"][0]["image"]).read_bytes()


def dealt_alike(items: list[Item], seed: int = 0, **more: Any) -> dict[str, list[Item]]:
    return deal(items, Dealing(partition="iid", sites=3, **more), seed)


def test_a_key_at_two_sites_is_of_two_patients_where_the_pool_is_dealt() -> None:
    items = [Item(f"i{i}", f"p{i}", np.zeros((2, 2), np.uint8), 0, f"p{i}", site) for site in "AB" for i in range(30)]
    own = dealt_alike(items)
    groups = [{item.group for item in found} for found in own.values()]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 60
    apart = [{item.name for item in found} for found in own.values()]
    assert any(
        {f"A_i{i}", f"B_i{i}"} & found and not {f"A_i{i}", f"B_i{i}"} <= found for found in apart for i in range(30)
    )


def test_the_draw_of_the_common_test_is_pinned() -> None:
    """Check that another seed is another draw, and the same seed the same draw in every version."""
    items = [Item(f"i{i:02d}", f"i{i:02d}", np.zeros((2, 2), np.uint8), i % 2) for i in range(20)]
    drawn = {
        seed: sorted(i.name for i in dealt_alike(items, seed, common_test=True)["site-1"] if "test" in i.splits)
        for seed in (0, 1, 2)
    }
    assert drawn == {0: ["i00", "i11", "i12", "i17"], 1: ["i02", "i05", "i06", "i11"], 2: ["i00", "i07", "i08", "i15"]}


# --- Fed-LWR ------------------------------------------------------------------------------------------------


def volumes(root: Path, cases: int) -> dict[str, np.ndarray]:
    import nibabel

    found = {}
    for case in range(cases):
        mask = np.zeros((12, 10, 3), np.uint8)
        mask[4:8, 4:8, 1:] = 1
        volume = np.random.default_rng(case).gamma(2.0, 100.0, mask.shape).astype(np.float32) * [0.5, 1, 3]
        found[f"case{case:02d}"] = volume
        root.mkdir(parents=True, exist_ok=True)
        for name, array in ((f"Case{case:02d}", volume), (f"Case{case:02d}_segmentation", mask)):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), root / f"{name}.nii.gz")
    return found


def test_fed_lwrs_window_is_that_of_a_slice(tmp_path: Path) -> None:
    """Check clipping to a slice's own 99th percentile: a bright slice does not darken its neighbours."""
    from PIL import Image

    raw = volumes(tmp_path / "s/HK", 5)
    written = prepare_prostate_mri(tmp_path / "s", tmp_path / "out", sites=["HK"], window="slice")
    seen = 0
    for entries in lists(written["HK"]).values():
        for entry in entries:
            case, number = Path(entry["image"]).stem.split("_")
            slice_ = raw[case][:, :, int(number)].astype(np.float64)
            clipped = np.clip(slice_, slice_.min(), np.percentile(slice_, 99))
            expected = clipped / clipped.max() * 255
            with Image.open(written["HK"] / entry["image"]) as image:
                assert np.abs(np.asarray(image, np.float64).T - expected).max() <= 0.51
            seen += 1
    assert seen == 10


def test_fed_lwrs_cases_in_file_order(tmp_path: Path) -> None:
    volumes(tmp_path / "s/UCL", 13)
    written = prepare_prostate_mri(tmp_path / "s", tmp_path / "out", sites=["UCL"], order="file")
    cases = {split: sorted({entry["patient"] for entry in own}) for split, own in lists(written["UCL"]).items()}
    names = [f"case{n:02d}" for n in range(13)]
    assert cases["training"] + cases["validation"] == names[: int(0.8 * 13)]
    assert cases["test"] == names[int(0.8 * 13) :]
    assert (len(cases["training"]), len(cases["validation"])) == (8, 2)
    with pytest.raises(ValueError, match="needs split_unit='patient'"):
        prepare_prostate_mri(tmp_path / "s", tmp_path / "x", sites=["UCL"], order="file", split_unit="slice")


# --- a set of a newcomer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True])
def test_a_made_up_set_is_one_entry(tmp_path: Path, by_name: bool) -> None:
    """Check that names of table, columns and classes suffice, without code of its own."""
    made_up = public_set(
        "moles", "moles of two clinics, benign or not",
        partial(
            list_table_images, tables=("labels.csv",), folders=("photos",), classes=("benign", "malignant"),
            columns=[{"image": "file", "label": "dx", "site": "clinic", "fold": "part"}], sites=("north", "south"),
            keys=partial(person_of_images, table="visits.csv", images=("file",), person="visitor"),
        ),
        Dealing(fractions=(0.6, 0.2, 0.2)), Form(("benign", "malignant"), keys="Visitors are read from visits.csv"),
        published=partial(
            compare_counts, title="Moles", counts={"north": 20, "south": 20}, of=lambda item: item.site
        ),
    )  # fmt: skip
    rows, visits = ["file,dx,clinic,part"], ["file,visitor"]
    for i in (*range(20, 40), *range(20)):  # the second site first
        small(tmp_path / f"s/photos/m{i:02d}.png", i)
        label, clinic = (("benign", "malignant")[i // 4 % 2], ("north", "south")[i // 20])
        said = f"{label},{clinic}" if by_name else f"{i // 4 % 2},{i // 20}"
        rows.append(f"m{i:02d}.png,{said},{'test' if i % 20 < 4 else 'train'}")
        visits.append(f"M{i:02d},v{i // 2}")
    write_rows(tmp_path / "s/labels.csv", rows)
    write_rows(tmp_path / "s/tables/visits.csv", visits)
    written = made_up.prepare(tmp_path / "s", tmp_path / "out", seed=3)
    assert list(written) == ["north", "south"]
    for site, folder in written.items():
        found = lists(folder)
        first = 20 * (site == "south")
        assert sorted(stems(found["test"])) == [f"m{i:02d}" for i in range(first, first + 4)]
        assert sorted(stems([e for own in found.values() for e in own])) == [
            f"m{i:02d}" for i in range(first, first + 20)
        ]
        assert all(e["label"] == int(e["image"][-6:-4]) // 4 % 2 for own in found.values() for e in own)
        people = [{e["patient"] for e in own} for own in found.values()]
        assert sum(map(len, people)) == len(set().union(*people)) == 10
    rows[3] = "m22.png,2,south,test" if by_name else "m22.png,2,1,test"
    write_rows(tmp_path / "s/labels.csv", rows)
    with pytest.raises(
        DataError,
        match=r"labels\.csv', line 4: expected dx .*'2'",
    ):
        made_up.prepare(tmp_path / "s", tmp_path / "x")
    with pytest.raises(TypeError, match="crop"):
        made_up.prepare(tmp_path / "s", tmp_path / "x", crop=3)
    write_rows(tmp_path / "s/tables/visits.csv", [*visits, "m07.png,v9"])
    write_rows(tmp_path / "s/labels.csv", [*rows[:3], *rows[4:]])
    with pytest.raises(DataError, match=r"line 42: 'm07\.png' is of 'v9', .*'v3'"):
        made_up.prepare(tmp_path / "s", tmp_path / "x")


def test_a_made_up_set_with_masks(tmp_path: Path) -> None:
    from PIL import Image

    layout = partial(
        pair_images, sites={"a": ("Alpha",), "b": ("Beta",)}, parts={"": ()}, images="scans", masks="drawn"
    )
    for site in ("alpha", "beta"):
        for i in range(5):
            small(tmp_path / f"s/{site}/scans/i{i}.png", i)
            (tmp_path / f"s/{site}/drawn").mkdir(exist_ok=True)
            Image.fromarray(np.full((4, 4), i % 2, np.uint8)).save(tmp_path / f"s/{site}/drawn/i{i}_mask.png")
    written = public_set("scans", "scans of two sites", layout).prepare(tmp_path / "s", tmp_path / "out")
    assert list(written) == ["a", "b"]
    for site, folder in zip(("alpha", "beta"), written.values(), strict=True):
        found = lists(folder)
        assert {split: len(own) for split, own in found.items()} == {"training": 3, "validation": 1, "test": 1}
        for entry in (entry for own in found.values() for entry in own):
            stem = Path(entry["image"]).stem
            assert (folder / entry["image"]).read_bytes() == (tmp_path / f"s/{site}/scans/{stem}.png").read_bytes()
            assert (folder / entry["label"]).read_bytes() == (tmp_path / f"s/{site}/drawn/{stem}_mask.png").read_bytes()
