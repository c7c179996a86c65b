"""Test the papers' data sets, each on a miniature in its real layout, and one federated round on every result."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fairflare.data.datalist import DataError
from fairflare.data.preparers import Dealing, prepare_images, prepare_masks
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports.local import run_local
from fairflare_lab.sets.published import CENTRES, FEDISM, HYPERKVASIR, ISIC2018, ISIC2019, PREPARERS, RIF_SITES
from fairflare_lab.sets.special import KINDS, PROSTATE_SITES
from tests.tiny import run_document
from tests.unit.dicom_files import dicom as write_dicom
from tests.unit.image_files import draw, lists

prepare_flamby = PREPARERS["isic2019-flamby"].prepare
prepare_hyperkvasir = PREPARERS["hyperkvasir"].prepare
prepare_isic2018 = PREPARERS["isic2018"].prepare
prepare_isic2019 = PREPARERS["isic2019"].prepare
prepare_messidor2 = PREPARERS["messidor2"].prepare
prepare_prostate_mri = PREPARERS["prostate-mri"].prepare
prepare_rif = PREPARERS["rif"].prepare
prepare_rsna = PREPARERS["rsna"].prepare
prepare_tones = PREPARERS["isic2019-tones"].prepare

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = {"image_size": [32, 32], "features": [4, 4, 4, 4], "batch_size": 8, "local_epochs": 1}
MASKS = {"image_size": [32, 32], "features": [2, 2, 2, 2, 2, 2], "batch_size": 8, "local_epochs": 1}


def write_rows(path: Path, rows: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


def one_hot(names: Sequence[str], labels: Sequence[int], images: Sequence[str], more: Sequence[str] = ()) -> list[str]:
    """Write a table as the ISIC challenges do, with numbers that have a point."""
    rows = [",".join(["image", *names, *more])]
    for image, label in zip(images, labels, strict=True):
        rows.append(
            ",".join([image, *("1.0" if c == label else "0.0" for c in range(len(names))), *("0.0" for _ in more)])
        )
    return rows


# --- miniatures -------------------------------------------------------------------------------------------


def isic2018(root: Path, count: int = 70) -> Path:
    names = [f"ISIC_{24306 + i:07d}" for i in range(count)]
    for i, name in enumerate(names):
        draw(root / f"ISIC2018_Task3_Training_Input/{name}.jpg", i)
    (root / "ISIC2018_Task3_Training_Input/ATTRIBUTION.txt").write_text("by")
    truth = "ISIC2018_Task3_Training_GroundTruth"
    write_rows(root / truth / f"{truth}.csv", one_hot(ISIC2018, [i // 2 % 7 for i in range(count)], names))
    lesions = ["image,lesion_id,diagnosis_confirm_type", *(f"{n},HAM_{i // 2:07d},histo" for i, n in enumerate(names))]
    write_rows(root / "ISIC2018_Task3_Training_LesionGroupings.csv", lesions)
    return root


def isic2019(root: Path, count: int = 96, preprocessed: bool = False) -> Path:
    names = [f"ISIC_{i:07d}{'_downsampled' if i % 10 == 0 else ''}" for i in range(count)]
    folder = "ISIC_2019_Training_Input"
    for i, name in enumerate(names):
        draw(root / (f"{folder}_preprocessed/{name}.jpg" if preprocessed else f"{folder}/{folder}/{name}.jpg"), i)
    labels = [i // 2 % 8 for i in range(count)]
    write_rows(root / "ISIC_2019_Training_GroundTruth.csv", one_hot(ISIC2019, labels, names, ["UNK"]))
    meta = ["image,age_approx,anatom_site_general,lesion_id,sex"]
    meta += [f"{n},55,anterior torso,{f'BCN_{i // 2:07d}' if i % 5 else ''},female" for i, n in enumerate(names)]
    write_rows(root / "ISIC_2019_Training_Metadata.csv", meta)
    rows = [f"image,{','.join(ISIC2019)},UNK,target,center,fold,fold2"]
    for i, name in enumerate(names):
        ones = ",".join("1.0" if c == labels[i] else "0.0" for c in range(9))
        fold = "test" if i % 16 in (0, 1, 2) else "train"
        rows.append(f"{name},{ones},{labels[i]},{i // 16 % 6},{fold},{fold}_{i // 16 % 6}")
    write_rows(root / "train_test_split", rows)
    tones = [f"{n}.jpg,{'dark' if i // 2 % 3 == 0 else 'light'}" for i, n in enumerate(names)]
    write_rows(root / "tones.csv", ["image,skin_tone", *tones])
    return root


def rif(root: Path, name: str = "Domain") -> Path:
    """Write grey masks with the published values; one site's are colour images with equal channels."""
    seed = 0
    for number in range(1, 5):
        for part, count in (("train", 5), ("test", 2)):
            for index in range(count):
                seed += 1
                stem = f"{'gdV'[min(number - 1, 2)]}{part}{index:02d}"
                draw(root / f"{name}{number}/{part}/ROIs/image/{stem}.png", seed, (16, 16))
                mask = np.full((16, 16), 255, np.uint8)
                mask[4:12, 4:12], mask[6:9, 6:9] = 128, 0
                pixels = np.repeat(mask[:, :, None], 3, 2) if number == 2 else mask
                (root / f"{name}{number}/{part}/ROIs/mask").mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(root / f"{name}{number}/{part}/ROIs/mask/{stem}.png")
    return root


