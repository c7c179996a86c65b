"""All sites are written, or none: images, datalists, checksums, the site file of a simulator, a manifest."""

from __future__ import annotations

import json
import logging
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

from fairflare import __version__
from fairflare.base.checks import whole
from fairflare.base.disk.files import csv_text, sha256_of
from fairflare.base.for_types import Unpack
from fairflare.base.task import SPLIT_GLOBAL
from fairflare.data.datalist import SPLITS, DataError, load_datalist, write_datalist
from fairflare.data.preparers.dealing import Dealing, corrupted_sites, deal
from fairflare.data.preparers.draft import Draft, drafted
from fairflare.data.preparers.items import Item
from fairflare.data.preparers.names import file_name, site_names
from fairflare.data.preparers.splitting import FRACTIONS, assign, assign_folds, frequency_groups

NO_KEY = (
    "{} of {} images have no key of a patient (lesion, examination): images of one may be in training and in test, and "
    "at two sites. {}"
)
SITE_FILE, MANIFEST, COUNTS = "fairflare.json", "manifest.json", "counts.csv"
CHECKSUMS = "checksums.sha256"  # of a site, for sha256sum -c
PACKAGES = ("numpy", "pillow", "scikit-learn", "nibabel")

log = logging.getLogger(__name__)


class Writing(TypedDict, total=False):
    """How the sites are written: arguments that all preparers have, see :func:`write_sites`."""

    seed: int
    number: bool
    overwrite: bool
    progress: Callable[[int], None]
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Form:
    """What the datalists say beside the images, and how these are split.

    Attributes:
        class_names: of all classes.
        fractions: of training, validation and test.
        stratified: each class in the same shares.
        folds: further datalists, one for each fold of a cross-validation; 0: none.
        corrupted: the sites whose images are; for the manifest.
        label_noise: share of wrong training labels by site; for the manifest.
        class_groups: head, medium and tail; None: from the training images of all sites.
        synthetic: the images are made up.
        global_test: every site gets the test images of all sites as ``test_global``.
        keys: what says whose an image is, in words; images without such a key are counted, and that is told.
        attributes: declared attributes of the people, as in a datalist.
        task: settings of the task that reads these images, other than the usual ones; for the manifest and the screen.
        notes: for the manifest and the log.
    """

    class_names: Sequence[str] | None = None
    fractions: Sequence[float] = FRACTIONS
    stratified: bool = False
    folds: int = 0
    corrupted: Sequence[str] = field(default_factory=tuple)
    label_noise: Mapping[str, float] = field(default_factory=dict)
    class_groups: Mapping[str, Sequence[int]] | None = None
    synthetic: bool = False
    global_test: bool = False
    keys: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()


def write_pool(
    items: Sequence[Item], out_dir: str | Path, dealing: Dealing, settings: Mapping[str, Any] | None = None,
    form: Form | None = None, **writing: Unpack[Writing],
) -> dict[str, Path]:  # fmt: skip
    """Deal the images to sites and write these as :func:`write_sites` does; what is dealt is split each class alike."""
    sites = deal(items, dealing, whole("seed", writing.get("seed", 0), low=0))
    form = form or Form()
    dealt = replace(
        form, stratified=form.stratified or dealing.partition != "site", fractions=dealing.fractions,
        folds=dealing.folds, corrupted=corrupted_sites(list(sites), dealing), global_test=dealing.global_test,
    )  # fmt: skip
    return write_sites(sites, out_dir, settings, dealt, **writing)


