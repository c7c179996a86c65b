"""Test the census of a site's labels, and the question about labels of other sites alone, in every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fairflare.base.cases.census import Census, count_reportable, infer_annotated, list_unexplained, question
from fairflare.cli.commands import app
from fairflare.data.datalist import DataError, write_datalist
from fairflare.data.preparers.__main__ import main
from fairflare.flare.statistics import ImageStatistics, statistics_here
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.segmentation import SegmentationTask
from fairflare.tasks.volumes.segmentation import VolumeSegmentationTask

TASK = SegmentationTask(num_classes=2, image_size=(32, 32), features=(4, 4, 8, 8, 8, 4))


@pytest.mark.parametrize(
    ("known", "marked", "annotated"),
    [
        ({2, 0}, {0, 2}, (0, 2)),  # 1 was never looked for
        ({0, 2}, {0}, None),  # 2 is in no image: absent everywhere, or not looked for
        ({0, 1, 2}, {0, 1, 2}, None),  # all were looked for
        ((), (), None), (None, {0}, None),
    ],
)  # fmt: skip
def test_what_labels_show_to_be_annotated(known: Any, marked: Any, annotated: Any) -> None:
    assert infer_annotated(known, marked, 3) == annotated


def masks_site(folder: Path, marked: tuple[int, ...], images: int = 3, **more: Any) -> dict[str, Any]:
    """Make a site whose masks have these values, a column of each; return its block in ``fairflare.json``."""
    rng = np.random.default_rng([images, *folder.name.encode()])
    folder.mkdir(parents=True)
    splits: dict[str, list[dict[str, Any]]] = {}
    for split in ("training", "validation", "test"):
        splits[split] = []
        for number in range(images):
            mask = np.zeros((40, 40), np.uint8)
            for value in marked:
                mask[8:30, 6 * value : 6 * value + 5] = value
            Image.fromarray(rng.integers(0, 255, (40, 40), np.uint8)).save(folder / f"{split}{number}.png")
            Image.fromarray(mask).save(folder / f"{split}{number}_mask.png")
            splits[split].append({"image": f"{split}{number}.png", "label": f"{split}{number}_mask.png"})
    write_datalist(folder / "datalist.json", splits)
    return {"data_root": str(folder), **more}


def written(folder: Path, sites: dict[str, Any]) -> Path:
    file = folder / "fairflare.json"
    file.write_text(json.dumps({"sites": sites}))
    return file


def census(data: Any) -> dict[str, int]:
    """Cases with each structure or class, of all the site's lists, by name."""
    marks = [mark for split in ("training", "validation", "test") for mark in data.marks(split)]
    return Census(marks).count_reportable(data.task.names(), 1)


def test_the_worked_example_of_a_floor() -> None:
    """Check 12 cases with floor 5: of 12, 3 and 0 only the first number may leave; 9 would reveal the 3 without."""
    counts = {"a": 12, "b": 3, "c": 0, "d": 9, "e": 7}
    assert count_reportable(counts, 12, 5) == {"a": 12, "e": 7}
    assert count_reportable(counts, 12, 1) == {"a": 12, "b": 3, "d": 9, "e": 7}
    assert count_reportable({"a": 5, "b": 4}, 10, 5) == {"a": 5}


def test_who_is_asked_about_what() -> None:
    told = {"A": ["x", "y"], "B": ["x"], "C": []}
    assert list_unexplained(told) == {"B": ["y"], "C": ["x", "y"]}
    assert list_unexplained(told, ["C"]) == {"B": ["y"]}
    assert list_unexplained({"A": [], "B": []}) == {}
    numbers = {"x": [1], "y": [2, 3]}
    text = question({"B": ["y"], "C": ["x", "y"]}, False, numbers, "D/fairflare.json")
    assert text.startswith("no mask of B marks y; no mask of C marks x, y (or too few")
    assert 'Write "structures" for B, C into D/fairflare.json, in the block of the site: the numbers' in text
    assert """ (1: x, 2, 3: y), such as "sites": {"B": {"structures": [1]}}, or "all" where""" in text
    assert "where nobody annotated any, leave the site out of the run, or its images out of its datalist" in text
    numbers = {"x": [0], "y": [1], "z": [2]}
    for lacks, has in (("z", [0, 1]), ("x", [1, 2])):
        text = question({"B": [lacks]}, True, numbers)
        assert f' (0: x, 1: y, 2: z), such as "sites": {{"B": {{"classes": {has}}}}}, or' in text
    assert 'correct "class_numbers" (of findings "class_names" of its datalist); where' in text


