"""Test datalists and the reading of images and masks."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fairflare.data.datalist import SPLITS, DataError, Sample, load_datalist, write_datalist
from fairflare.data.reading import read_image, read_mask
from fairflare.data.whole_volumes import read_pair


def png(path: Path, array: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(array)).save(path)
    return path


def nifti(path: Path, array: Any) -> Path:
    import nibabel

    nibabel.save(nibabel.Nifti1Image(np.asarray(array), np.diag([-1.0, -1.0, 1.0, 1.0])), path)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write three tiny images with masks, one in each split."""
    splits = {}
    for index, split in enumerate(SPLITS):
        png(tmp_path / f"images/{index}.png", np.full((4, 6), 50 * index, np.uint8))
        png(tmp_path / f"masks/{index}.png", np.eye(4, 6, dtype=np.uint8))
        splits[split] = [{"image": f"images/{index}.png", "label": f"masks/{index}.png"}]
    write_datalist(tmp_path / "datalist.json", splits, name="tiny")
    return tmp_path


def change(root: Path, **values: Any) -> None:
    """Replace top-level keys of the datalist; None removes one."""
    file = root / "datalist.json"
    content = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def refused(root: Path, site: str = "hospital-a", class_labels: bool = False) -> DataError:
    with pytest.raises(DataError) as caught:
        load_datalist(root, site=site, class_labels=class_labels)
    return check_public(caught.value, root, site)


def check_public(error: DataError, root: Path, site: str) -> DataError:
    assert f"site '{site}'" in str(error)
    assert f"site '{site}'" in error.public
    for secret in (str(root), ".png", ".nii", ".npy", "images/", "masks/"):
        assert secret not in error.public
    return error


def test_write_and_load(root: Path) -> None:
    loaded = load_datalist(root, site="a")
    assert {split: len(samples) for split, samples in loaded.splits.items()} == dict.fromkeys(SPLITS, 1)
    assert loaded.splits["test"][0] == Sample(root / "images/2.png", root / "masks/2.png")
    assert not list(root.glob("*.part"))


def test_keys_that_are_nearly_known_are_named(root: Path) -> None:
    """Check that keys of other programs are left alone, and a missing key says what stands in its place."""
    entry = {"image": "images/0.png", "label": "masks/0.png", "fold": 3, "pateint": "p1"}
    change(root, training=[entry])
    assert load_datalist(root, site="a").doubts == (
        "entry 0 of 'training' has the key 'pateint', which is not read; did you mean 'patient'?",
    )
    change(root, training=[{"image": "images/0.png", "lable": "masks/0.png"}])
    assert "every entry needs 'image' and 'label'; did you mean 'lable'?" in str(refused(root))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("unlabeled", "unlabelled"), ("Unlabelled", "unlabelled"), ("Test_dark", "test_dark")],
)
def test_a_list_of_images_that_is_meant_for_one_that_is_absent_is_refused(root: Path, name: str, meant: str) -> None:
    change(root, **{name: [{"image": "images/1.png"}, {"image": "images/2.png"}]})
    error = refused(root)
    assert f"it has '{name}', a list of images (2), which is not read; did you mean '{meant}'" in str(error)
    assert f"'{name}'" not in error.public
    assert f"a list of images has a name that is not read; did you mean '{meant}'" in error.public
    problems: list[DataError] = []
    assert load_datalist(root, site="a", problems=problems).doubts == ()
    assert [one.public for one in problems] == [error.public.replace("hospital-a", "a")]


@pytest.mark.parametrize(
    "name", ["testing", "Training", "train", "val", "labelled", "latest", "validation_fold0", "x_test"]
)
def test_a_list_of_images_beside_those_that_are_read_is_noted(root: Path, name: str) -> None:
    """Check that lists which other programs write beside ours, as MONAI's `testing`, are no reason to refuse a site."""
    change(root, **{name: [{"image": "images/1.png"}]})
    assert load_datalist(root, site="a").doubts == (
        f"the datalist has '{name}', a list of images (1), which is not read",
    )