def write_sites(
    sites: Mapping[str, Iterable[Item]],
    out_dir: str | Path,
    settings: Mapping[str, Any] | None = None,
    form: Form | None = None,
    **writing: Unpack[Writing],
) -> dict[str, Path]:
    """Write a folder with a datalist for each site, ``fairflare.json``, a manifest and the counts: all or nothing.

    Everything goes into a hidden folder first and is then moved into place; what an earlier call wrote is put back
    when that fails.

    Args:
        sites: images of each site.
        out_dir: folder to write to.
        settings: what else ``fairflare.json`` says for every site.
        form: what the datalists say.
        seed: of the split; default 0.
        number: call the sites ``site-1``, ``site-2``, ... instead of by their names.
        overwrite: replace what an earlier call wrote.
        progress: is told how many files are written.
        record: what the manifest says of the call: ``preparer`` and ``options``.

    Returns:
        the folder of each site.

    Raises:
        DataError: the source files are not as expected, or something is in the way.
    """
    if not sites:
        raise ValueError("at least one site is needed")
    form = form or Form()
    seed = whole("seed", writing.get("seed", 0), low=0)
    out = Path(out_dir).expanduser().absolute()
    names = site_names(sites, writing.get("number", False))
    targets = {site: out / name for site, name in names.items()}
    with drafted(out, writing.get("progress", lambda done: None)) as draft:
        existing = _in_the_way(out, list(targets.values()), writing.get("overwrite", False))
        result = _Result(draft, form, seed, names)
        result.write(sites)
        blocks = {names[site]: {"data_root": str(targets[site]), **(settings or {})} for site in sites}
        _write_json(draft.new / SITE_FILE, {"sites": blocks})
        for fold in range(1, form.folds + 1):
            own = {site: {**block, "datalist": f"datalist_fold{fold}.json"} for site, block in blocks.items()}
            _write_json(draft.new / f"fairflare_fold{fold}.json", {"sites": own})
        result.summaries({"seed": seed, **writing.get("record", {})})
        moves = [(path, draft.old / path.name) for path in existing]
        moves += [(path, out / path.name) for path in sorted(draft.new.iterdir())]
        _move(moves)
    return {names[site]: target for site, target in targets.items()}


def _in_the_way(out: Path, targets: Sequence[Path], overwrite: bool) -> list[Path]:
    """Return what is to be replaced: what is there of the new result, and what else an earlier one has."""
    foreign = [path for path in targets if path.exists() and not (path / "datalist.json").is_file()]
    earlier = _sites_of(out / MANIFEST)
    files = [*(out / name for name in (SITE_FILE, MANIFEST, COUNTS)), *out.glob("fairflare_fold*.json")]
    existing = list(dict.fromkeys(path for path in (*targets, *earlier, *files) if path.exists()))
    if existing and not overwrite:
        raise DataError(f"'{existing[0]}' is there already; choose another folder, or overwrite it (--overwrite)")
    if foreign:
        raise DataError(f"'{foreign[0]}' is not a folder with a datalist.json, so it is not overwritten; move it away")
    return existing


