"""Skin lesions: ISIC 2018 (task 3), ISIC 2019, its six centres after FLamby, and its skin tones after a CSV file."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairflare.base.for_types import Unpack
from fairflare.data.datalist import DataError
from fairflare.data.partitions import iid_partition
from fairflare.data.phantoms.dermoscopy import ISIC2018, ISIC2018_COUNTS, ISIC2019, ISIC2019_COUNTS
from fairflare.data.preparers.common import Dealing, Item, Preparer, Writing, file_name, listing, write_pool
from fairflare.data.preparers.listed import attributes_of
from fairflare.data.preparers.options import option
from fairflare.data.preparers.splitting import group_labels
from fairflare.data.preparers.tables import Images, find_below, find_folder, find_table, one_hot, read_table, say_counts

log = logging.getLogger(__name__)

FEDMRL = Dealing(partition="shards", sites=4, eta=1.0, global_test=True, fractions=(0.72, 0.08, 0.2))
FEDISM = Dealing(
    partition="two-pool", sites=20, alpha=1.0, corrupt="gaussian_noise:3", corrupt_sites=4, common_test=True,
    fractions=(0.72, 0.08, 0.2), size=224,
)  # fmt: skip
BY_CENTRE = Dealing(global_test=True, fractions=(0.72, 0.08, 0.2))
BY_TONE = Dealing(common_test=True, fractions=(0.7, 0.15, 0.15))
CENTRES = ("BCN", "vidir_molemax", "vidir_modern", "rosendahl", "MSK", "vienna_dias")
CENTRE_COUNTS = (12413, 3954, 3363, 2259, 819, 439)  # training and test together
INPUT_2018, TRUTH_2018 = "ISIC2018_Task3_Training_Input", "ISIC2018_Task3_Training_GroundTruth.csv"
LESIONS_2018 = "ISIC2018_Task3_Training_LesionGroupings.csv"
INPUT_2019, TRUTH_2019 = "ISIC_2019_Training_Input", "ISIC_2019_Training_GroundTruth.csv"
META_2019 = "ISIC_2019_Training_Metadata.csv"
HAM10000 = "HAM10000_metadata.csv"  # of the same images, where somebody put it below the source
AGES = "40,60"  # inner edges of the groups of age, in years
KEYS = "Lesions are read from {}, which may lie anywhere below the source"
FOLDS = ("train_test_split", "train_test_split.csv", "train_test_folds.csv")


def prepare_isic2018(
    source_dir: str | Path, out_dir: str | Path, *, dealing: Dealing = FEDMRL, **writing: Unpack[Writing]
) -> dict[str, Path]:
    """ISIC 2018 task 3: seven classes, 10,015 images. Default: FedMRL's four sites by shards.

    Args:
        source_dir: with ``ISIC2018_Task3_Training_Input/``, the ground truth (in a folder of its name, or not) and,
            where it is there, ``ISIC2018_Task3_Training_LesionGroupings.csv``: images of one lesion then stay together.
            Sex and age of the patients are attributes where ``HAM10000_metadata.csv`` lies below it.
        out_dir: folder to write to.
        dealing: how the images become those of sites.
        writing: see :func:`fairflare.data.preparers.common.write_sites`.
    """
    source = Path(source_dir)
    truth = find_table(source, [f"{TRUTH_2018[:-4]}/{TRUTH_2018}", TRUTH_2018])
    lesions = _lesions(source, LESIONS_2018)
    items = _items(find_folder(source, [INPUT_2018]), truth, ISIC2018, lesions)
    say_counts("ISIC 2018", [item.mask for item in items], ISIC2018_COUNTS)
    declared, items = _with_people(items, source, HAM10000, "image_id", {"sex": "sex", "age": f"age:{AGES}"})
    form: dict[str, Any] = {"class_names": ISIC2018, "keys": KEYS.format(LESIONS_2018), "attributes": declared}
    return write_pool(items, out_dir, dealing, **form, **writing)


def prepare_isic2019(
    source_dir: str | Path, out_dir: str | Path, *, dealing: Dealing = FEDISM, **writing: Unpack[Writing]
) -> dict[str, Path]:
    """ISIC 2019: eight classes, 25,331 images. Default: FedISM's twenty sites in two pools, four of them corrupted.

    Args:
        source_dir: with ``ISIC_2019_Training_Input/`` (also nested twice), ``ISIC_2019_Training_GroundTruth.csv`` and,
            where it is there, ``ISIC_2019_Training_Metadata.csv``: images of one lesion then stay together, and sex
            and age of the patients are attributes.
        out_dir, dealing, writing: as in :func:`prepare_isic2018`.
    """
    items = _isic2019(Path(source_dir))
    say_counts("ISIC 2019", [item.mask for item in items], ISIC2019_COUNTS)
    return _write_2019(items, Path(source_dir), out_dir, dealing, **writing)


def prepare_flamby(
    source_dir: str | Path, out_dir: str | Path, *, dealing: Dealing = BY_CENTRE, **writing: Unpack[Writing]
) -> dict[str, Path]:
    """FLamby's Fed-ISIC2019: 23,247 images of six centres, with its own training and test images.

    Args:
        source_dir: with ``ISIC_2019_Training_Input_preprocessed/`` (or ``ISIC_2019_Training_Input/``) and FLamby's
            ``train_test_split`` (columns image, target, center, fold).
        out_dir, writing: as in :func:`prepare_isic2018`.
        dealing: as there; with folds FLamby's own split is not used.
    """
    source = Path(source_dir)
    table = find_table(source, FOLDS)
    rows = read_table(table, ["image", "target", "center", "fold"])
    paths = Images(find_folder(source, [f"{INPUT_2019}_preprocessed", INPUT_2019])).all(
        [r["image"] for r in rows], table
    )
    lesions = _lesions(source, META_2019)
    items = []
    for row, path in zip(rows, paths, strict=True):
        centre, target = _number(row["center"], len(CENTRES)), _number(row["target"], len(ISIC2019))
        if centre is None or target is None or row["fold"] not in ("train", "test"):
            raise DataError(
                f"{row.where}: expected center 0 to 5, target 0 to 7 and fold train or test, got {dict(row)}"
            )
        splits = ("test",) if row["fold"] == "test" and not dealing.folds else ()
        items.append(_item(row["image"], path, target, lesions, site=CENTRES[centre], splits=splits))
    items = _by_given_split(items)
    say_counts("Fed-ISIC2019 by centre", [CENTRES.index(item.site) for item in items], CENTRE_COUNTS)
    items.sort(key=lambda item: CENTRES.index(item.site))
    return _write_2019(items, source, out_dir, dealing, **writing)


def prepare_tones(
    source_dir: str | Path, out_dir: str | Path, *, tones: str | Path, sites_per_tone: int = 2,
    dealing: Dealing = BY_TONE, **writing: Unpack[Writing],
) -> dict[str, Path]:  # fmt: skip
    """ISIC 2019 by skin tone (Fed-MAS): two tones at two sites each, 70:15:15, all sites' tests in common by tone.

    Args:
        source_dir: as for :func:`prepare_isic2019`.
        out_dir, dealing, writing: as in :func:`prepare_isic2018`.
        tones: CSV file with image and skin_tone (light or dark), below the source folder or an absolute path; not part
            of the data set. Images that it does not name are left out.
        sites_per_tone: to which the images of a tone are dealt alike.
    """
    source = Path(source_dir)
    table = read_table(source / tones, ["image", "skin_tone"])
    tone_of = {Path(row["image"]).stem: row["skin_tone"].lower() for row in table}
    strange = sorted(set(tone_of.values()) - {"light", "dark"})
    if strange:
        raise DataError(f"'{source / tones}': the skin tones are {listing(strange)}; expected light, dark")
    items = [item for item in _isic2019(source) if item.name in tone_of]
    by_lesion: dict[str, Counter[str]] = {}
    for item in items:
        by_lesion.setdefault(item.group, Counter())[tone_of[item.name]] += 1
    torn = sum(len(tones) > 1 for tones in by_lesion.values())
    if torn:
        log.warning("%d lesions have images of both tones; each counts as the tone of most of its images", torn)
    of = {lesion: min(counts, key=lambda tone: (-counts[tone], tone)) for lesion, counts in by_lesion.items()}
    found = []
    for tone in ("light", "dark"):
        own = [item for item in items if of[item.group] == tone]
        if not own:
            raise DataError(f"'{source / tones}': no image of the data set is {tone}")
        groups, labels = group_labels(own)
        parts = iid_partition(labels, sites_per_tone, seed=writing.get("seed", 0))
        place = {groups[i]: number + 1 for number, part in enumerate(parts) for i in part.tolist()}
        found += [replace(item, site=f"{tone}-{place[item.group]}", attribute=tone) for item in own]
    return _write_2019(found, source, out_dir, dealing, **writing)


def _write_2019(
    items: Sequence[Item], source: Path, out_dir: str | Path, dealing: Dealing, **writing: Unpack[Writing]
) -> dict[str, Path]:
    columns = {"sex": "sex", "age": f"age_approx:{AGES}"}
    declared, items = _with_people(items, source, META_2019, "image", columns)
    form: dict[str, Any] = {"class_names": ISIC2019, "keys": KEYS.format(META_2019), "attributes": declared}
    return write_pool(items, out_dir, dealing, **form, **writing)


def _with_people(
    items: Sequence[Item], source: Path, name: str, key: str, columns: Mapping[str, str]
) -> tuple[dict[str, Any], list[Item]]:
    """Sex and age of the patients where the table of the data set is there and has these columns; else nothing."""
    file = find_below(source, name)
    rows = read_table(file, [key]) if file is not None else []
    wanted = {of: told for of, told in columns.items() if rows and told.partition(":")[0] in rows[0]}
    declared, people = attributes_of(wanted, rows, "")
    of = {row[key]: person for row, person in zip(rows, people, strict=True)}
    declared = {of_whom: told for of_whom, told in declared.items() if told.get("values") != []}
    return declared, [replace(item, attributes=_of(of.get(item.name, {}), declared)) for item in items]


def _of(person: Mapping[str, str | float], declared: Mapping[str, Any]) -> dict[str, str | float]:
    return {name: value for name, value in person.items() if name in declared}


def _isic2019(source: Path) -> list[Item]:
    truth = find_table(source, [TRUTH_2019, f"{TRUTH_2019[:-4]}/{TRUTH_2019}"])
    return _items(find_folder(source, [INPUT_2019]), truth, ISIC2019, _lesions(source, META_2019))


def _lesions(source: Path, name: str) -> Mapping[str, str]:
    """The lesion of each image; nothing where the file is not there."""
    file = find_below(source, name)
    if file is None:
        return {}
    return {row["image"]: row["lesion_id"] for row in read_table(file, ["image", "lesion_id"]) if row["lesion_id"]}


def _items(folder: Path, truth: Path, names: Sequence[str], lesions: Mapping[str, str]) -> list[Item]:
    rows = read_table(truth, ["image", *names])
    paths = Images(folder).all([row["image"] for row in rows], truth)
    labels = one_hot(truth, rows, names)
    return [_item(r["image"], path, label, lesions) for r, path, label in zip(rows, paths, labels, strict=True)]


def _item(
    name: str, path: Path, label: int, lesions: Mapping[str, str], site: str = "", splits: tuple[str, ...] = ()
) -> Item:
    lesion = lesions.get(name)
    return Item(file_name(name), lesion or name, path, label, lesion, site, splits)


def _by_given_split(items: Sequence[Item]) -> list[Item]:
    """A lesion with images on both sides of the given split does not hold its images together."""
    sides: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for item in items:
        sides.setdefault((item.site, item.group), set()).add(item.splits)
    torn = {key for key, found in sides.items() if len(found) > 1}
    if torn:
        log.warning("FLamby's split has images of %d lesions in training and in test", len(torn))
    return [replace(item, group=item.name, patient=None) if (item.site, item.group) in torn else item for item in items]


def _number(text: str, below: int) -> int | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() and 0 <= number < below else None


TONE_OPTIONS = (
    option("tones", str, "Columns image, skin_tone (light or dark).", metavar="CSV"),
    option("sites_per_tone", int, "How many.", 2),
)
PREPARERS = (
    Preparer("isic2018", "skin lesions, 7 classes (ISIC 2018 task 3)", prepare_isic2018, dealing=FEDMRL),
    Preparer("isic2019", "skin lesions, 8 classes (ISIC 2019)", prepare_isic2019, dealing=FEDISM),
    Preparer("isic2019-flamby", "ISIC 2019 by FLamby's six centres", prepare_flamby, dealing=BY_CENTRE),
    Preparer("isic2019-tones", "ISIC 2019 by skin tone", prepare_tones, TONE_OPTIONS, dealing=BY_TONE),
)
