"""Test ``fairflare prepare images`` and ``masks``: any images, dealt to sites, corrupted, interrupted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from fairflare.base.disk.files import sha256_of
from fairflare.cli.commands import app
from fairflare.data.corruptions import gaussian_noise, image_seed
from fairflare.data.datalist import SPLITS, DataError, load_datalist
from fairflare.data.preparers import Dealing, prepare_images, prepare_masks
from fairflare.data.preparers import draft as drafts
from fairflare.data.preparers.__main__ import main
from fairflare.data.preparers.draft import FOLDER
from fairflare.data.preparers.splitting import frequency_groups

from .image_files import draw, lists

pytestmark = pytest.mark.usefixtures("one_thread")


def class_folders(root: Path, counts: dict[str, int], sites: tuple[str, ...] = ("",)) -> Path:
    for place, site in enumerate(sites):
        for number, (name, count) in enumerate(counts.items()):
            for index in range(count):
                draw(root / site / name / f"{name}{index:03d}.png", 10_000 * place + 1000 * number + index)
    return root


def labels(folder: Path) -> Counter[int]:
    return Counter(e["label"] for split in SPLITS for e in lists(folder)[split])


def test_folders_of_classes(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "s", {"b": 10, "a": 20, "c": 5})
    written = prepare_images(source, tmp_path / "out")
    assert list(written) == ["site-1"]
    loaded = load_datalist(written["site-1"], site="site-1", class_labels=True)
    assert loaded.class_names == ("a", "b", "c")
    assert loaded.class_groups == {"head": (0,), "medium": (1,), "tail": (2,)}
    assert {split: Counter(s.label for s in found) for split, found in loaded.splits.items()} == {
        "training": {0: 12, 1: 6, 2: 3}, "validation": {0: 4, 1: 2, 2: 1}, "test": {0: 4, 1: 2, 2: 1}
    }  # fmt: skip
    for sample in loaded.splits["test"]:  # copied as they are
        name = sample.image.name[2:]
        assert sample.image.read_bytes() == (source / name[0] / name).read_bytes()


def test_folders_of_sites_and_the_summaries(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "s", {"a": 6, "b": 5}, ("hospital x", "y"))
    written = prepare_images(source, tmp_path / "out", seed=3, record={"preparer": "images"})
    assert list(written) == ["hospital_x", "y"]
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (manifest["preparer"], manifest["seed"]) == ("images", 3)
    assert {"fairflare", "python", "numpy", "pillow"} <= set(manifest["versions"])
    assert manifest["sites"]["y"]["classes"]["training"] == {"a": 4, "b": 3}
    for site, folder in written.items():
        assert sum(manifest["sites"][site]["images"].values()) == 11
        checksums = folder / "checksums.sha256"
        assert sha256_of(checksums) == manifest["sites"][site]["checksums"]
        found = dict(reversed(line.split("  ")) for line in checksums.read_text().splitlines())
        assert set(found) == {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {checksums.name}
        assert all(sha256_of(folder / name) == digest for name, digest in found.items())


def test_trees_of_another_depth(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "s", {"a": 3, "b": 3})
    draw(source / "c/d/e/f.png", 1)
    with pytest.raises(DataError, match=r"<class>/ .*found 7 images in a, b, c/d"):
        prepare_images(source, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="found 0 images in nothing"):
        prepare_images(tmp_path / "empty", tmp_path / "out")


def table(root: Path, rows: list[str], name: str = "list.csv") -> Path:
    (root / name).write_text("\n".join(rows) + "\n")
    return root


def test_a_table_with_sites_patients_and_splits(tmp_path: Path) -> None:
    rows = ["id_code;grade;where;person;split"]
    for index in range(24):
        draw(tmp_path / f"s/deep/i{index}.jpeg", index)
        given = "test" if index % 6 == 0 else ""
        person = "x" if index in (0, 6) else f"p{index // 2}" if index % 6 > 1 else f"q{index}"
        rows.append(f"i{index};{index % 2};{'A' if index < 12 else 'B'};{person};{given}")
    draw(tmp_path / "s/deep/more.jpeg", 99)
    columns = {"image": "id_code", "label": "grade", "site": "where", "patient": "person"}
    written = prepare_images(table(tmp_path / "s", rows), tmp_path / "out", csv="list.csv", columns=columns)
    assert list(written) == ["A", "B"]
    (note,) = json.loads((tmp_path / "out/manifest.json").read_text())["notes"]
    assert "1 of 25 images in" in note
    found = load_datalist(written["A"], site="A", class_labels=True)
    assert found.class_names == ("0", "1")
    assert [s.image.name for s in found.splits["test"]] == ["deep_i0.jpeg", "deep_i6.jpeg"]
    by_patient: dict[str | None, set[str]] = {}
    for split, samples in found.splits.items():
        for sample in samples:
            by_patient.setdefault(sample.patient, set()).add(split)
    assert set(by_patient) == {"x", "p1", "p2", "p4", "p5", "q1", "q7"}
    assert all(len(splits) == 1 for splits in by_patient.values())


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (["image,grade", "i0,1"], {}, "missing: label; found: image, grade"),
        (
            ["image,label", "i0,1", "i9,0", "i8,0"],
            {},
            "2 of 3 images .*: i8, i9; the folder",
        ),
        (["image,label", "i0,", "i1,1"], {}, "line 2: the label is missing"),
        (["image,label,split", "i0,1,dev"], {}, "line 2: the split is 'dev'; expected"),
        (["image,label", "i0,1", "i1,1"], {}, "expected at least two classes, found 1"),
        (["image,label", "i0,x", "i1,y"], {"classes": ["x", "z"]}, "has the label 'y'; the classes are x, z"),
        (["image,label", "i0,0", "i1,1"], {"columns": {"images": "x"}}, "columns must be some of image, label"),
        (["image,label", "i0,0", "i1,1"], {"group": "(x)"}, "does not match group"),
        (["image,label", "i0,0", "i1,1"], {"group": "p"}, "must have a part in brackets"),
        (["image,label,patient", "i0,0,012", "i1,1,12.0"], {}, "'012' and '12.0' would be two patients"),
        (["image,label"], {}, "has no rows"),
    ],
)
def test_bad_tables(tmp_path: Path, rows: list[str], options: dict[str, Any], message: str) -> None:
    for index in range(2):
        draw(tmp_path / f"s/i{index}.png", index)
    with pytest.raises(ValueError, match=message):
        prepare_images(table(tmp_path / "s", rows), tmp_path / "out", csv="list.csv", **options)
    assert not (tmp_path / "out").exists()


# --- dealt to sites ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dealing",
    [
        Dealing(partition="iid", sites=4),
        Dealing(partition="dirichlet", sites=4, alpha=0.5, min_size=4),
        Dealing(partition="two-pool", sites=4, corrupt_sites=1, min_size=4),
        Dealing(partition="shards", sites=4, eta=0.7),
        Dealing(partition="quantity", sites=4, alpha=2.0, min_size=4),
    ],
    ids=lambda dealing: dealing.partition,
)
def test_partitions_keep_every_image_once(tmp_path: Path, dealing: Dealing) -> None:
    source = class_folders(tmp_path / "s", {"a": 40, "b": 20, "c": 12})
    written = prepare_images(source, tmp_path / "out", dealing=dealing)
    assert list(written) == [f"site-{n}" for n in range(1, 5)]
    names = [Path(e["image"]).name for folder in written.values() for split in SPLITS for e in lists(folder)[split]]
    assert sorted(names) == sorted(f"{p.parent.name}_{p.name}" for p in source.rglob("*.png"))
    assert sum((labels(folder) for folder in written.values()), Counter()) == {0: 40, 1: 20, 2: 12}
    if dealing.partition == "iid":
        assert [labels(folder) for folder in written.values()] == [Counter({0: 10, 1: 5, 2: 3})] * 4
    again = prepare_images(source, tmp_path / "again", dealing=dealing)
    assert [lists(folder) for folder in written.values()] == [lists(folder) for folder in again.values()]
    other = prepare_images(source, tmp_path / "other", dealing=dealing, seed=1)
    assert [lists(folder) for folder in written.values()] != [lists(folder) for folder in other.values()]


def test_patients_stay_together(tmp_path: Path) -> None:
    source = tmp_path / "s"
    for person in range(20):
        for index in range(3):
            draw(source / f"{'ab'[person % 2]}/p{person}_{index}.png", 10 * person + index)
    written = prepare_images(
        source, tmp_path / "out", group=r"(p\d+)_", dealing=Dealing(partition="iid", sites=3, min_size=1)
    )
    where: dict[str, set[tuple[str, str]]] = {}
    for site, folder in written.items():
        for split in SPLITS:
            for entry in lists(folder)[split]:
                where.setdefault(entry["patient"], set()).add((site, split))
    assert len(where) == 20
    assert all(len(places) == 1 for places in where.values())


def test_corrupted_sites_and_a_common_test(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "s", {"a": 40, "b": 20})
    dealing = Dealing(
        partition="two-pool",
        sites=3,
        corrupt="gaussian_noise:4",
        corrupt_sites=1,
        common_test=True,
        size=16,
        min_size=4,
    )
    written = prepare_images(source, tmp_path / "out", dealing=dealing, seed=5)
    first, last = written["site-1"], written["site-3"]
    shared = [e["image"] for e in lists(first)["test"]]
    assert len(shared) == 12
    for folder in written.values():
        own = lists(folder)["test_corrupted" if folder == last else "test"]
        assert lists(folder)["test"] == own
        assert [e["image"] for e in lists(folder)["test_clean"]] == shared
        assert [e["image"] for e in lists(folder)["test_clean"]] == shared
        assert [e["image"] for e in lists(folder)["test_corrupted"]] == [
            name.replace(".png", "_corrupted.png") for name in shared
        ]
    assert (first / shared[0]).samefile(last / shared[0])  # written once
    assert sum(len(lists(folder)[split]) for folder in written.values() for split in SPLITS[:2]) == 48
    clean = Image.open(source / "a" / Path(shared[0]).name[2:]).resize((16, 16), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(np.asarray(Image.open(first / shared[0])), np.asarray(clean))
    entry = lists(last)["training"][0]["image"]
    name = Path(entry).stem
    pixels = np.asarray(Image.open(source / name[0] / f"{name[2:]}.png").resize((16, 16), Image.Resampling.BILINEAR))
    rng = np.random.default_rng(image_seed(f"gaussian_noise/{name}", 5))
    np.testing.assert_array_equal(np.asarray(Image.open(last / entry)), gaussian_noise(pixels, 4, rng))
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert [site for site, found in manifest["sites"].items() if found["corrupted"]] == ["site-3"]
    names = {p.name[2:] for p in (first / "images").iterdir() if "_corrupted" not in p.name}
    assert not {Path(e["image"]).name[2:] for e in lists(last)["training"]} & names


def test_folds(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "s", {"a": 20, "b": 10})
    written = prepare_images(source, tmp_path / "out", dealing=Dealing(partition="iid", sites=2, folds=5))
    for site, folder in written.items():
        tested: list[str] = []
        for fold in range(1, 6):
            found = lists(folder, f"datalist_fold{fold}.json")
            assert Counter(e["label"] for e in found["test"]) == {0: 2, 1: 1}
            assert {split: len(found[split]) for split in SPLITS} == {"training": 9, "validation": 3, "test": 3}
            assert sorted(e["image"] for own in found.values() for e in own) == sorted(
                f"images/{p.name}" for p in (folder / "images").iterdir()
            )
            tested += [e["image"] for e in found["test"]]
            settings = json.loads((tmp_path / f"out/fairflare_fold{fold}.json").read_text())["sites"][site]
            assert settings == {"data_root": str(folder), "datalist": f"datalist_fold{fold}.json", "classes": "all"}
        assert len(set(tested)) == len(tested) == 15
        assert lists(folder) == lists(folder, "datalist_fold1.json")
    with pytest.raises(DataError, match="are too few for 16 folds"):
        prepare_images(source, tmp_path / "x", dealing=Dealing(partition="iid", sites=2, folds=16))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"partition": "iid"}, "needs the number of sites"),
        ({"sites": 3}, "is of a partition other than 'site'"),
        ({"partition": "halves"}, "partition"),
        ({"partition": "two-pool", "sites": 3}, "needs corrupt_sites"),
        ({"corrupt": "gaussian_noise:3"}, "belong together"),
        ({"corrupt_sites": 1}, "belong together"),
        ({"corrupt": "noise:3", "corrupt_sites": 1}, "corrupt must be one of 'gaussian_noise'"),
        ({"corrupt": "motion_blur", "corrupt_sites": 1}, "must be KIND:SEVERITY"),
        ({"corrupt": "motion_blur:6", "corrupt_sites": 1}, "^severity.* got 6$"),
        ({"folds": 1}, "folds must be an integer >= 2"),
        ({"folds": 3, "common_test": True}, "exclude each other"),
        ({"fractions": (0.5, 0.2, 0.2)}, "three shares of sum 1"),
        ({"fractions": (0.8, 0.2, 0.0), "common_test": True}, "needs a share of test images"),
    ],
)
def test_dealings_that_do_not_fit_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dealing(**given)


def test_sites_that_would_be_too_small(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "s", {"a": 4, "b": 4})
    with pytest.raises(ValueError, match=r"site-1, .*, site-4 would .* than 3 images"):
        prepare_images(source, tmp_path / "out", dealing=Dealing(partition="iid", sites=4))
    with pytest.raises(ValueError, match="corrupt_sites=2, but there are 1 sites"):
        prepare_images(source, tmp_path / "out", dealing=Dealing(corrupt="motion_blur:1", corrupt_sites=2))


def test_groups_by_frequency() -> None:
    assert [len(members) for members in frequency_groups(range(23)).values()] == [7, 9, 7]  # as in Fed-MAS
    assert frequency_groups([3, 3, 9, 1]) == {"head": [2], "medium": [0, 1], "tail": [3]}
    assert frequency_groups([1, 2]) == {}


# --- interrupted ------------------------------------------------------------------------------------------


def interrupted_after(count: int, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Interrupt the writing when so many files exist."""
    real, written = drafts.sha256_of, []

    def checksum(target: Path) -> str:
        if len(written) == count:
            raise KeyboardInterrupt
        written.append(target)
        return real(target)

    monkeypatch.setattr(drafts, "sha256_of", checksum)
    return written


