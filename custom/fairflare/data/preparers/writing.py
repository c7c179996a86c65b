"""Write all sites or none: images, datalists, checksums, the ``fairflare.json`` of a simulator, a manifest."""

from __future__ import annotations

import json
import logging
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain, product
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

from typing_extensions import Unpack

from fairflare import __version__
from fairflare.base.cases.census import KEYS
from fairflare.base.checks import refuse, whole
from fairflare.base.disk.files import sha256_of
from fairflare.base.task import SPLIT_GLOBAL
from fairflare.data.datalist import SPLITS, DataError, load_datalist, write_datalist
from fairflare.data.preparers.dealing import Dealing, corrupted_sites, deal
from fairflare.data.preparers.draft import Draft, open_draft
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.names import file_name, site_names
from fairflare.data.preparers.splitting import assign, frequency_groups

NO_KEY = (
    "{} of {} images have no key of a patient (lesion, examination): images of one may be in training and in test, and "
    "at two sites. {}"
)
SITE_FILE, MANIFEST = "fairflare.json", "manifest.json"
CHECKSUMS = "checksums.sha256"  # file with the checksums of a site's files, for sha256sum -c
PACKAGES = ("numpy", "pillow", "scikit-learn", "nibabel")

log = logging.getLogger(__name__)

Split: TypeAlias = dict[str, list[Item]]


class Writing(TypedDict, total=False):
    """Describe the keyword arguments for writing sites that all preparers share, see :func:`write_sites`."""

    seed: int
    number: bool
    overwrite: bool
    progress: Callable[[int], None]
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """Describe how images are split, and what datalists and manifest contain beside the images.

    Attributes:
        class_names: names of all classes.
        stratified: whether each class is split in the same shares.
        dealing: rule by which the images were dealt: shares of the splits, folds, corrupted sites, global test.
        label_noise: share of wrong training labels by site, for the manifest.
        class_groups: classes of the groups head, medium and tail; None to form them by the numbers of training images
            of all sites.
        synthetic: whether the images are synthetic.
        keys: source of the patients' identifiers, in words, for the note on images without an identifier.
        attributes: declared attributes of the people, as in a datalist.
        task: settings of the task for these images that differ from the defaults, for the manifest and the screen.
        notes: notes for the manifest and the log.
        mask_labels: name of each value of the masks, as in a datalist.
    """

    class_names: Sequence[str] | None = None
    stratified: bool = False
    dealing: Dealing = field(default_factory=Dealing)
    label_noise: Mapping[str, float] = field(default_factory=dict)
    class_groups: Mapping[str, Sequence[int]] | None = None
    synthetic: bool = False
    keys: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    mask_labels: Mapping[str, str | None] = field(default_factory=dict)


def write_pool(
    items: Sequence[Item], out_dir: str | Path, dealing: Dealing, settings: Mapping[str, Any] | None = None,
    form: Form | None = None, **writing: Unpack[Writing],
) -> dict[str, Path]:  # fmt: skip
    """Deal the images to sites, and write the sites by :func:`write_sites`; dealt images are split class by class."""
    sites = deal(items, dealing, whole("seed", writing.get("seed", 0), low=0))
    form = form or Form()
    dealt = replace(form, dealing=dealing, stratified=form.stratified or dealing.partition != "site")
    return write_sites(sites, out_dir, settings, dealt, **writing)


