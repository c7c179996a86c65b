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
from fairflare.data.preparers import prepare_images
from fairflare.data.preparers.__main__ import main
from fairflare.data.preparers.listed import columns_of
from fairflare_lab.sets import PREPARERS

from .test_paper_sets import isic2018, isic2019, write_rows
from .test_prepare_any import draw, lists

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


def test_without_attributes_a_datalist_has_none(tmp_path: Path) -> None:
    prepare_images(table(tmp_path / "s"), tmp_path / "out", csv="all.csv")
    text = (tmp_path / "out/site-1/datalist.json").read_text()
    assert "attributes" not in text


def test_bad_columns(tmp_path: Path) -> None:
    source = table(tmp_path / "s", [("F", "old")])
    with pytest.raises(DataError, match=r"all.csv', line 2: column 'years' must be a number, got 'old'"):
        prepare_images(source, tmp_path / "out", csv="all.csv", attributes={"age": "years:40"})
    with pytest.raises(DataError, match="missing: weight"):
        prepare_images(source, tmp_path / "out", csv="all.csv", attributes={"w": "weight"})
    write_rows(source / "theirs.csv", ["file,diagnosis", "i0.png,a"])
    with pytest.raises(DataError, match=r"missing: image, label; .*: --columns image=COLUMN label=COLUMN, --attr"):
        prepare_images(source, tmp_path / "out", csv="theirs.csv")
    with pytest.raises(ValueError, match="age='years:x' must be COLUMN or COLUMN:EDGE,EDGE"):
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