def test_an_interrupted_call_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = class_folders(tmp_path / "s", {"a": 8, "b": 8})
    interrupted_after(3, monkeypatch)
    assert main(["images", "--source", str(source), "--out", str(tmp_path / "out")]) == 130
    assert "interrupted; nothing is written" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_what_a_killed_call_left_is_not_taken_over(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "s", {"a": 8, "b": 8})
    draw(tmp_path / "out" / FOLDER / "new/site-1/images/stray.png", 1)
    folder = prepare_images(source, tmp_path / "out")["site-1"]
    assert len(list((folder / "images").iterdir())) == 16
    assert not (folder / "images/stray.png").exists()
    assert not (tmp_path / "out" / FOLDER).exists()


def test_one_call_at_a_time(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "s", {"a": 4, "b": 4})
    with (
        drafts.open_draft(tmp_path / "out", lambda done: None),
        pytest.raises(DataError, match="another call prepares"),
    ):
        prepare_images(source, tmp_path / "out")


def test_an_earlier_result_is_replaced_as_a_whole(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "s", {"a": 20, "b": 20})
    prepare_images(source, tmp_path / "out", dealing=Dealing(partition="iid", sites=4, folds=2))
    (tmp_path / "out/mine.txt").write_text("stays")
    with pytest.raises(DataError, match="is there already"):
        prepare_images(source, tmp_path / "out", dealing=Dealing(partition="iid", sites=2))
    prepare_images(source, tmp_path / "out", dealing=Dealing(partition="iid", sites=2), overwrite=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "fairflare.json", "manifest.json", "mine.txt", "site-1", "site-2"
    ]  # fmt: skip


