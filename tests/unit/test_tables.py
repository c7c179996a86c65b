"""Test tables as R, Excel and old systems write them, against cells and line numbers written by hand."""

from __future__ import annotations

import logging
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fairflare.data.datalist import DataError
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.listed import (
    attributes_of,
    classes_of,
    normalise_labels,
    refuse_one_patient,
    refuse_two_spellings,
)
from fairflare.data.preparers.tables import Images, Row, read_table
from fairflare.data.preparers.trees import list_table
from tests.unit.dicom_files import series

CELLS = [("p0.png", "a"), ("p1.png", "b"), ("p2.png", "a")]
PLAIN = "image,label\np0.png,a\np1.png,b\np2.png,a\n"
#: Content, and the line in which each row begins.
DIALECTS: dict[str, tuple[bytes, list[int]]] = {
    "plain": (PLAIN.encode(), [2, 3, 4]),
    "with a mark": (PLAIN.encode("utf-8-sig"), [2, 3, 4]),
    "UTF-16": (PLAIN.replace(",", "\t").encode("utf-16"), [2, 3, 4]),
    "UTF-16, the other way round": (b"\xfe\xff" + PLAIN.encode("utf-16-be"), [2, 3, 4]),
    "ends of an old Mac": (PLAIN.replace("\n", "\r").encode(), [2, 3, 4]),
    "ends of Windows": (PLAIN.replace("\n", "\r\n").encode(), [2, 3, 4]),
    "R's write.csv": (b'"","image","label"\n"1","p0.png","a"\n"2","p1.png","b"\n"3","p2.png","a"\n', [2, 3, 4]),
    "R's write.table": (b'"image","label"\n"1","p0.png","a"\n"2","p1.png","b"\n"3","p2.png","a"\n', [2, 3, 4]),
    "quoted head": (b'"image";"label"\n"p0.png";"a"\n"p1.png";"b"\n"p2.png";"a"\n', [2, 3, 4]),
    "sep=": (b"sep=;\r\nimage;label\r\np0.png;a\r\np1.png;b\r\np2.png;a\r\n", [3, 4, 5]),
    "sep= in quotes": (b'"sep=|"\nimage|label\np0.png|a\np1.png|b\np2.png|a\n', [3, 4, 5]),
    "empty rows": (b"\nimage,label\n,\np0.png,a\n\np1.png,b\np2.png,a\n,\n,\n", [4, 6, 7]),
    "empty columns at the end": (b"image,label,,\np0.png,a,,\np1.png,b,,\np2.png,a,,\n", [2, 3, 4]),
    "cells of several lines": (
        b'image,label,note\np0.png,a,"twice,\nsee letter"\np1.png,b,\np2.png,a,"x\n\ny"\n', [2, 4, 5],
    ),
    "blanks": (b"image, label\np0.png , a\n p1.png,b \np2.png,a\n", [2, 3, 4]),
    "commas in a quoted name": (b'image;"label";"a,b,c,d"\np0.png;a;\np1.png;b;\np2.png;a;\n', [2, 3, 4]),
}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects(tmp_path: Path, dialect: str) -> None:
    content, lines = DIALECTS[dialect]
    (tmp_path / "t.csv").write_bytes(content)
    rows = read_table(tmp_path / "t.csv", ["image", "label"])
    assert [(row["image"], row["label"]) for row in rows] == CELLS
    assert [row.line for row in rows] == lines


def test_windows_letters_are_read_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.csv").write_bytes("image;label\np0.png;nävus\n".encode("cp1252"))
    with caplog.at_level(logging.WARNING):
        (row,) = read_table(tmp_path / "t.csv")
    assert row["label"] == "nävus"
    assert "is not UTF-8; it is read as Windows-1252, such as 'p0.png;nävus'" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04rest", "a workbook, .*save .*'CSV UTF-8'"),
        ("image,label\np0.png,a\n".encode("utf-16-le"), "no text in UTF-8, .* or Windows-1252"),
        (b"image,label\np0.png,\x81\n", "no text in UTF-8, .* or Windows-1252"),
        (b"", "has no rows"),
        (b"image,label\n,\n", "has no rows"),
        (b"x\nimage,label\np0.png,a\n", "line 1: .*; missing: image, label; .* x"),
        (b"image,label,label\np0.png,a,b\n", "several columns are called label"),
        (b"image,label\np0.png,a,1\np1.png,b\n", "line 2: it has more cells"),
        (b"image,label\nx.png,a,1\ny.png,b,2\n", "line 2: it has more cells"),
        (b'image,label\n"p0.png,a\np1.png,b\n', "cannot be read: .*save the table as"),
    ],
)  # fmt: skip
def test_what_is_no_table(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_table(tmp_path / "t.csv", ["image", "label"])


def pictures(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(folder / name)
    return folder


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("p0", "A/p0.png"), ("p0.PNG", "A/p0.png"), ("A/p0.png", "A/p0.png"), ("A\\p0.png", "A/p0.png"),
        ("/home/me/s/A/p0.png", "A/p0.png"), ("./A/p0.png", "A/p0.png"), ("p0.jpg", "A/p0.png"), ("p00", None),
        ("B/p0.png", None),  # another folder's image of this name is none
        (unicodedata.normalize("NFD", "Zoë.png"), "A/Zoë.png"),
    ],
)  # fmt: skip
def test_names_in_tables(tmp_path: Path, asked: str, found: str | None) -> None:
    images = Images(pictures(tmp_path / "s", "A/p0.png", "A/p1.png", "A/Zoë.png"))
    place = images.find(asked)
    assert (place and place.relative_to(tmp_path / "s").as_posix()) == found