def test_what_nothing_reads_is_noted_and_keys_of_other_programs_are_not(root: Path) -> None:
    known = {
        "name": "x", "description": "x", "reference": "x", "licence": "x", "release": "1.0", "tensorImageSize": "3D",
        "modality": {"0": "CT"}, "labels": {"0": "background"}, "numTraining": 1, "numTest": 1, "channel_names": {},
    }  # fmt: skip
    entry = {"image": "images/0.png", "label": "masks/0.png"}
    other = {"fold": 0, "age": 63, "site": "b", "size": 4, "image_id": 7}
    change(root, **known, training=[{**entry, **other}])
    assert load_datalist(root, site="a").doubts == ()
    change(root, fold1=[entry], class_name=["x"], Unlabelled=["images/1.png"])
    assert load_datalist(root, site="a").doubts == (
        "the datalist has 'fold1', a list of images (1), which is not read",
        "the datalist has the key 'class_name', which is not read; did you mean 'class_names'?",
        "the datalist has the key 'Unlabelled', which is not read; did you mean 'unlabelled'?",
    )
    change(root, fold1=None, class_name=None, Unlabelled=None, attributes={"age": {"kind": "number", "bins": [50]}})
    assert load_datalist(root, site="a").doubts == (
        "entry 0 of 'training' has the key 'age', which is not read; write it within 'attributes'",
    )


@pytest.mark.parametrize("value", ["true", 1, [True]])
def test_whether_images_are_synthetic_is_true_or_false(root: Path, value: Any) -> None:
    change(root, synthetic=value)
    assert f"'synthetic' must be true or false, got {value!r}" in str(refused(root))


def test_the_list_may_have_another_name_and_a_relative_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "datalist.json").rename(root / "fold2.json")
    monkeypatch.chdir(root.parent)
    loaded = load_datalist(root.name, "fold2.json", site="a")
    assert loaded.splits["training"][0].image == root / "images/0.png"


def test_unknown_split_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^split.* got 'train'"):
        write_datalist(tmp_path / "datalist.json", {"train": []})
    assert not list(tmp_path.iterdir())


def test_missing_folder(tmp_path: Path) -> None:
    error = refused(tmp_path / "nowhere")
    assert "'data_root'" in str(error)
    assert "nowhere" in str(error)


def test_missing_list(tmp_path: Path) -> None:
    error = refused(tmp_path)
    assert "datalist.json' does not exist" in str(error)


def test_malformed_json(root: Path) -> None:
    (root / "datalist.json").write_text('{"training": [')
    assert "not readable JSON" in str(refused(root))
    (root / "datalist.json").write_bytes(b"\xff\xfe\x00")
    assert "not readable JSON" in str(refused(root))
    (root / "datalist.json").write_text("[" * 100_000)
    assert "is not readable JSON (lists within lists without end); correct the file" in str(refused(root))
    (root / "datalist.json").write_text('{"training": [], "test": [], "training": []}')
    assert "('training' stands twice in an object; keep one)" in str(refused(root))


