"""Test attributes of people from tables in datalists, and the output of ``check-data`` about them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fairflare.cli.commands import app
from fairflare.data.datalist import SPLITS, DataError, load_datalist
from fairflare.data.listing.attributes import Attribute, doubts_of
from fairflare.data.preparers import prepare_images
from fairflare.data.preparers.__main__ import main
from fairflare.data.preparers.listed import columns_of
from fairflare.data.reading import Reading
from fairflare.tasks.classification import ClassificationTask
from fairflare.tasks.scores.site_statistics import measure
from fairflare_lab.sets import PREPARERS

from .image_files import draw, lists
from .test_paper_sets import isic2018, isic2019, write_rows

prepare_isic2018 = PREPARERS["isic2018"].prepare
prepare_isic2019 = PREPARERS["isic2019"].prepare

pytestmark = pytest.mark.usefixtures("one_thread")
WHO = [("F", "31"), ("M", "64"), ("", "45"), ("F", "nan"), ("M", "40")]


def table(root: Path, who: Any = WHO, count: int = 30) -> Path:
    rows = ["image,label,gender,years"]
    for index in range(count):
        draw(root / f"i{index}.png", index)
        sex, age = who[index % len(who)]
        rows.append(f"i{index}.png,{'ab'[index % 2]},{sex},{age}")
    write_rows(root / "all.csv", rows)
    return root


def test_columns_become_attributes(tmp_path: Path) -> None:
    source = table(tmp_path / "s")
    args = ["images", "--source", str(source), "--out", str(tmp_path / "out"), "--csv", "all.csv"]
    main([*args, "--attributes", "sex=gender", "age=years:40,60"])
    content = json.loads((tmp_path / "out/site-1/datalist.json").read_text())
    assert content["attributes"] == {
        "sex": {"kind": "category", "values": ["F", "M"]}, "age": {"kind": "number", "bins": [40.0, 60.0]},
    }  # fmt: skip
    entries = {Path(e["image"]).stem: e for split in SPLITS for e in lists(tmp_path / "out/site-1")[split]}
    for name, entry in entries.items():
        sex, age = WHO[int(name[1:]) % len(WHO)]
        wanted: dict[str, Any] = {"sex": sex} if sex else {}
        assert entry["attributes"] == wanted | ({"age": float(age)} if age != "nan" else {})
    listed = load_datalist(tmp_path / "out/site-1", site="site-1", class_labels=True)
    counts = Counter(sample.groups["age"] for split in SPLITS for sample in listed.splits[split])
    assert counts == {0: 6, 1: 12, 2: 6, 3: 6}


def test_check_data_counts_them(tmp_path: Path) -> None:
    source = table(tmp_path / "s")
    prepare_images(source, tmp_path / "out", csv="all.csv", attributes={"sex": "gender"})
    told = CliRunner().invoke(app, ["check-data", str(tmp_path / "out")])
    listed = load_datalist(tmp_path / "out/site-1", site="site-1", class_labels=True)
    counts = Counter(sample.groups["sex"] for sample in listed.splits["training"])
    assert f"training by sex: F {counts[0]}, M {counts[1]}, unknown {counts[2]}" in told.stdout
    document = json.loads(CliRunner().invoke(app, ["check-data", str(tmp_path / "out"), "--json"]).stdout)
    assert document["sites"][0]["groups"]["sex"]["training"] == {"F": counts[0], "M": counts[1], "unknown": counts[2]}


def test_a_group_of_nobody_unknown_is_not_printed(tmp_path: Path) -> None:
    prepare_images(
        table(tmp_path / "s", [("F", "1"), ("M", "2")]), tmp_path / "out", csv="all.csv", attributes={"sex": "gender"}
    )
    told = CliRunner().invoke(app, ["check-data", str(tmp_path / "out")])
    assert "training by sex: F " in told.stdout
    assert "unknown" not in told.stdout


def test_bad_columns(tmp_path: Path) -> None:
    source = table(tmp_path / "s", [("F", "old")])
    with pytest.raises(DataError, match=r"line 2: column 'years' must .*got 'old'"):
        prepare_images(source, tmp_path / "out", csv="all.csv", attributes={"age": "years:40"})
    with pytest.raises(DataError, match="missing: weight"):
        prepare_images(source, tmp_path / "out", csv="all.csv", attributes={"w": "weight"})
    write_rows(source / "theirs.csv", ["file,diagnosis", "i0.png,a"])
    with pytest.raises(DataError, match=r"missing: image, label; .*--columns image="):
        prepare_images(source, tmp_path / "out", csv="theirs.csv")
    with pytest.raises(ValueError, match="age='years:x' must be COLUMN"):
        columns_of({"age": "years:x"})


def test_isic2019_has_the_sex_and_age_that_its_table_publishes(tmp_path: Path) -> None:
    source = isic2019(tmp_path / "s")
    file = source / "ISIC_2019_Training_Metadata.csv"
    rows = [row.split(",") for row in file.read_text().splitlines()]
    head, rows = rows[0], rows[1:]
    keep = [head.index(name) for name in ("image", "lesion_id")]
    ages = ["30.0", "", "85.0"]
    told = [
        ",".join([*(row[k] for k in keep), ages[i % 3], ["male", "female", ""][i % 3]]) for i, row in enumerate(rows)
    ]
    write_rows(file, ["image,lesion_id,age_approx,sex", *told])
    written = prepare_isic2019(source, tmp_path / "out", dealing=_iid())
    seen = Counter[tuple[Any, ...]]()
    for folder in written.values():
        content = json.loads((folder / "datalist.json").read_text())
        assert content["attributes"]["sex"] == {"kind": "category", "values": ["female", "male"]}
        assert content["attributes"]["age"] == {"kind": "number", "bins": [40.0, 60.0]}
        for split in SPLITS:
            for entry in content[split]:
                seen[tuple(sorted(entry.get("attributes", {}).items()))] += 1
    assert set(seen) == {(("age", 30.0), ("sex", "male")), (("sex", "female"),), (("age", 85.0),)}
    assert sum(seen.values()) == len(rows)


def test_isic2018_has_them_of_ham10000(tmp_path: Path) -> None:
    source = isic2018(tmp_path / "s")
    truth = next(source.rglob("*GroundTruth.csv")).read_text().splitlines()[1:]
    told = [f"HAM_{i},{row.split(',')[0]},nv,histo,{40 + i % 2},unknown,back" for i, row in enumerate(truth)]
    write_rows(source / "HAM10000_metadata.csv", ["lesion_id,image_id,dx,dx_type,age,sex,localization", *told])
    written = prepare_isic2018(source, tmp_path / "out", dealing=_iid())
    content = json.loads((next(iter(written.values())) / "datalist.json").read_text())
    assert content["attributes"] == {"age": {"kind": "number", "bins": [40.0, 60.0]}}  # nobody's sex is known
    assert {entry["attributes"]["age"] for entry in content["training"]} == {40.0, 41.0}


def _iid() -> Any:
    from fairflare.data.preparers import Dealing

    return Dealing(partition="iid", sites=2, fractions=(0.6, 0.2, 0.2))


@pytest.mark.parametrize(
    ("names", "alike"),
    [
        (("F", "female", "M", "male"), ["'F' and 'female'", "'M' and 'male'"]),
        (("female", "Female"), ["'female' and 'Female'"]),
        (("männlich", "mannlich"), ["'männlich' and 'mannlich'"]),
        (("non-small cell", "Non small_cell"), ["'non-small cell' and 'Non small_cell'"]),
        (("1", "01", "2", "2.0"), ["'1' and '01'", "'2' and '2.0'"]),
        (("HER2-", "HER2+", "1-2", "12", "A1", "A1B", "I-", "II-", "1.5", "15", "10", "1"), []),
    ],
)
def test_two_spellings_of_one_name_are_named(names: tuple[str, ...], alike: list[str]) -> None:
    wanted = [f"{pair} may be one; write them alike" for pair in alike]
    assert list(doubts_of({}, {}, names)) == [f"classes: {text}" for text in wanted]
    assert list(doubts_of({"a": Attribute("a", names)}, {})) == [f"attribute 'a': {text}" for text in wanted]


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ([-1, 30, 90, -1], "-1 of 2 image(s)"), ([999, 30, 90.0, -9], "-9 of 1 image(s), 999 of 1 image(s)"),
        ([30, 90, 99], ""), ([-1.5, -1, 0.5], ""), ([0, 40, 99, 85], ""), ([-1, -1], "-1 of 2 image(s)"),
    ],
)  # fmt: skip
def test_numbers_that_mark_a_missing_value_are_named(values: list[float], odd: str) -> None:
    told = list(doubts_of({"age": Attribute("age", bins=(40.0,))}, {"age": values}))
    assert told == (
        [f"attribute 'age': {odd} may mean that nothing is known; leave the value out there"] if odd else []
    )


@pytest.mark.parametrize(("names", "mixed"), [("F M 1", True), ("1 2", False), ("T1 T2 4", False), ("no yes", False)])
def test_numbers_beside_words_are_named(names: str, mixed: bool) -> None:
    line = f"classes: numbers beside words ({names.replace(' ', ', ')}); write what the numbers mean"
    assert list(doubts_of({}, {}, names.split())) == [line] * mixed


def test_a_name_for_nothing_is_no_group() -> None:
    told = list(doubts_of({"sex": Attribute("sex", ("F", "N/A", "?"))}, {}, ["none", "melanoma", "NaN"]))
    assert told == [
        f"{of} may mean that nothing is known"
        for of in ("attribute 'sex': 'N/A'", "attribute 'sex': '?'", "classes: 'NaN'")
    ]


def test_prepare_check_data_statistics_and_a_run_say_what_is_odd(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    source = table(tmp_path / "s", [("F", "31"), ("female", "-1"), ("M", "64")])
    prepare_images(source, out, csv="all.csv", attributes={"sex": "gender", "age": "years:40"})
    odd = ["attribute 'sex': 'F' and 'female' may be one", "attribute 'age': -1 of 10 image(s) may mean"]
    notes = json.loads((out / "manifest.json").read_text())["notes"]
    assert [any(text in note for note in notes) for text in odd] == [True, True]
    site = {"data_root": str(out / "site-1")}
    other = json.loads((out / "site-1/datalist.json").read_text())
    other["attributes"]["sex"]["values"].append("x")
    (out / "site-1/other.json").write_text(json.dumps(other))
    sites = {"A": site, "B": {**site, "datalist": "other.json"}}
    (tmp_path / "fairflare.json").write_text(json.dumps({"sites": sites}))
    told = " ".join(CliRunner().invoke(app, ["check-data", str(tmp_path / "fairflare.json")]).stdout.split())
    for text in [*odd, "groups of people ('attributes'): {'sex': F, M, female, 'age': <40, >=40} at A; {'sex'"]:
        assert text in told
    caplog.clear()
    measure("A", site, "classification", Reading(), 1)
    task = ClassificationTask(image_size=(32, 32), num_classes=2)
    task.open_site("B", sites["B"])
    assert [sum(text in record.getMessage() for record in caplog.records) for text in odd] == [2, 2]