@pytest.mark.parametrize(("said", "found"), [([1], (0,)), ([2], (1,)), ([1, 2], (0, 1)), ("all", (0, 1)), (None, None)])
def test_a_site_says_what_it_annotated(tmp_path: Path, said: Any, found: Any) -> None:
    block = masks_site(tmp_path / "a", tuple(said) if isinstance(said, list) else (1, 2))
    data = TASK.open_site("a", {**block, **({} if said is None else {"structures": said})})
    assert data.annotated == found
    assert census(data) == ({"class_1": 9, "class_2": 9} if said in (None, "all") else {f"class_{k}": 9 for k in said})


def test_a_structure_of_several_labels_needs_all_of_them(tmp_path: Path) -> None:
    nested = SegmentationTask(num_classes=2, labels=[[1, 2], [2]], image_size=(32, 32))
    block = masks_site(tmp_path / "a", (2,))
    assert nested.open_site("a", {**block, "structures": [2]}).annotated == (1,)
    for strange in ([1], [3], [2, 3]):
        with pytest.raises(DataError, match=r"structures: \[\d\] .*\[\[1, 2\], \[2\]\]"):
            nested.open_site("a", {**block, "structures": strange})


def test_a_mask_that_marks_more_than_the_file_says_is_named(tmp_path: Path) -> None:
    data = TASK.open_site("a", {**masks_site(tmp_path / "a", (1, 2)), "structures": [1]})
    with pytest.raises(DataError, match=r"mask.png' .*'training' marks 2, .*'struct"):
        data.marks("training")


def test_volumes_are_counted_by_their_masks(tmp_path: Path) -> None:
    assert main(["volumes", "--source", str(volumes(tmp_path / "src")), "--out", str(tmp_path / "out")]) == 0
    sites = json.loads((tmp_path / "out/fairflare.json").read_text())["sites"]
    task = VolumeSegmentationTask(num_classes=2, patch_size=(32, 32, 32))
    found = {site: census(task.open_site(site, block)) for site, block in sites.items()}
    assert found == {"one": {"class_1": 6}, "two": {"class_2": 6}}


def volumes(folder: Path) -> Path:
    import nibabel

    rng = np.random.default_rng(0)
    for value, site in ((1, "one"), (2, "two")):
        for number in range(6):
            for kind, array in (
                ("images", rng.integers(0, 99, (12, 12, 12))),
                ("masks", np.pad(np.full((4, 4, 4), value), 4)),
            ):
                (folder / site / kind).mkdir(parents=True, exist_ok=True)
                file = nibabel.Nifti1Image(array.astype(np.int16), np.eye(4))
                nibabel.save(file, folder / site / kind / f"{site}{number}.nii.gz")
    return folder


ASKED = "no mask of {} marks {} (or too few for its min_cases), and those of other sites do"