def write_sites(
    sites: Mapping[str, Iterable[Item]],
    out_dir: str | Path,
    settings: Mapping[str, Any] | None = None,
    form: Form | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Write a folder with a datalist for each site, ``fairflare.json`` and a manifest: all or nothing.

    All files are written to a hidden folder first and then moved into place; if that fails, the result of an earlier
    call is put back.

    Args:
        sites: images of each site.
        out_dir: folder to write to.
        settings: further settings for every site in ``fairflare.json``.
        form: splits of the images, and further content of the datalists.
        seed: random seed of the split; default 0.
        number: call the sites ``site-1``, ``site-2``, ... instead of by their names.
        overwrite: replace the result of an earlier call.
        progress: function that is called with the number of files written so far.
        record: facts about the call for the manifest: ``preparer`` and ``options``.

    Returns:
        Folder of each site.

    Raises:
        DataError: the source files are not as expected, or existing files would be overwritten.
    """
    refuse({"at least one site is needed": not sites})
    form = form or Form()
    seed = whole("seed", writing.get("seed", 0), low=0)
    out = Path(out_dir).expanduser().absolute()
    names = site_names(sites, writing.get("number", False))
    targets = {name: out / name for name in names.values()}
    with open_draft(out, writing.get("progress", lambda done: None)) as draft:
        earlier = _sites_in(out / SITE_FILE)
        existing = _find_replaced(out, list(targets.values()), writing.get("overwrite", False))
        items = {
            site: [draft.put(names[site], item) for item in _different(site, items_of_site)]
            for site, items_of_site in sites.items()
        }
        draft.finish()
        result = _Result(draft, form, names, items)
        result.write_datalists(seed)
        result.write_manifest({"seed": seed, **writing.get("record", {})})
        # In a data set that was dealt to sites, every structure or class was annotated in all images, whichever site
        # gets them.
        more = {KEYS[bool(result.classes)]: "all"} if form.dealing.partition != "site" or form.synthetic else {}
        if lost := [
            f"{site}: {key} {settings[key]}"
            for site, settings in earlier.items()
            for key in {*settings}.intersection(KEYS.values()).difference(more)
        ]:
            log.warning(
                "what the earlier %s said is annotated is not kept; write it again: %s", SITE_FILE, "; ".join(lost)
            )
        for fold in range(form.dealing.folds + 1):
            file = {"datalist": f"datalist_fold{fold}.json"} if fold else {}
            _write_json(draft.new / (f"fairflare_fold{fold}.json" if fold else SITE_FILE), {"sites": {
                name: {"data_root": str(target), **more, **(settings or {}), **file} for name, target in targets.items()
            }})  # fmt: skip
        _move([
            *((path, draft.old / path.name) for path in existing),
            *((path, out / path.name) for path in sorted(draft.new.iterdir())),
        ])  # fmt: skip
    return targets


def _find_replaced(out: Path, targets: Sequence[Path], overwrite: bool) -> list[Path]:
    """Return existing files and folders that the new result replaces; raise ``DataError`` unless ``overwrite``."""
    foreign = [path for path in targets if path.exists() and not (path / "datalist.json").is_file()]
    named = (out / name for name in map(str, _sites_in(out / MANIFEST)) if file_name(name) == name)
    earlier = [folder for folder in named if (folder / "datalist.json").is_file()]
    paths = [*targets, *earlier, out / SITE_FILE, out / MANIFEST, *out.glob("fairflare_fold*.json")]
    existing = [path for path in dict.fromkeys(paths) if path.exists()]
    refuse({
        f"'{next(iter(existing), '')}' is there already; choose another folder, or overwrite it (--overwrite)":
            existing and not overwrite,
        f"'{next(iter(foreign), '')}' is not a folder with a datalist.json, so it is not overwritten; move it away":
            foreign,
    }, DataError)  # fmt: skip
    return existing


def _sites_in(file: Path) -> dict[str, Any]:
    """Return the sites of an earlier result by its manifest or site file; nothing if that cannot be read."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["sites"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _move(moves: Sequence[tuple[Path, Path]]) -> None:
    """Rename all given paths or none: if one renaming fails, undo the earlier ones."""
    with ExitStack() as undo:
        for here, there in moves:
            here.rename(there)
            undo.callback(there.rename, here)
        undo.pop_all()


class _Result:
    """Write datalists and summaries for images already written: ``items`` by site, with paths below its folder."""

    def __init__(self, draft: Draft, form: Form, names: Mapping[str, str], items: Mapping[str, Sequence[Item]]) -> None:
        self.draft, self.form, self.names, self.items = draft, form, names, items
        self.counts: dict[str, dict[str, Counter[str]]] = {}  # number of images by site, split and class
        written = [item for items_of_site in items.values() for item in items_of_site]
        numbers = [item.mask for item in written if isinstance(item.mask, int)]
        self.findings = bool(form.task.get("findings"))
        classed = self.findings or (numbers and len(numbers) == sum(item.mask is not None for item in written))
        # Class names in the order of their numbers; empty if the labels are masks.
        self.classes = list(form.class_names or [f"class_{n}" for n in range(max(numbers) + 1)]) if classed else []
        people = [item.patient for item in written if not item.shared]
        self.notes = list(form.notes)
        if form.keys and None in people:
            self.notes.append(NO_KEY.format(people.count(None), len(people), form.keys))

    def write_datalists(self, seed: int) -> None:
        """Write the datalists of each site, one for each fold, and check them by reading them as the site would."""
        form = self.form
        rule = form.dealing
        channels = {site: one_set(site, items_of_site) for site, items_of_site in self.items.items()}
        how: dict[str, Any] = {"seed": seed, "fractions": rule.fractions, "stratified": form.stratified}
        splits = {
            site: assign(items_of_site, site=site, folds=rule.folds, **how)
            for site, items_of_site in self.items.items()
        }
        for fold in range(rule.folds or 1):
            lists = {
                site: {
                    split: [
                        item
                        for item, splits_of_item in zip(items, splits[site][fold], strict=True)
                        if split in splits_of_item
                    ]
                    for split in dict.fromkeys(chain(SPLITS, *splits[site][fold]))
                }
                for site, items in self.items.items()
            }
            if rule.global_test:
                lists = self._add_global_test(lists)
            entries = {
                site: {
                    split: [entry for item in items for entry in _entries(item, split)]
                    for split, items in by_split.items()
                }
                for site, by_split in lists.items()
            }
            several = any(len(names) > 1 for names in channels.values())
            more = {
                "synthetic": form.synthetic, **(self._classes(entries) if self.classes else {}),
                "mask_labels": form.mask_labels, "attributes": form.attributes,
            }  # fmt: skip
            files = [f"datalist_fold{fold + 1}.json"] if rule.folds else []
            for site, file in product(entries, [*files, "datalist.json"] if fold == 0 else files):
                folder = self.draft.new / self.names[site]
                extra = {**more, "channels": [*channels[site]] if several else None}
                write_datalist(
                    folder / file, entries[site], name=site, **{key: value for key, value in extra.items() if value}
                )
                self.notes += load_datalist(folder, file, site=site, class_labels=bool(self.classes)).doubts
                self.counts.setdefault(site, {
                    split: Counter(
                        self.classes[entry["label"]] if self.classes and not self.findings and "label" in entry
                        else "images"
                        for entry in written
                    )
                    for split, written in entries[site].items()
                })  # fmt: skip

    def _add_global_test(self, lists: Mapping[str, Split]) -> dict[str, Split]:
        """Give each site the test images of all sites as ``test_global``, and as ``test`` if it has none of its own."""
        tested = []
        for site, item in ((site, item) for site, by_split in lists.items() for item in by_split["test"]):
            whose = item.patient and f"{site}/{item.patient.removeprefix(f'{site}/')}"  # unique over all sites
            tested.append(replace(item, patient=whose) if item.site else item)
            for name, file in product(self.names.values(), (item.image, *item.more, item.mask)):
                if isinstance(file, str) and name != self.names[site]:
                    self.draft.link(f"{name}/{file}", f"{self.names[site]}/{file}")
        self.draft.finish()
        return {
            site: {**by_split, "test": by_split["test"] or tested, SPLIT_GLOBAL: tested} if tested else by_split
            for site, by_split in lists.items()
        }

    def _classes(self, entries: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
        """Return the keys ``class_names`` and ``class_groups`` of a datalist, as far as they are known."""
        if self.findings:
            return {"class_names": self.classes}
        trained = Counter(entry["label"] for by_split in entries.values() for entry in by_split["training"])
        groups = self.form.class_groups
        if groups is None:
            groups = frequency_groups([trained[number] for number in range(len(self.classes))])
        known = {"class_names": self.classes if self.form.class_names else [], "class_groups": groups}
        return {key: value for key, value in known.items() if value}

    def write_manifest(self, record: Mapping[str, Any]) -> None:
        """Write each site's checksums, and a manifest of the sites' images with options, versions and notes."""
        form, new = self.form, self.draft.new
        sites = {}
        for site, name in self.names.items():
            checksums = {file: check for file, check in self.draft.checksums.items() if file.startswith(f"{name}/")}
            checksums |= {f"{name}/{path.name}": sha256_of(path) for path in (new / name).glob("datalist*.json")}
            (new / name / CHECKSUMS).write_text(
                "".join(f"{check}  {file.removeprefix(f'{name}/')}\n" for file, check in sorted(checksums.items())),
                encoding="utf-8",
            )
            counts = self.counts[site]
            classes = {split: {c: by_class[c] for c in self.classes} for split, by_class in counts.items()}
            sites[name] = {
                "name": site, "images": {split: counter.total() for split, counter in counts.items()},
                "corrupted": site in corrupted_sites(list(self.names), form.dealing),
                "patients": len({item.patient for item in self.items[site]} - {None}) or None,
                "checksums": sha256_of(new / name / CHECKSUMS),
                **({"label_noise": form.label_noise[site]} if site in form.label_noise else {}),
                **({"classes": classes} if self.classes and not self.findings else {}),
            }  # fmt: skip
        _write_json(new / MANIFEST, {
            "kind": "classification" if self.classes else "segmentation",
            **record,
            **({"synthetic": True} if form.synthetic else {}),
            "folds": form.dealing.folds,
            "task": {
                **({"num_classes": len(self.classes)} if form.class_names and not self.findings else {}),
                **form.task
            },
            "notes": [*dict.fromkeys(self.notes)],
            "versions": {
                "fairflare": __version__, "python": platform.python_version(),
                **{package: version(package) for package in PACKAGES},
            },
            "sites": sites,
        })  # fmt: skip
        for note in dict.fromkeys(self.notes):
            log.warning(note)


def _different(site: str, items: Iterable[Item]) -> Iterator[Item]:
    used: dict[str, Item] = {}
    for item in items:
        if (before := used.setdefault(item.name.lower(), item)) is not item:
            files = " and ".join(f"'{one.image}'" for one in (before, item) if isinstance(one.image, Path))
            raise DataError(
                f"site '{site}': two images are called '{item.name}'{f' ({files})' if files else ''}; give them names "
                "that differ in letters or digits, not in other signs or in capitals alone"
            )
        yield item


def one_set(site: str, items: Iterable[Item]) -> tuple[str, ...]:
    """Return the names of the channels of a site's images; raise ``DataError`` if the images have different ones."""
    channel_sets = {item.channels for item in items}
    refuse({
        f"site '{site}': the images of some cases are "
        f"{' and of others '.join(', '.join(names) for names in sorted(channel_sets))}; prepare them as sites of their "
        "own": len(channel_sets) > 1,
    }, DataError)  # fmt: skip
    return next(iter(channel_sets), ())


def _entries(item: Item, split: str) -> list[dict[str, Any]]:
    """Return the datalist entries of a written image: one entry, or one for each listed slice."""
    label: Any = item.mask
    if isinstance(label, tuple):  # findings; -2 and -3: uncertain, read as 0 and 1 except in test images
        assumed = {} if split.startswith("test") else {-2: 0, -3: 1}
        label = [value if value >= 0 else assumed.get(value) for value in label]
    entry = {
        "image": [item.image, *item.more] if item.more else item.image, "label": label,
        "patient": item.patient, "volume": item.volume,
        "spacing": item.spacing and list(item.spacing), "attributes": item.attributes or None,
    }  # fmt: skip
    known = {key: value for key, value in entry.items() if value is not None}
    return [known] if item.slices is None else [{**known, "slice": number} for number in item.slices]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