def test_what_a_killed_replacement_took_away_comes_back(tmp_path: Path) -> None:
    source = class_folders(tmp_path / "s", {"a": 6, "b": 6})
    prepare_images(source, tmp_path / "out")
    before = (tmp_path / "out/manifest.json").read_text()
    old = tmp_path / "out" / FOLDER / "old"
    old.mkdir(parents=True)
    for name in ("site-1", "manifest.json"):  # as after a kill between two renames
        (tmp_path / "out" / name).rename(old / name)
    with pytest.raises(DataError, match="is there already"):
        prepare_images(source, tmp_path / "out", seed=1)
    (tmp_path / "out/fairflare.json").unlink()
    with pytest.raises(DataError, match="is there already"):
        prepare_images(source, tmp_path / "out", seed=1)
    assert (tmp_path / "out/manifest.json").read_text() == before
    assert load_datalist(tmp_path / "out/site-1", site="a", class_labels=True).splits["test"]


# --- masks ------------------------------------------------------------------------------------------------


def mask_folders(root: Path, sites: tuple[str, ...]) -> Path:
    for place, site in enumerate(sites):
        for index in range(6):
            draw(root / site / f"images/p{index // 2}_{index}.png", 100 * place + index)
            (root / site / "masks").mkdir(exist_ok=True)
            Image.fromarray(np.eye(10, 12, dtype=np.uint8) * 128).save(
                root / site / f"masks/p{index // 2}_{index}_mask.png"
            )
    return root