ENTRY = {"image": "images/0.png", "label": "masks/0.png"}


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (None, "key 'training' is missing; needed are 'training', 'validation', 'test', found 'name', 'test'"),
        ({}, "'training' must be a list, got a dict"),
        ([], "split 'training' is empty"),
        (["images/0.png"], "entry 0 of 'training' must be an object"),
        ([ENTRY, {"image": "images/0.png"}], "entry 1 of 'training' has no key 'label'"),
        ([{"label": "masks/0.png"}], "entry 0 of 'training' has no key 'image'"),
        ([{**ENTRY, "label": 3}], "'label' of entry 0 of 'training' must be the path of one file, got a int"),
        ([{**ENTRY, "label": None}], "got nothing"),
        ([{**ENTRY, "image": "images/7.png"}], "7.png', does not exist"),
        ([{**ENTRY, "image": "../images/0.png"}], "'../images/0.png', lies outside data_root"),
        ([{**ENTRY, "label": "/etc/hostname"}], "lies outside data_root"),
        ([{**ENTRY, "label": "datalist.json"}], "has an ending that is not known"),
        ([{**ENTRY, "image": "x" * 5000}], "xxx', cannot be looked at: File name too long; correct the path or take"),
        ([{**ENTRY, "slice": -1}], "'slice' of entry 0 of 'training' must be a whole number >= 0, got -1"),
        ([{**ENTRY, "slice": True}], "got True"),
        ([{**ENTRY, "image": "images/2.png"}], "is in both 'training' and 'test'"),
    ],
)
def test_bad_lists(root: Path, training: Any, message: str) -> None:
    change(root, training=training)
    error = refused(root)
    assert message in str(error)
    assert "datalist.json" in str(error)


def test_top_level_must_be_an_object(root: Path) -> None:
    (root / "datalist.json").write_text("[]")
    assert "the top level must be an object" in str(refused(root))