def _sites_of(manifest: Path) -> list[Path]:
    """Return the sites' folders of an earlier result that are still there."""
    try:
        names = list(json.loads(manifest.read_text(encoding="utf-8"))["sites"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    folders = [manifest.parent / str(name) for name in names if file_name(str(name)) == name]
    return [folder for folder in folders if (folder / "datalist.json").is_file()]


def _move(moves: Sequence[tuple[Path, Path]]) -> None:
    """Move all of these, or none."""
    done: list[tuple[Path, Path]] = []
    try:
        for here, there in moves:
            here.rename(there)
            done.append((here, there))
    except OSError:
        for here, there in reversed(done):
            there.rename(here)
        raise


@dataclass(frozen=True)
class _Entry:
    item: Item
    image: str  # paths below the site's folder
    label: str | int

    def contents(self, whose: str = "") -> list[dict[str, Any]]:
        """Return the entries of a datalist, one for each slice; ``whose``: put before the patient's key."""
        item = self.item
        patient = item.patient and whose + item.patient
        more = {
            "patient": patient, "volume": item.volume, "spacing": item.spacing and list(item.spacing),
            "attributes": item.attributes or None,
        }  # fmt: skip
        found = {"image": self.image, "label": self.label, **{k: v for k, v in more.items() if v is not None}}
        return [found] if item.slices is None else [{**found, "slice": number} for number in item.slices]


class _Result:
    """The draft of a result while it is made."""

    def __init__(self, draft: Draft, form: Form, seed: int, names: Mapping[str, str]) -> None:
        self.draft, self.form, self.seed, self.names = draft, form, seed, names
        self.counts: dict[str, dict[str, Counter[str]]] = {}  # by site, split and class
        self.classes: list[str] = []  # in the order of their numbers; none: there are masks
        self._entries: dict[str, list[_Entry]] = {}
        self._shared: dict[str, str] = {}
        self._tested: dict[int, list[dict[str, Any]]] = {}  # by fold: of all sites
        self.notes = list(form.notes)

    def write(self, sites: Mapping[str, Iterable[Item]]) -> None:
        """Write the images, then everything about them."""
        links: list[tuple[str, str]] = []
        for site, items in sites.items():
            self._entries[site] = [self._put(site, item, links) for item in _different(site, items)]
        self.draft.finish()
        entries = [entry for own in self._entries.values() for entry in own]
        numbers = [entry.label for entry in entries if isinstance(entry.label, int)]
        if len(numbers) == len(entries):
            self.classes = list(self.form.class_names or [f"class_{n}" for n in range(max(numbers) + 1)])
        splits = {site: self._splits(site) for site in sites}
        if self.form.global_test:
            links += self._share(splits)
        for name, other in links:
            self.draft.link(name, other)
        self._datalists(splits)
        own = [entry.item for entry in entries if not entry.item.shared]
        if self.form.keys and (unknown := sum(item.patient is None for item in own)):
            self.notes.append(NO_KEY.format(unknown, len(own), self.form.keys))
        for note in self.notes:
            log.warning(note)

    def _share(self, splits: Mapping[str, Sequence[Sequence[tuple[str, ...]]]]) -> list[tuple[str, str]]:
        """Collect the test images of all sites; return what every site needs of the others' files."""
        links = []
        for site, found in splits.items():
            folder = self.names[site]
            for entry, *own in zip(self._entries[site], *found, strict=True):
                contents = entry.contents(f"{site}/" if entry.item.site else "")  # a key of this site alone
                tested = [fold for fold, of in enumerate(own) if "test" in of]
                for fold in tested:
                    self._tested.setdefault(fold, []).extend(contents)
                files = [file for file in (entry.image, entry.label) if isinstance(file, str) and tested]
                others = [name for name in self.names.values() if name != folder]
                links += [(f"{other}/{file}", f"{folder}/{file}") for other in others for file in files]
        return links

    def _put(self, site: str, item: Item, links: list[tuple[str, str]]) -> _Entry:
        folder = self.names[site]

        def put(kind: str, source: Any) -> str:
            key = f"{kind}/{item.name}"
            first = self._shared.get(key, "") if item.shared else ""
            own = first.partition("/")[2] or self.draft.put(f"{folder}/{key}", source).partition("/")[2]
            if first:
                links.append((f"{folder}/{own}", first))
            elif item.shared:
                self._shared[key] = f"{folder}/{own}"
            return own

        return _Entry(
            item, put("images", item.image), item.mask if isinstance(item.mask, int) else put("masks", item.mask)
        )

    def _splits(self, site: str) -> list[list[tuple[str, ...]]]:
        """Return the splits of each image; one list for each fold."""
        items, form = [entry.item for entry in self._entries[site]], self.form
        how: dict[str, Any] = {"site": site, "seed": self.seed, "fractions": form.fractions}
        return (
            assign_folds(items, form.folds, **how) if form.folds else [assign(items, **how, stratified=form.stratified)]
        )

    def _datalists(self, splits: Mapping[str, Sequence[Sequence[tuple[str, ...]]]]) -> None:
        for fold in range(self.form.folds or 1):
            lists = {site: _by_split(self._entries[site], found[fold]) for site, found in splits.items()}
            if tested := self._tested.get(fold):
                # A small site may have none of its own.
                lists = {s: {**own, "test": own["test"] or tested, SPLIT_GLOBAL: tested} for s, own in lists.items()}
            more: dict[str, Any] = {"synthetic": True} if self.form.synthetic else {}
            more |= self._classes(lists) if self.classes else {}
            more |= {"attributes": self.form.attributes} if self.form.attributes else {}
            for site, by_split in lists.items():
                folder = self.draft.new / self.names[site]
                files = [f"datalist_fold{fold + 1}.json"] if self.form.folds else []
                for file in [*files, "datalist.json"] if fold == 0 else files:
                    write_datalist(folder / file, by_split, name=site, **more)
                    load_datalist(folder, file, site=site, class_labels=bool(self.classes))  # as a site would
                if fold == 0:
                    self.counts[self.names[site]] = {
                        split: Counter(self.classes[e["label"]] if self.classes else "images" for e in entries)
                        for split, entries in by_split.items()
                    }

    def _classes(self, lists: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
        """Return what a datalist says of the classes."""
        groups = self.form.class_groups
        if groups is None:
            trained = Counter(entry["label"] for own in lists.values() for entry in own["training"])
            groups = frequency_groups([trained[number] for number in range(len(self.classes))])
        named = {"class_names": self.classes} if self.form.class_names else {}
        return named | ({"class_groups": groups} if groups else {})

    def summaries(self, record: Mapping[str, Any]) -> None:
        """Write the checksums of each site, the counts and the manifest."""
        new = self.draft.new
        sites = {}
        rows: list[tuple[str, str, str, int]] = []
        for site, name in self.names.items():
            own = {file: check for file, check in self.draft.checksums.items() if file.startswith(f"{name}/")}
            own |= {f"{name}/{path.name}": sha256_of(path) for path in (new / name).glob("datalist*.json")}
            lines = [f"{check}  {file.removeprefix(f'{name}/')}\n" for file, check in sorted(own.items())]
            (new / name / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
            counts, noise = self.counts[name], self.form.label_noise.get(site)
            rows += [(name, split, c, own[c]) for split, own in counts.items() for c in self.classes or ["images"]]
            classes = {split: {c: own[c] for c in self.classes if own[c]} for split, own in counts.items()}
            sites[name] = {
                "name": site, "images": {split: found.total() for split, found in counts.items()},
                "corrupted": site in self.form.corrupted,
                "patients": len({entry.item.patient for entry in self._entries[site]} - {None}) or None,
                "checksums": sha256_of(new / name / CHECKSUMS),
                **({} if noise is None else {"label_noise": noise}),
                **({"classes": classes} if self.classes else {}),
            }  # fmt: skip
        (new / COUNTS).write_text(csv_text([("site", "split", "class", "images"), *rows]), encoding="utf-8")
        versions = {"fairflare": __version__, "python": platform.python_version()}
        versions |= {package: version(package) for package in PACKAGES}
        counted = {"num_classes": len(self.classes)} if self.form.class_names and self.classes else {}
        content = {
            "kind": "classification" if self.classes else "segmentation",
            **record,
            "folds": self.form.folds,
            "task": {**counted, **self.form.task},
            "notes": self.notes,
            "versions": versions,
            "sites": sites,
        }
        _write_json(new / MANIFEST, content)


def _different(site: str, items: Iterable[Item]) -> Iterator[Item]:
    used: dict[str, Item] = {}
    for item in items:
        before = used.setdefault(item.name.lower(), item)
        if before is not item:
            own = " and ".join(f"'{one.image}'" for one in (before, item) if isinstance(one.image, Path))
            raise DataError(
                f"site '{site}': two images are called '{item.name}'{f' ({own})' if own else ''}; give them names that "
                "differ in letters or digits, not in other signs or in capitals alone"
            )
        yield item


def _by_split(entries: Sequence[_Entry], splits: Sequence[tuple[str, ...]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for entry, own in zip(entries, splits, strict=True):
        for split in own:
            found.setdefault(split, []).extend(entry.contents())
    return found


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