def test_masks_of_smoothed_edges_or_numbered_objects_are_no_labels(tmp_path: Path) -> None:
    source = mask_folders(tmp_path / "s", ("",))
    for index, file in enumerate(sorted((source / "masks").iterdir())):
        values = np.arange(10 * 12, dtype=np.uint8).reshape(10, 12) % (7 * index + 6)
        Image.fromarray(values).save(file)
    with pytest.raises(DataError, match=r"41 values, such as \[0, .*--mask-values"):
        prepare_masks(source, tmp_path / "out")
    one = {str(value): int(value > 0) for value in range(41)}
    assert list(prepare_masks(source, tmp_path / "out", mask_values=one)) == ["site-1"]


def test_masks_of_sites(tmp_path: Path) -> None:
    source = mask_folders(tmp_path / "s", ("A", "B"))
    written = prepare_masks(source, tmp_path / "out", group=r"^(p\d)_", mask_values={"0": 0, "128": 1})
    assert list(written) == ["A", "B"]
    block = json.loads((tmp_path / "out/fairflare.json").read_text())["sites"]["A"]
    assert block["mask_values"] == {"0": 0, "128": 1}
    found = lists(written["B"])
    assert {split: len(own) for split, own in found.items()} == dict.fromkeys(SPLITS, 2)
    assert {e["patient"] for own in found.values() for e in own} == {"p0", "p1", "p2"}
    dealt = prepare_masks(source, tmp_path / "dealt", dealing=Dealing(partition="iid", sites=2, size=8))
    assert [sum(map(len, lists(folder).values())) for folder in dealt.values()] == [6, 6]
    entry = lists(dealt["site-1"])["training"][0]
    assert (
        Image.open(dealt["site-1"] / entry["label"]).size == Image.open(dealt["site-1"] / entry["image"]).size == (8, 8)
    )
    with pytest.raises(DataError, match=r"needs classes, and these .*have masks"):
        prepare_masks(source, tmp_path / "x", dealing=Dealing(partition="shards", sites=2))