def test_one_name_of_two_images(tmp_path: Path) -> None:
    images = Images(pictures(tmp_path / "s", "A/p0.png", "B/p0.png"))
    with pytest.raises(DataError, match="several images are called 'p0'"):
        images.find("p0")
    assert images.find("B/p0") == tmp_path / "s/B/p0.png"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["p0,a", "p1,b", "p0.png,b"], "2 and 4: .*p0.png', .*'a' and 'b'; take"),
        (["p0,0", "p1,1", "p0.png,1.0"], "lines 2 and 4: both name"),
        (["p0,a", "p1,NA"], "line 3: the label is 'NA'"),
        (["p0,a", "p1,n/a"], "line 3: the label is 'n/a'"),
        (["p0,1", "p1,."], r"line 3: the label is '\.'"),
        (["p0,?", "p1,0"], r"line 2: the label is '\?'"),
    ],
)
def test_rows_that_contradict(tmp_path: Path, rows: list[str], message: str) -> None:
    source = pictures(tmp_path / "s", "p0.png", "p1.png")
    (source / "t.csv").write_text("\n".join(["image,label", *rows]))
    with pytest.raises(DataError, match=message):
        list_table(source, "t.csv", {}, "label", pictures=True)


def test_rows_that_repeat_are_counted(tmp_path: Path) -> None:
    source = pictures(tmp_path / "s", "p0.png", "p1.png")
    (source / "t.csv").write_text("image,label\np0,0\np1,01\np0.png,0.0\np1,1\n")
    found = list_table(source, "t.csv", {}, "label", pictures=True)
    assert [(case.name, case.mask) for case in found.cases] == [("p0", "0"), ("p1", "01")]
    assert found.notes == [f"'{source}/t.csv': 2 rows repeat an earlier one, such as line 4"]


def test_images_that_no_row_names_are_counted(tmp_path: Path) -> None:
    source = pictures(tmp_path / "s", *(f"p{number}.png" for number in range(6)))
    (source / "t.csv").write_text("image,label\np0,0\np1,1\n")
    (source / "m.csv").write_text("image,mask\np0,p3\np1,p4\np2,p5\n")
    masked = list_table(source, "m.csv", {}, pictures=True)
    assert (len(masked.cases), masked.notes) == (3, [])  # masks are named as well
    found = list_table(source, "t.csv", {}, pictures=True)
    said = f"4 of 6 images in '{source}' are not in the table '{source}/t.csv' and are left out: "
    assert (len(found.cases), found.notes) == (2, [f"{said}'p2.png', 'p3.png', 'p4.png' and 1 more"])


def test_rows_without_a_patient_or_a_split_are_counted(tmp_path: Path) -> None:
    source = pictures(tmp_path / "s", *(f"p{number}.png" for number in range(5)))
    rows = ["p0,0,u,train", "p1,1,,val", "p2,0,NA,test", "p3,1,Unknown,", "p4,0,v,"]
    (source / "t.csv").write_text("\n".join(["image,label,patient,split", *rows]))
    found = list_table(source, "t.csv", {}, "label", pictures=True)
    assert [case.patient for case in found.cases] == ["u", None, None, None, "v"]
    assert found.notes == [
        f"'{source}/t.csv': 2 of 5 rows do not say the split, and are for training, as others say the validation",
        f"'{source}/t.csv': 3 of 5 rows do not say the patient, and are of one each, unless --group or a header tells",
    ]
    (source / "t.csv").write_text(
        "\n".join(["image,label,split", *(f"p{n},{n % 2},{'test' * (n < 2)}" for n in range(5))])
    )
    assert (
        list_table(source, "t.csv", {}, "label", pictures=True).notes == []
    )  # the others are drawn, and nobody is known


def test_series_of_a_table_are_read_and_files_of_none_counted(tmp_path: Path) -> None:
    for number in range(2):
        series(tmp_path / f"s/c{number}", np.zeros((4, 5, 3), np.int16))
    (tmp_path / "s/c0/x.mha").touch()
    (tmp_path / "s/t.csv").write_text("image,label\nc0,a\nc1,b\n")
    found = list_table(tmp_path / "s", "t.csv", {}, "label")
    assert [case.image.name for case in found.cases] == ["c0", "c1"]
    assert len(found.notes) == 1
    assert found.notes[0].startswith(f"'{tmp_path / 's'}': not read: 1 .mha file ('c0/x.mha'): ")
    assert found.notes[0].count(" file") == 1  # and no file of the series