@pytest.fixture
def elsewhere(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make another folder with the same files."""
    return Path(shutil.copytree(root, tmp_path_factory.mktemp("elsewhere") / "archive"))


@pytest.mark.parametrize("key", ["image", "label"])
def test_a_link_does_not_leave_the_data_folder(root: Path, elsewhere: Path, key: str) -> None:
    for name, target in (("link.png", elsewhere / "images/1.png"), ("folder", elsewhere / "images")):
        (root / name).symlink_to(target)
    for value in ("link.png", "folder/1.png"):
        change(root, training=[{**ENTRY, key: value}])
        error = refused(root)
        assert f"'{key}' of entry 0 of 'training', '{root / value}', is a link to '{elsewhere}/images/1.png'" in str(
            error
        )
        assert "'linked_roots' of the site's fairflare.json" in str(error)
        public = (
            f"site 'hospital-a': the datalist is not usable: '{key}' of entry 0 of 'training' leads out of the data"
        )
        assert error.public.startswith(public)
        assert str(elsewhere) not in error.public
        for roots in ([str(elsewhere)], ["/somewhere", str(elsewhere / "images")], ["/"]):
            loaded = load_datalist(root, site="a", linked_roots=roots)
            assert getattr(loaded.splits["training"][0], key) == root / value
        with pytest.raises(DataError, match="is a link to"):
            load_datalist(root, site="a", linked_roots=[str(elsewhere) + "x", str(elsewhere / "masks")])


def test_a_link_inside_and_a_data_folder_that_is_a_link_are_followed(root: Path, tmp_path: Path) -> None:
    (root / "link.png").symlink_to("images/0.png")
    change(root, training=[{**ENTRY, "image": "link.png"}])
    (tmp_path / "root").symlink_to(root)
    for folder in (root, tmp_path / "root"):
        assert load_datalist(folder, site="a").splits["training"][0].image == folder / "link.png"


def test_the_list_itself_does_not_leave_the_data_folder(root: Path, elsewhere: Path) -> None:
    (root / "datalist.json").unlink()
    (root / "datalist.json").symlink_to(elsewhere / "datalist.json")
    error = refused(root)
    assert f"leads to '{elsewhere}/datalist.json', outside data_root" in str(error)
    assert error.public == "site 'hospital-a': the datalist leads out of the data folder"
    with pytest.raises(DataError, match="leads to"):
        load_datalist(root, f"../{elsewhere.parent.name}/archive/datalist.json", site="a")
    assert load_datalist(root, site="a", linked_roots=[str(elsewhere)]).splits
    assert load_datalist(root, str(elsewhere / "datalist.json"), site="a").splits  # the site's own word
    (root / "datalist.json").unlink()
    (root / "datalist.json").symlink_to("datalist.json")  # to itself
    assert refused(root).public == "site 'hospital-a': the datalist does not exist"


def test_one_image_under_two_names_is_seen(root: Path) -> None:
    (root / "images/copy.png").symlink_to(root / "images/0.png")
    change(root, test=[{**ENTRY, "image": "images/copy.png"}])
    assert "is in both 'training' and 'test'" in str(refused(root))


# --- classes and further test lists -----------------------------------------------------------------------


def class_transforms(root: Path, **splits: Any) -> None:
    """Give the images of ``root`` the classes 0, 1, 2, and add further lists."""
    entries = {split: [{"image": f"images/{n}.png", "label": n}] for n, split in enumerate(SPLITS)}
    write_datalist(root / "datalist.json", {**entries, **splits})


def test_class_labels(root: Path) -> None:
    class_transforms(root)
    loaded = load_datalist(root, site="a", class_labels=True)
    assert loaded.splits["test"] == (Sample(root / "images/2.png", 2),)
    assert [samples[0].label for samples in loaded.splits.values()] == [0, 1, 2]
    error = refused(root)  # a list for classification given to a segmentation task
    assert "'label' of entry 0 of 'training' must be the path of one file, got a int" in str(error)
    with pytest.raises(DataError, match="is labelled with a class, it has no mask") as caught:
        read_mask(loaded.splits["test"][0], site="a", split="test")
    assert check_public(caught.value, root, "a").public == "site 'a': an image of split 'test' has no mask"


@pytest.mark.parametrize("label", [-1, True, 1.0, "1", "masks/0.png", None, [1]])
def test_a_label_that_is_no_class_number(root: Path, label: Any) -> None:
    class_transforms(root)
    change(root, validation=[{"image": "images/1.png", "label": label}])
    error = refused(root, class_labels=True)
    wanted = f"must be the number of a class (a whole number >= 0), got {label!r}"
    assert f"'label' of entry 0 of 'validation' {wanted}" in str(error)
    assert error.public.endswith("'label' of entry 0 of 'validation' is not the number of a class")
    assert ("--task segmentation" in error.public) == isinstance(label, str), "a path may be that of a mask"


def test_a_class_label_is_needed(root: Path) -> None:
    class_transforms(root)
    change(root, training=[{"image": "images/0.png"}])
    assert "entry 0 of 'training' has no key 'label'" in str(refused(root, class_labels=True))


@pytest.mark.parametrize("class_labels", [True, False])
def test_further_test_lists(root: Path, class_labels: bool) -> None:
    """Check the order of names; images of further lists may be in several of them."""
    label: Any = 1 if class_labels else "masks/0.png"
    png(root / "images/dark.png", np.zeros((4, 6), np.uint8))
    dark = [{"image": "images/dark.png", "label": label}, {"image": "images/2.png", "label": label}]
    lists = {split: [{"image": f"images/{n}.png", "label": label}] for n, split in enumerate(SPLITS)}
    write_datalist(root / "datalist.json", {"test_dark": dark, "test_b-2": dark[1:], **lists}, name="tiny")
    assert list(json.loads((root / "datalist.json").read_text())) == ["name", *SPLITS, "test_b-2", "test_dark"]
    loaded = load_datalist(root, site="a", class_labels=class_labels)
    assert list(loaded.splits) == [*SPLITS, "test_b-2", "test_dark"]
    assert [sample.image.name for sample in loaded.splits["test_dark"]] == ["dark.png", "2.png"]


@pytest.mark.parametrize("number", [0, 1])
def test_an_image_of_training_or_validation_is_in_no_further_test_list(root: Path, number: int) -> None:
    class_transforms(root, test_dark=[{"image": f"images/{number}.png", "label": 0}])
    error = refused(root, class_labels=True)
    assert f"is in both '{SPLITS[number]}' and 'test_dark'" in str(error)
    assert error.public.endswith(f"an image is in both '{SPLITS[number]}' and 'test_dark'")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("test_dark", [], "split 'test_dark' is empty"),
        ("test_dark", "images/2.png", "'test_dark' must be a list, got a str"),
        ("test_dark", [{"image": "images/7.png", "label": 0}], "7.png', does not exist"),
        ("test_", [], "'test_' must be 'test_' and a name of letters, digits, '-' and '_'"),
        ("test_a/b", [], "'test_a/b' must be 'test_' and a name"),
    ],
)
def test_bad_further_test_lists(root: Path, key: str, value: Any, message: str) -> None:
    class_transforms(root)
    change(root, **{key: value})
    assert message in str(refused(root, class_labels=True))


@pytest.mark.parametrize("name", ["test_", "test_a/b", "tests"])
def test_a_further_test_list_of_another_name_is_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"split must be one of .* got '{name}'"):
        write_datalist(tmp_path / "datalist.json", {name: []})


def test_data_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(DataError("site 'a': '/x.png' is broken", "site 'a': an image is broken")))
    assert (type(error), str(error), error.public) == (
        DataError, "site 'a': '/x.png' is broken", "site 'a': an image is broken"
    )  # fmt: skip
    assert "/x.png" not in DataError("'/x.png'").public


# --- files ------------------------------------------------------------------------------------------------


def image_of(path: Path, number: int | None = None) -> np.ndarray:
    return read_image(Sample(path, path, number), site="a", split="test")


def mask_of(path: Path, number: int | None = None) -> np.ndarray:
    return read_mask(Sample(path, path, number), site="a", split="test")


def test_eight_bit_pictures_are_divided_by_255(tmp_path: Path) -> None:
    grey = np.array([[0, 51, 102], [153, 204, 255]], np.uint8)
    read = image_of(png(tmp_path / "a.png", grey))
    assert read.dtype == np.float32
    assert read.shape == (2, 3, 1)
    np.testing.assert_allclose(read[:, :, 0], grey / 255, rtol=1e-6)
    colour = np.stack([grey, grey // 2, grey // 3], axis=-1)
    np.testing.assert_allclose(image_of(png(tmp_path / "b.png", colour)), colour / 255, rtol=1e-6)
    np.save(tmp_path / "c.npy", colour.transpose(2, 0, 1))
    small = image_of(tmp_path / "c.npy")
    assert small.shape == (3, 2, 3)  # too small to tell: channels last
    np.save(tmp_path / "d.npy", np.tile(colour, (4, 4, 1)).transpose(2, 0, 1))
    np.testing.assert_allclose(image_of(tmp_path / "d.npy"), np.tile(colour, (4, 4, 1)) / 255, rtol=1e-6)


def test_palette_and_alpha(tmp_path: Path) -> None:
    picture = Image.fromarray(np.array([[0, 1], [2, 1]], np.uint8), "P")
    picture.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    picture.save(tmp_path / "p.png")
    assert mask_of(tmp_path / "p.png").tolist() == [[0, 1], [2, 1]]
    assert image_of(tmp_path / "p.png")[0].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert image_of(png(tmp_path / "rgba.png", np.full((2, 2, 4), 255, np.uint8))).shape == (2, 2, 3)


def test_other_numbers_are_clipped_at_the_99th_percentile(tmp_path: Path) -> None:
    values = np.arange(101, dtype=np.float32).reshape(1, 101) - 20.0  # 99th percentile of -20..80 is 79
    np.save(tmp_path / "a.npy", values)
    read = image_of(tmp_path / "a.npy")[0, :, 0]
    np.testing.assert_allclose(read[[0, 33, 99, 100]], [0, 33 / 99, 1, 1], rtol=1e-6)
    np.save(tmp_path / "flat.npy", np.full((3, 3), 7.0))
    assert not image_of(tmp_path / "flat.npy").any()
    rare = np.zeros((20, 20))
    rare[0, 0] = 4.0  # the percentile is the minimum here
    np.save(tmp_path / "rare.npy", rare)
    assert image_of(tmp_path / "rare.npy").max() == 1.0
    deep = png(tmp_path / "deep.png", np.array([[0, 1000], [2000, 4000]], np.uint16))
    assert image_of(deep)[0, 0, 0] == 0
    assert 0 < image_of(deep)[0, 1, 0] < 1


def test_nifti_in_two_and_three_dimensions(tmp_path: Path) -> None:
    flat = np.arange(12, dtype=np.float32).reshape(4, 3)  # 4 columns (x), 3 rows (y)
    for name, array in (("a.nii.gz", flat), ("b.nii", flat[:, :, None])):
        read = image_of(nifti(tmp_path / name, array))
        assert read.shape == (3, 4, 1)
        assert read[0, 0, 0] == 0
        assert read[2, 0, 0] > read[1, 0, 0] > 0
    volume = np.stack([flat, flat + 12, flat + 24], axis=2)
    path = nifti(tmp_path / "v.nii.gz", volume)
    assert image_of(path, 2)[0, 0, 0] == pytest.approx(24 / np.percentile(volume, 99))
    assert mask_of(path, 1).tolist() == (flat + 12).T.astype(int).tolist()
    with pytest.raises(DataError, match=r"volume of 3 slices; .*'slice'"):
        image_of(path)
    with pytest.raises(DataError, match="'slice' is 3, but it has 3 slices"):
        image_of(path, 3)


def test_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    assert mask_of(png(tmp_path / "a.png", np.zeros((2, 2), np.uint8))).max() == 0
    assert mask_of(png(tmp_path / "a.png", np.full((9, 9), 1, np.uint8))).max() == 1


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code in data was run",))


def test_unreadable_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"not a picture")
    whole = png(tmp_path / "whole.png", np.random.default_rng(0).integers(0, 255, (64, 64)).astype(np.uint8))
    (tmp_path / "cut.png").write_bytes(whole.read_bytes()[:800])
    (tmp_path / "a.nii.gz").write_bytes(b"not a volume")
    np.save(tmp_path / "object.npy", np.array([[Harmful()]], dtype=object), allow_pickle=True)
    np.save(tmp_path / "text.npy", np.array([["a", "b"]]))
    np.save(tmp_path / "line.npy", np.zeros(5, np.uint8))
    np.save(tmp_path / "empty.npy", np.zeros((0, 5), np.uint8))
    np.save(tmp_path / "block.npy", np.zeros((9, 9, 9), np.uint8))
    for name in ("a.png", "cut.png", "a.nii.gz", "object.npy", "text.npy", "line.npy", "empty.npy", "block.npy"):
        with pytest.raises(DataError, match=name) as caught:
            image_of(tmp_path / name)
        assert "Repair the file or take it out" in str(caught.value)
        assert check_public(caught.value, tmp_path, "a").public == "site 'a': an image of split 'test' cannot be read"
    np.save(tmp_path / "nan.npy", np.array([[0.0, np.nan]]))
    with pytest.raises(DataError, match=r"nan.npy.*NaN or infinite"):
        image_of(tmp_path / "nan.npy")
    with pytest.raises(DataError, match="'slice' was given"):
        image_of(whole, 3)


def test_unusable_masks(tmp_path: Path) -> None:
    np.save(tmp_path / "half.npy", np.array([[0.0, 0.5]]))
    with pytest.raises(DataError, match="not whole numbers"):
        mask_of(tmp_path / "half.npy")
    colour = np.zeros((2, 2, 3), np.uint8)
    assert mask_of(png(tmp_path / "grey.png", colour)).shape == (2, 2)
    colour[0, 0, 1] = 9
    with pytest.raises(DataError, match="colour image") as caught:
        mask_of(png(tmp_path / "colour.png", colour))
    assert caught.value.public == "site 'a': a mask of split 'test' cannot be read"


def test_image_and_mask_must_be_of_one_size(root: Path) -> None:
    png(root / "masks/0.png", np.zeros((6, 4), np.uint8))
    sample = load_datalist(root, site="a").splits["training"][0]
    with pytest.raises(DataError, match=r"it is 4x6 .*, its image 6x4") as caught:
        read_pair(sample, site="a", split="training")
    public = "site 'a': an image of split 'training' and its mask do not go together: image and mask differ in size"
    assert check_public(caught.value, root, "a").public == public


# --- patients, volumes, spacing, groups -------------------------------------------------------------------


def with_keys(root: Path, **more: Any) -> None:
    """Return the three entries with more keys; a list gives each entry its own value."""
    content = json.loads((root / "datalist.json").read_text())
    for index, split in enumerate(SPLITS):
        content[split][0].update({k: v[index] if isinstance(v, list) else v for k, v in more.items()})
    (root / "datalist.json").write_text(json.dumps(content))


def test_optional_keys(root: Path) -> None:
    with_keys(root, patient=["p1", 2, "p3"], volume="v", spacing=[[0.5, 0.5], [1, 1, 3], None])
    splits = load_datalist(root, site="a").splits
    assert [splits[split][0].patient for split in SPLITS] == ["p1", "2", "p3"]
    assert splits["training"][0].volume == "v"
    assert [splits[split][0].spacing for split in SPLITS] == [(0.5, 0.5), (1.0, 1.0, 3.0), None]
    assert "p1" not in repr(splits["training"][0])


def test_a_patient_in_two_splits(root: Path) -> None:
    with_keys(root, patient=["anna", "berta", "anna"])
    error = refused(root)
    assert "patient 'anna' is in both 'training' and 'test'" in str(error)
    assert error.public.endswith("a patient is in both 'training' and 'test'")
    assert "anna" not in error.public


def test_a_patient_in_two_test_lists(root: Path) -> None:
    with_keys(root, patient=["anna", "berta", "carla"])
    content = json.loads((root / "datalist.json").read_text())
    change(root, test_dark=content["test"])
    assert load_datalist(root, site="a").splits["test_dark"][0].patient == "carla"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"patient": ""}, "'patient' of entry 0 of 'training' must be a text or a whole number"),
        ({"patient": 1.5}, "got a float"),
        ({"volume": True}, "'volume' of entry 0 of 'training' must be a text"),
        ({"spacing": 1}, "'spacing' of entry 0 of 'training' must be the size of a pixel in mm"),
        ({"spacing": [[0, 1]] * 3}, r"2 or 3 numbers > 0 \(rows, columns, slices\), got \[0, 1\]"),
        ({"spacing": [[1, float("nan")]] * 3}, "'spacing' of entry 0"),
        ({"spacing": [[1, 10**400]] * 3}, "'spacing' of entry 0"),
    ],
)
def test_bad_keys(root: Path, more: dict[str, Any], message: str) -> None:
    with_keys(root, **more)
    error = refused(root)
    assert re.search(message, str(error))


def test_class_groups(root: Path) -> None:
    class_transforms(root)
    change(root, class_names=["a", "b", "c"], class_groups={"head": [1], "tail": [0, 2]})
    assert load_datalist(root, site="a", class_labels=True).class_groups == {"head": (1,), "tail": (0, 2)}
    for groups in ([1], {"": [0]}, {"head": []}, {"head": [3]}, {"head": ["a"]}, {"head": 1}):
        change(root, class_groups=groups)
        assert "'class_groups' must name lists" in str(refused(root, class_labels=True))


def test_all_problems_of_a_list(root: Path) -> None:
    with_keys(root, patient="anna")
    content = json.loads((root / "datalist.json").read_text())
    change(root, training=[*content["training"], {"image": "images/none.png", "label": 1}, 3], validation=[])
    found: list[DataError] = []
    loaded = load_datalist(root, site="a", problems=found)
    assert [len(loaded.splits[split]) for split in SPLITS] == [1, 0, 1]
    assert len(found) == 4
    for error, part in zip(found, ("none.png", "must be an object", "is empty", "patient 'anna'"), strict=True):
        assert part in str(error)
        check_public(error, root, "a")