def test_masks_by_a_table(tmp_path: Path) -> None:
    source = mask_folders(tmp_path / "s", ("A",))
    rows = ["image,mask,site,patient,split"]
    splits = ("train", "train", "val", "val", "test", "test")
    rows += [f"p{i // 2}_{i}.png,A/masks/p{i // 2}_{i}_mask.png,Z,p{i // 2},{splits[i]}" for i in range(6)]
    written = prepare_masks(table(source, rows), tmp_path / "out", csv="list.csv")
    assert {split: [e["patient"] for e in own] for split, own in lists(written["Z"]).items()} == {
        "training": ["p0", "p0"], "validation": ["p1", "p1"], "test": ["p2", "p2"]
    }  # fmt: skip
    rows[1] = rows[1].replace("train", "test")
    with pytest.raises(DataError, match="'p0' is in both 'training' and 'test'"):
        prepare_masks(table(source, rows), tmp_path / "bad", csv="list.csv")
    (source / "A/masks").rename(source / "A/other")
    with pytest.raises(DataError, match=r"expected images/ and .*found A, list.csv"):
        prepare_masks(source, tmp_path / "bad")


# --- the command ------------------------------------------------------------------------------------------


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = class_folders(tmp_path / "s", {"a": 24, "b": 12, "c": 6})
    options = ["--partition", "iid", "--sites", "2", "--corrupt", "motion_blur:1", "--corrupt-sites", "1"]
    options += ["--size", "32"]
    assert main(["images", "--source", str(source), "--out", str(tmp_path / "out"), *options]) == 0
    shown = capsys.readouterr().out
    assert "site-1 (site-1): 13 training, 5 validation, 3 test" in shown
    assert "class  site-1  site-2\na          12      12\nb           6       6\nc           3       3\n" in shown
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["options"]["partition"] == "iid"
    done = CliRunner().invoke(app, ["check-data", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert main(["images", "--source", str(source), "--out", str(tmp_path / "x"), "--partition", "iid"]) == 1
    assert "needs the number of sites" in capsys.readouterr().err


@pytest.mark.parametrize("classes", [["--classes", "b", "a"], ["--classes", "b", "--classes", "a"]])
def test_a_list_stands_behind_one_option_or_an_option_for_each(tmp_path: Path, classes: list[str]) -> None:
    source = class_folders(tmp_path / "s", {"a": 6, "b": 6})
    assert main(["images", "--source", str(source), *classes, "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out/site-1/datalist.json").read_text())["class_names"] == ["b", "a"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {"partition": "two-pool", "sites": 20, "corrupt": "gaussian_noise:3", "corrupt_sites": 4}),
        (["--partition", "site", "--corrupt", "none"], {"sites": None, "corrupt": None, "corrupt_sites": 0}),
        (["--corrupt", "none"], {"sites": 20, "corrupt": None, "corrupt_sites": 4}),
        (["--partition", "iid", "--sites", "3", "--corrupt-sites", "1"], {"sites": 3, "corrupt_sites": 1, "size": 224}),
        (["--fractions", "0.5", "0.25", "0.25", "--no-common-test"], {"fractions": (0.5, 0.25, 0.25)}),
    ],
)
def test_options_on_top_of_a_papers(given: list[str], expected: dict[str, Any]) -> None:
    from fairflare.data.preparers import dealing
    from fairflare.data.preparers.__main__ import make_app
    from fairflare_lab.sets.published import FEDISM

    command = typer.main.get_command(make_app()).commands["isic2019"]  # type: ignore[attr-defined]
    options = command.make_context("prepare", ["--source", "s", "--out", "o", *given]).params
    found = vars(dealing.take_options(options, FEDISM))
    assert {name: found[name] for name in expected} == expected
    assert not set(found) & set(options)