def test_prepare_says_what_each_site_has_and_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["volumes", "--source", str(volumes(tmp_path / "src")), "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "one: masks with 0: 6, 1: 6, read as 0, 1\n" in text
    assert "NOTE: no mask of one marks label 2; no mask of two marks label 1 (or too few" in text
    assert f'"structures" for one, two into {tmp_path}/out/fairflare.json, in' in text
    assert '(1: label 1, 2: label 2), such as "sites": {"one": {"structures": [1]}}, or' in text
    assert "Next: answer the NOTE on labels, then fairflare check-data" in text
    dealt = ["--partition", "iid", "--sites", "2", "--overwrite"]
    assert main(["volumes", "--source", str(tmp_path / "src"), "--out", str(tmp_path / "out"), *dealt]) == 0
    assert "NOTE: no mask" not in capsys.readouterr().out
    blocks = json.loads((tmp_path / "out/fairflare.json").read_text())["sites"].values()
    assert [block["structures"] for block in blocks] == ["all", "all"]


def test_an_answer_that_nobody_reads_or_keeps_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    given = ["volumes", "--source", str(volumes(tmp_path / "src")), "--out", str(tmp_path / "out")]
    assert main(given) == 0
    file = tmp_path / "out/fairflare.json"
    blocks = json.loads(file.read_text())["sites"]
    (tmp_path / "out/one/fairflare.json").write_text('{"structures": [1]}')
    done = CliRunner().invoke(app, ["check-data", str(tmp_path / "out")])
    unread = f"{tmp_path}/out/one/fairflare.json is not read; the block of 'one' in {file} is"
    assert unread in " ".join(done.output.split())
    file.write_text(json.dumps({"sites": {**blocks, "one": {**blocks["one"], "structures": [1]}}}))
    assert main([*given, "--overwrite"]) == 0
    assert (
        "the earlier fairflare.json said is annotated is not kept; write it again: one: structures [1]" in caplog.text
    )
    assert "no mask of one marks label 2" in capsys.readouterr().out


@pytest.mark.parametrize("said", [None, [1], "all"])
def test_check_data_asks_until_the_file_says_it(tmp_path: Path, said: Any) -> None:
    told = {} if said is None else {"structures": said}
    file = written(tmp_path, {"A": masks_site(tmp_path / "A", (1, 2)), "B": masks_site(tmp_path / "B", (1,), **told)})
    done = CliRunner().invoke(app, ["check-data", str(file), "--set", "num_classes=2"])
    none = "not annotated" if said == [1] else 0
    assert f"masks that mark class_1: 9, class_2: {none}" in " ".join(done.output.split())
    assert done.exit_code == (said is None)
    assert (ASKED.format("B", "class_2") in " ".join(done.output.split())) == (said is None)


def test_prepare_asks_in_the_numbers_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check masks of 0 and 255 at one site: read as another structure, with the option that makes them the same."""
    for site, value in (("A", 1), ("B", 255)):
        for number in range(5):
            for kind, high in (("images", 200), ("masks", value)):
                (tmp_path / "src" / site / kind).mkdir(parents=True, exist_ok=True)
                pixels = np.zeros((20, 20), np.uint8)
                pixels[5:15, 5 : 10 + number] = high - number * (kind == "images")
                Image.fromarray(pixels).save(tmp_path / "src" / site / kind / f"{site}{number}.png")
    given = ["masks", "--source", str(tmp_path / "src"), "--out", str(tmp_path / "out")]
    assert main(given) == 0
    shown = capsys.readouterr()
    assert "no mask of A marks label 2; no mask of B marks label 1" in shown.out
    assert "B: masks with 0: 5, 255: 5, read as 0, 2\n" in shown.out
    assert 'such as "sites": {"A": {"structures": [1]}}, or' in shown.out
    (note,) = json.loads((tmp_path / "out/manifest.json").read_text())["notes"]
    option = "--mask-values 0=0 1=1 255=1"
    assert note.endswith(f"where 255 is the 1 of other sites' masks, prepare again with --overwrite {option}")
    assert main([*given, "--overwrite", *option.split()]) == 0
    shown = capsys.readouterr()
    assert "no mask of" not in shown.out
    assert "Next: fairflare check-data" in shown.out


def test_check_data_names_a_wrong_key(tmp_path: Path) -> None:
    file = written(tmp_path, {"A": masks_site(tmp_path / "A", (1, 2), structures=[3])})
    done = CliRunner().invoke(app, ["check-data", str(file), "--set", "num_classes=2"])
    assert done.exit_code == 1
    assert "structures: [3] make no whole one of [[1], [2]]" in done.output


def test_a_code_that_a_site_never_uses(tmp_path: Path) -> None:
    blocks = {}
    for site, codes in (("A", (0, 1, 2)), ("B", (0, 2))):
        blocks[site] = masks_site(tmp_path / site, (1,))
        splits = json.loads((tmp_path / site / "datalist.json").read_text())
        for entries in splits.values():
            for entry, code in zip(entries, (*codes, *codes), strict=False):
                entry["label"] = code
        write_datalist(tmp_path / site / "datalist.json", splits, class_names=["x", "y", "z"])
    done = CliRunner().invoke(app, ["check-data", str(written(tmp_path, blocks))])
    assert done.exit_code == 1
    assert "no label of B is y (or too few for its min_cases), and those of other sites do" in " ".join(
        done.output.split()
    )
    blocks["B"]["classes"] = [0, 2]
    assert CliRunner().invoke(app, ["check-data", str(written(tmp_path, blocks))]).exit_code == 0
    data = ClassificationTask(num_classes=3, class_names=["x", "y", "z"], image_size=(33, 33)).open_site(
        "B", blocks["B"]
    )
    assert (data.annotated, census(data)) == ((0, 2), {"x": 6, "z": 3})


def test_stats_ask_before_they_say_that_mixes_are_alike(tmp_path: Path) -> None:
    blocks = {"A": masks_site(tmp_path / "A", (1, 2)), "B": masks_site(tmp_path / "B", (1,))}
    document = statistics_here(blocks, ImageStatistics())
    assert any(line.startswith("no mask of B marks class 2 (or too few") for line in document.sentences)
    blocks["B"]["structures"] = "all"
    assert any("in its mix of classes is" in line for line in statistics_here(blocks, ImageStatistics()).sentences)
    blocks["B"]["structures"] = [1]
    document = statistics_here(blocks, ImageStatistics())
    assert document.sites["B"].counts["annotated"] == 2
    assert any("the file of B says that only some are annotated there" in line for line in document.sentences)
    assert not any("mix of classes" in line for line in document.sentences)
    assert not any("no mask of" in line for line in statistics_here(blocks, ImageStatistics()).sentences)