def messidor2(root: Path, raw: bool = True, exams: int = 30) -> Path:
    names = [f"20051020_{i // 2:05d}_0100_PP.png" if i < 2 * exams - 2 else f"IM{i:06d}.JPG" for i in range(2 * exams)]
    names = [name if i % 2 == 0 else name.replace("0100", "0200") for i, name in enumerate(names)]
    for i, name in enumerate(names):
        draw(root / "IMAGES" / name, i)
    head = "image_id,adjudicated_dr_grade" if raw else "id_code,diagnosis"
    rows = [f"{head},adjudicated_dme,adjudicated_gradable"]
    rows += [f"{n},{'' if i == 3 else i // 2 % 5},0,{int(i != 3)}" for i, n in enumerate(names)]
    write_rows(root / "messidor_data.csv", rows)
    pairs = [f"{names[i]};{names[i + 1]}" for i in range(0, len(names), 2)]
    write_rows(root / "messidor-2.csv", ["left;right", *pairs])
    return root


def hyperkvasir(root: Path, count: int = 12) -> Path:
    kinds = ("anatomical-landmarks", "pathological-findings", "quality-of-mucosal-views", "therapeutic-interventions")
    rows = ["Video file,Organ,Finding,Classification"]
    for number, name in enumerate(HYPERKVASIR):
        tract = ("lower-gi-tract", "upper-gi-tract")[number % 2]
        for index in range(max(2, count - number // 2)):
            stem = f"{number:04x}{index:04x}-51aa-495a"
            draw(root / "labeled-images" / tract / kinds[number % 4] / name / f"{stem}.jpg", 100 * number + index)
            rows.append(f"{stem},{tract[:5].title()} GI,{name},{kinds[number % 4]}")
    write_rows(root / "labeled-images/image-labels.csv", rows)
    return root


def dicom(path: Path, values: np.ndarray, patient: str, **tags: Any) -> Path:
    """Write a slice as the challenge does: 16 bits signed, Hounsfield units after the rescaling."""
    path.parent.mkdir(parents=True, exist_ok=True)
    usual = {"RescaleIntercept": -1024, "RescaleSlope": 1, "WindowCenter": 30, "WindowWidth": 80, "Modality": "CT"}
    return write_dicom(path, (values + 1024).astype(np.int16), PatientID=patient, **{**usual, **tags})


def rsna(root: Path, count: int = 84, pictures: bool = False) -> Path:
    rows = ["ID,Label"]
    rng = np.random.default_rng(0)
    for i in range(count):
        name = f"ID_{i:09x}"
        if pictures:
            draw(root / f"stage_2_train/{name}.png", i)
        else:
            dicom(root / f"stage_2_train/{name}.dcm", rng.integers(-20, 100, (12, 12)), f"ID_p{i // 2}")
        own = {KINDS[i // 2 % 5]} if i % 21 else set() if i else {KINDS[0], KINDS[1]}
        rows += [f"{name}_{kind},{int(kind in own)}" for kind in KINDS]
        rows.append(f"{name}_any,{int(bool(own))}")
    rows += rows[1:7]  # a few rows are there twice
    write_rows(root / "stage_2_train.csv", rows)
    return root


def prostate(root: Path) -> Path:
    import nibabel

    rng = np.random.default_rng(0)
    for site in PROSTATE_SITES:
        (root / site).mkdir(parents=True)
        for case in range(5):
            mask = np.zeros((16, 18, 4), np.uint8)
            mask[4:12, 4:12, 1:3] = 1 + case % 2
            affine = np.diag([0.5, 0.6, 3.0, 1.0])
            seg = "Segmentation" if site == "BMC" else "segmentation"
            volume = rng.normal(100, 20, mask.shape).astype(np.float32)
            for name, array in ((f"Case{case:02d}", volume), (f"Case{case:02d}_{seg}", mask)):
                nibabel.save(nibabel.Nifti1Image(array, affine), root / site / f"{name}.nii.gz")
    return root


def folders(root: Path, site: str = "{site}/{label}/{name}.png") -> Path:
    for place in range(2):
        for index in range(16):
            draw(root / site.format(site=f"s{place}", label="ab"[index % 2], name=f"i{index}"), 100 * place + index)
    return root


def mask_folders(root: Path) -> Path:
    for place in range(2):
        for index in range(5):
            draw(root / f"s{place}/images/i{index}.png", 10 * place + index)
            (root / f"s{place}/masks").mkdir(exist_ok=True)
            Image.fromarray(np.eye(10, 12, dtype=np.uint8) * 255).save(root / f"s{place}/masks/i{index}.png")
    return root


# --- one round on each ------------------------------------------------------------------------------------

SMALL = replace(FEDISM, sites=4, corrupt_sites=1, size=32, min_size=3)
FOLDS = Dealing(partition="dirichlet", sites=3, alpha=0.5, folds=5, min_size=3)
Prepare = Callable[..., dict[str, Path]]
PREPARED: dict[str, tuple[Prepare, Callable[[Path], Path], dict[str, Any], int, dict[str, Any]]] = {
    # preparer, miniature, options, sites, settings of the job
    "images": (prepare_images, folders, {}, 2, {"num_classes": 2}),
    "masks": (prepare_masks, mask_folders, {}, 2, {}),
    "prostate-mri": (prepare_prostate_mri, prostate, {}, 6, {}),
    "rif": (prepare_rif, rif, {}, 4, {"in_channels": 3, "num_classes": 2, "labels": [[1, 2], [2]]}),
    "messidor2": (prepare_messidor2, messidor2, {}, 4, {"num_classes": 5}),
    "isic2018": (prepare_isic2018, isic2018, {}, 4, {"num_classes": 7}),
    "isic2019": (prepare_isic2019, isic2019, {"dealing": SMALL}, 4, {"num_classes": 8}),
    "isic2019-flamby": (prepare_flamby, lambda root: isic2019(root, preprocessed=True), {}, 6, {"num_classes": 8}),
    "isic2019-tones": (prepare_tones, isic2019, {"tones": "tones.csv"}, 4, {"num_classes": 8}),
    "hyperkvasir": (prepare_hyperkvasir, hyperkvasir, {"dealing": FOLDS}, 3, {"num_classes": 23}),
    "rsna": (prepare_rsna, rsna, {"dealing": SMALL}, 4, {"num_classes": 5}),
}  # fmt: skip


@pytest.mark.many
@pytest.mark.parametrize("name", PREPARED)
def test_a_round_on_what_was_prepared(tmp_path: Path, name: str) -> None:
    prepare, miniature, options, count, settings = PREPARED[name]
    written = prepare(miniature(tmp_path / "source"), tmp_path / "out", **options)
    assert len(written) == count
    local = json.loads((tmp_path / "out/fairflare.json").read_text())
    classes = "num_classes" in settings and "labels" not in settings
    task, small = ("classification", CLASSES) if classes else ("segmentation", MASKS)
    plan = make_plan("fed_avg", task=task, sites=list(written), num_rounds=1, settings={**small, **settings})
    results = run_document(run_local(plan, tmp_path / "run", local))
    assert results["status"] == "completed", results.get("reason")
    assert results["info"]["synthetic"] is False
    assert sorted(results["test"]) == sorted(written)
    for site, folder in written.items():
        assert results["rounds"][0]["train"][site]["num_samples"] == len(lists(folder)["training"])
        if classes and settings["num_classes"] > 2:
            assert {"head", "medium", "tail"} & set(results["test"][site])


# --- what each one makes ----------------------------------------------------------------------------------


def test_isic_files_that_are_not_as_expected(tmp_path: Path) -> None:
    root = isic2018(tmp_path / "s", 20)
    (root / "ISIC2018_Task3_Training_Input/ISIC_0024307.jpg").unlink()
    with pytest.raises(DataError, match=r"1 of 20 .*: ISIC_0024307; .* has 19"):
        prepare_isic2018(root, tmp_path / "out")
    truth = root / "ISIC2018_Task3_Training_GroundTruth/ISIC2018_Task3_Training_GroundTruth.csv"
    text = truth.read_text()
    truth.write_text(text.replace("ISIC_0024306,1.0", "ISIC_0024306,0.0"))
    draw(root / "ISIC2018_Task3_Training_Input/ISIC_0024307.jpg", 1)
    with pytest.raises(DataError, match=r"line 2: expected a 1 .*MEL, NV"):
        prepare_isic2018(root, tmp_path / "out")
    truth.write_text(text.replace("AKIEC", "AK"))
    with pytest.raises(DataError, match="missing: AKIEC; found: image, MEL, NV"):
        prepare_isic2018(root, tmp_path / "out")
    truth.unlink()
    with pytest.raises(DataError, match=r"expected ISIC2018_Task3.*; found ISIC2018"):
        prepare_isic2018(root, tmp_path / "out")
    with pytest.raises(DataError, match="is not a folder"):
        prepare_isic2018(tmp_path / "nowhere", tmp_path / "out")


def test_flambys_centres_and_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = isic2019(tmp_path / "s", preprocessed=True)
    with caplog.at_level(logging.WARNING):
        written = prepare_flamby(source, tmp_path / "out")
    assert list(written) == list(CENTRES)
    assert "images of 4 lesions in training and in test" in caplog.text  # of 6 pairs two lack a lesion
    for place, folder in enumerate(written.values()):
        assert sorted(int(Path(e["image"]).stem[5:12]) for e in lists(folder)["test"]) == [
            16 * place + i for i in range(3)
        ]
    own = [e["image"] for folder in written.values() for e in lists(folder)["test"]]
    for folder in written.values():
        assert sorted(e["image"] for e in lists(folder)["test_global"]) == sorted(own)
        assert not {e["image"] for e in lists(folder)["training"]} & set(own)
    again = prepare_flamby(source, tmp_path / "again", dealing=Dealing(fractions=(0.72, 0.08, 0.2)))
    assert all("test_global" not in lists(folder) for folder in again.values())
    folds = prepare_flamby(source, tmp_path / "folds", dealing=Dealing(folds=3))
    assert sum(len(lists(folds["MSK"], f"datalist_fold{n}.json")["test"]) for n in (1, 2, 3)) == 16
    table = source / "train_test_split"
    table.write_text(table.read_text().replace(",0,train,", ",6,train,", 1))
    with pytest.raises(DataError, match=r"line 5: expected center 0 to 5 .*got '6'"):
        prepare_flamby(source, tmp_path / "x")


def test_tones(tmp_path: Path) -> None:
    source = isic2019(tmp_path / "s")
    written = prepare_tones(source, tmp_path / "out", tones="tones.csv")
    assert list(written) == ["light-1", "light-2", "dark-1", "dark-2"]
    for site, folder in written.items():
        found = lists(folder)
        numbers = {split: [int(Path(e["image"]).stem.split("_")[2]) for e in own] for split, own in found.items()}
        dark = {split: {n // 2 % 3 == 0 for n in own} for split, own in numbers.items()}
        assert dark["training"] == dark["validation"] == {site.startswith("dark")}
        assert dark["test_light"], dark["test_dark"] == ({False}, {True})
        assert sorted(numbers["test"]) == sorted(numbers["test_light"] + numbers["test_dark"])
    tones = source / "tones.csv"
    tones.write_text(tones.read_text().replace("dark", "brown", 1))
    with pytest.raises(DataError, match="skin tones are brown; expected light"):
        prepare_tones(source, tmp_path / "x", tones="tones.csv")


@pytest.mark.parametrize("name", ["Domain", "site"])
def test_rif_by_the_grey_values_of_its_masks(tmp_path: Path, name: str) -> None:
    written = prepare_rif(rif(tmp_path / "s", name), tmp_path / "out")
    assert list(written) == list(RIF_SITES)
    for folder in written.values():
        found = lists(folder)
        assert {split: len(own) for split, own in found.items()} == {"training": 4, "validation": 1, "test": 2}
        assert all(Path(e["image"]).name.startswith("test_") for e in found["test"])
        mask = np.asarray(Image.open(folder / found["training"][0]["label"]))
        assert Counter(mask.ravel().tolist()) == {0: 256 - 64, 1: 64 - 9, 2: 9}
        assert (mask[6:9, 6:9] == 2).all()


def test_rif_edges_of_the_grey_values(tmp_path: Path) -> None:
    source = rif(tmp_path / "s")
    mask = source / "Domain1/train/ROIs/mask/gtrain00.png"
    edges = np.array([[0, 50, 51, 200, 201, 255]], np.uint8)
    pixels = np.asarray(Image.open(mask)).copy()
    pixels[0, :6] = edges
    Image.fromarray(pixels).save(mask)
    written = prepare_rif(source, tmp_path / "edges")["Drishti-GS"] / "masks/train_gtrain00.png"
    assert np.asarray(Image.open(written))[0, :6].tolist() == [2, 2, 1, 1, 0, 0]
    (source / "Domain3/test/ROIs/mask/Vtest00.png").unlink()
    with pytest.raises(DataError, match=r"site 'REFUGE-train' .*\n.*Vtest00\.png"):
        prepare_rif(source, tmp_path / "out")
    (source / "Domain3").rename(source / "other")
    with pytest.raises(DataError, match=r"Domain1 or site1, .*missing: REFUGE-train"):
        prepare_rif(source, tmp_path / "out")


@pytest.mark.parametrize("raw", [True, False])
def test_messidor2(tmp_path: Path, raw: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        written = prepare_messidor2(messidor2(tmp_path / "s", raw), tmp_path / "out", dealing=Dealing())
    assert "Messidor-2: expected [1017, 270, 347, 75, 35] (sum 1744), found [12, 11, 12, 12, 12]" in caplog.text
    found = lists(written["site-1"])
    people = {split: {e["patient"] for e in own} for split, own in found.items()}
    assert sum(map(len, people.values())) == len(set().union(*people.values())) == 30
    assert sum(map(len, found.values())) == 59  # one is not gradable


def test_messidor2_tables(tmp_path: Path) -> None:
    source = messidor2(tmp_path / "s")
    table = source / "messidor_data.csv"
    text = table.read_text()
    table.write_text(text.replace("adjudicated_dr_grade", "grade"))
    with pytest.raises(
        DataError,
        match=r"grade.*found: image_id, gr.*; or id_code",
    ):
        prepare_messidor2(source, tmp_path / "out")
    table.write_text(text.replace("PP.png,0", "PP.png,5", 1))
    with pytest.raises(DataError, match=r"adjudicated_dr_grade 0 to 4 .*, got '5'"):
        prepare_messidor2(source, tmp_path / "out")


def test_hyperkvasir(tmp_path: Path) -> None:
    source = hyperkvasir(tmp_path / "s")
    written = prepare_hyperkvasir(source, tmp_path / "out", dealing=Dealing(partition="iid", sites=2))
    content = json.loads((written["site-1"] / "datalist.json").read_text())
    assert content["class_names"] == list(HYPERKVASIR)
    assert [len(members) for members in content["class_groups"].values()] == [7, 9, 7]
    for entry in content["training"]:
        assert entry["label"] == int(Path(entry["image"]).stem[:4], 16)
    folder = next((source / "labeled-images").glob("*/*/ileum"))
    folder.rename(folder.with_name("illeum"))
    with pytest.raises(DataError, match="missing: ileum; not known: illeum"):
        prepare_hyperkvasir(source, tmp_path / "x")
    with pytest.raises(DataError, match=r"expected .*labeled-images; found out"):
        prepare_hyperkvasir(tmp_path, tmp_path / "x")


def test_rsna_windows_rescaled_values(tmp_path: Path) -> None:
    from fairflare_lab.sets.special import apply_window

    values = np.array([[-1024, 0, 20], [40, 80, 3000]])
    expected = [[0, 0, 64], [128, 255, 255]]
    file = dicom(tmp_path / "a.dcm", values, "p")
    assert apply_window(file, 40, 80).tolist() == expected
    inverted = dicom(tmp_path / "b.dcm", values, "p", PhotometricInterpretation="MONOCHROME1")
    assert apply_window(inverted, 40, 80).tolist() == [[255, 255, 191], [128, 0, 0]]
    slope = dicom(tmp_path / "c.dcm", values, "p", RescaleSlope=2, RescaleIntercept=-2048)
    assert apply_window(slope, 40, 160).tolist() == [[0, 64, 128], [191, 255, 255]]
    (tmp_path / "d.dcm").write_bytes(b"no DICOM")
    with pytest.raises(DataError, match=r"d\.dcm' .*it is no DICOM file"):
        apply_window(tmp_path / "d.dcm", 40, 80)


def test_rsna_selects_slices_of_one_kind(tmp_path: Path) -> None:
    source = rsna(tmp_path / "s")
    written = prepare_rsna(source, tmp_path / "out", dealing=Dealing(), images=40)
    found = lists(written["site-1"])
    entries = [entry for own in found.values() for entry in own]
    assert Counter(e["label"] for e in entries) == {0: 8, 1: 8, 2: 8, 3: 8, 4: 8}
    for entry in entries:
        number = int(Path(entry["image"]).stem[3:], 16)
        assert number % 21
        assert entry["label"] == number // 2 % 5
        assert "ID_p" not in entry["patient"]
    people = {split: {e["patient"] for e in own} for split, own in found.items()}
    assert sum(map(len, people.values())) == len(set().union(*people.values()))
    again = prepare_rsna(source, tmp_path / "again", dealing=Dealing(), images=40)
    assert lists(again["site-1"]) == found
    other = lists(prepare_rsna(source, tmp_path / "other", dealing=Dealing(), images=40, seed=1)["site-1"])
    first, second = (
        {Path(e["image"]).stem for own in lists_ for e in own} for lists_ in (found.values(), other.values())
    )
    assert len(first) == len(second) == 40
    assert first != second
    images_first = prepare_rsna(source, tmp_path / "i", dealing=Dealing(), split_unit="image", images=None)
    assert "patient" not in lists(images_first["site-1"])["test"][0]
    assert sum(map(len, lists(images_first["site-1"]).values())) == 80
    pictures = prepare_rsna(rsna(tmp_path / "p", pictures=True), tmp_path / "png", dealing=Dealing())
    assert "patient" not in lists(pictures["site-1"])["test"][0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("ID_000000001_epidural,1", "is both 0 and 1"),
        ("ID_000000001_stroke,1", "expected ID_<slice>_<kind>,0 or 1"),
        ("ID_000000001_any,2", "expected ID_<slice>_<kind>,0 or 1"),
    ],
)
def test_rsna_rows(tmp_path: Path, row: str, message: str) -> None:
    source = rsna(tmp_path / "s", 30)
    table = source / "stage_2_train.csv"
    text = table.read_text()
    if "both" in message:
        text = text.replace("ID_000000001_epidural,1", "ID_000000001_epidural,0")
    table.write_text(text + row + "\n")
    with pytest.raises(DataError, match=message):
        prepare_rsna(source, tmp_path / "out")


def test_prostate_says_patient_volume_and_spacing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        written = prepare_prostate_mri(prostate(tmp_path / "s"), tmp_path / "out")
    assert "expected [12, 30, 12, 19, 30, 13] (sum 116), found [5, 5, 5, 5, 5, 5]" in caplog.text
    found = lists(written["BMC"])
    assert {split: len({e["patient"] for e in own}) for split, own in found.items()} == {
        "training": 3, "validation": 1, "test": 1
    }  # fmt: skip
    entry = found["test"][0]
    assert entry["volume"] == entry["patient"]
    assert entry["spacing"] == [0.6, 0.5, 3.0]  # rows, columns, slices