def test_a_class_called_na_is_one_where_the_classes_are_named(tmp_path: Path) -> None:
    source = pictures(tmp_path / "s", "p0.png", "p1.png")
    (source / "t.csv").write_text("image,label\np0,NA\np1,none\n")
    found = list_table(source, "t.csv", {}, "label", classes=["NA", "none"], pictures=True)
    assert [case.mask for case in found.cases] == ["NA", "none"]


@pytest.mark.parametrize(
    ("labels", "given", "names", "numbers"),
    [
        (["00", "1.0", "2"], None, ["0", "1", "2"], [0, 1, 2]),
        (["10", "9", "9.00"], None, [str(n) for n in range(11)], [10, 9, 9]),
        (["b", "a", "b"], None, ["a", "b"], [1, 0, 1]),
        (["01", "x"], None, ["01", "x"], [0, 1]),
        (["1.0", "0"], ["0", "1"], ["0", "1"], [1, 0]),
        (["-1", "1"], ["-1", "1"], ["-1", "1"], [0, 1]),
    ],
)
def test_labels_by_value(labels: list[str], given: list[str] | None, names: list[str], numbers: list[int]) -> None:
    assert classes_of(labels, given) == (names, numbers)


@pytest.mark.parametrize(
    ("labels", "given", "message"),
    [
        (["-1", "0", "1"], None, "from -1 to 1; those of classes begin"),
        (["0", "20240131"], None, "numbers from 0 to 20240131"),
        (["1", "1.0"], None, "expected at least two classes, found 1"),
        (["1", "0"], ["1", "1.0"], "classes must be different names or"),
        (["x", "0"], ["x", "y"], "an image has the label '0'"),
    ],
)
def test_labels_that_are_none(labels: list[str], given: list[str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classes_of(labels, given)


@pytest.mark.parametrize(
    "values",
    [("F", "f"), ("TRUE", "True"), ("0012", "12"), ("12.0", "12"), ("Na\u0308vus", "N\u00e4vus"), ("a", "b", "A")],
)
def test_one_value_in_two_spellings_is_no_class_group_or_patient_of_its_own(values: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match=r"^'.+' and '.+' would be two patients;"):
        refuse_two_spellings(values, "patients")
    with pytest.raises(DataError, match="would be two classes"):
        classes_of(["x", *values])
    with pytest.raises(DataError, match=r"would be two groups \(column 'x'\)"):
        attributes_of({"sex": "x"}, rows_of("x", *values))
    if values[0].isalpha():
        assert classes_of(values, values)[1] == [*range(len(values))]  # named on purpose
    refuse_two_spellings(["12", "13", "p1", "p10", "12"], "patients")


@pytest.mark.parametrize("number", ["1.23457E+14", "1,23457E+14"])
def test_a_number_that_a_spreadsheet_shortened_is_no_patient(number: str) -> None:
    items = [Item(name, "", Path(name), 0, patient, "a") for name, patient in (("i", "p1"), ("j", number))]
    with pytest.raises(DataError, match=r"^patient '1.23457E\+14' of site 'a' is"):
        refuse_one_patient(items, None)


def test_by_value_keeps_numbers_that_a_float_cannot() -> None:
    assert normalise_labels(["0900719925474099301", "+1"]) == ["900719925474099301", "1"]


def rows_of(*texts: str) -> list[Row]:
    rows = [Row({"x": text}) for text in texts]
    for number, row in enumerate(rows, 2):
        row.where = f"line {number}"
    return rows


def test_what_people_are() -> None:
    declared, people = attributes_of({"sex": "x"}, rows_of("1", "1.0", "n/a", "02", "unknown", "?"))
    assert declared == {"sex": {"kind": "category", "values": ["1", "2"]}}
    assert people == [{"sex": "1"}, {"sex": "1"}, {}, {"sex": "2"}, {}, {}]
    declared, people = attributes_of({"age": "x:40,60"}, rows_of("63.5", "NA"))
    assert declared == {"age": {"kind": "number", "bins": [40, 60]}}
    assert people == [{"age": 63.5}, {}]
    with pytest.raises(DataError, match="'x' must be a number, got '63,5'; write"):
        attributes_of({"age": "x:40"}, rows_of("63,5"))
    with pytest.raises(DataError, match="must be a number, got 'inf'"):
        attributes_of({"age": "x:40"}, rows_of("inf"))
    with pytest.raises(DataError, match=r"60 different values, .*--attributes age=x"):
        attributes_of({"age": "x"}, rows_of(*map(str, range(60))))
