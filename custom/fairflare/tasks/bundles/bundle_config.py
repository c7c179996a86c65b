"""Read a MONAI bundle's configuration, and make objects from its keys: sealed, or by MONAI's own parser.

Only requested objects are made: no data set of the bundle's own, no handler, no engine, no ``initialize`` or ``run``.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import yaml

from fairflare.base.disk.bundle_files import BundleError
from fairflare.base.machine.one_run import belonging_to
from fairflare.base.own_errors import describe_error
from fairflare.data.datalist import DataError
from fairflare.tasks.bundles.expressions import Refused, nodes
from fairflare.tasks.bundles.sealed import DEEPEST, Sealed, look

CONFIGS, METADATA = "configs", "metadata"
SUFFIXES = (".yml", ".yaml", ".json")  # of files that differ in these endings only, the last is read
#: Keys at which each part is searched, in this order; the first are those of MONAI's bundle specification.
PLACES: Mapping[str, tuple[str, ...]] = {
    "network": ("network_def", "net_def", "network", "net"),
    "train_preprocessing": ("train#preprocessing", "train#dataset#transform", "preprocessing", "train_transforms"),
    "validate_preprocessing": (
        "validate#preprocessing", "validate#dataset#transform", "val_preprocessing", "eval_transforms",
    ),
    "loss": ("loss", "loss_function", "lossfn", "train#loss", "train#trainer#loss_function"),
    "validate_postprocessing": (
        "validate#postprocessing", "validate#evaluator#postprocessing", "evaluator#postprocessing",
    ),
    "validate_inferer": ("validate#inferer", "validate#evaluator#inferer", "evaluator#inferer"),
    "key_metric": ("validate#key_metric", "validate#evaluator#key_val_metric", "evaluator#key_val_metric"),
    "train_inferer": ("train#inferer", "train#trainer#inferer"),
    "train_batch_size": (
        "train#dataloader#batch_size", "train#trainer#train_data_loader#batch_size", "train_dataloader#batch_size",
    ),
    "validate_batch_size": ("validate#dataloader#batch_size", "validate#evaluator#val_data_loader#batch_size"),
    "optimizer": ("optimizer", "train#optimizer", "train#trainer#optimizer"),
}  # fmt: skip
NEEDED = ("network", "train_preprocessing", "validate_preprocessing", "loss", "key_metric")
LARGEST_FILE = 2**18  # characters
_folders: dict[str, Path] = {}  # folder of the bundle that a top-level module comes from, by module


class Bundle:
    """Hold the configuration of a MONAI bundle that was read from its folder, or that a job carries as a text.

    Args:
        folder: the bundle's folder, which holds ``configs``.
        configs: names of the files in ``configs`` to read, without ending; a later file overrides earlier ones.
        overrides: ``{key: value}`` that replace values of the configuration, or add one of the keys in :data:`PLACES`.
        sealed: full names of the classes that the configuration may use, read without running any of its code;
            ``None`` if MONAI's parser runs the whole configuration.
        text: the configuration as text, from ``fairflare.tasks.bundle.seal_settings``, read in place of the folder.

    Raises:
        BundleError: a folder, file or key is missing, or a file is no JSON or YAML object.
    """

    def __init__(
        self,
        folder: Path,
        configs: Sequence[str] = ("train",),
        overrides: Mapping[str, Any] | None = None,
        *,
        sealed: Collection[str] | None = None,
        text: str | None = None,
    ) -> None:
        from monai.bundle import ConfigParser

        self.folder, self.sealed, values = folder, sealed, overrides or {}
        self.name = f"MONAI bundle {folder.name!r}, {' and '.join(f'{CONFIGS}/{name}' for name in configs)}"
        if text is None:
            self.config, self.name = read_files(folder, configs)
        else:
            with telling(f"{self.name}: the text of the job cannot be made"):
                look_at_size(text)
                self.config = {**yaml.safe_load(text)}
        # FairFlare itself sets two values of the configuration: the path of the bundle's folder, and the device.
        with telling(f"{self.name}: what it says together cannot be made"):
            for key, value in {**values, "bundle_root": str(folder), "device": "$torch.device('cpu')"}.items():
                if self.get(key) is not None or any(key in keys for keys in PLACES.values()):
                    ConfigParser(self.config)[key] = value
                elif key in values:
                    raise BundleError(f"{self.name}: bundle_overrides names {key!r}, which it does not have")

    def get(self, key: str) -> Any:
        """Return the value that the configuration has under a key, or ``None`` if it has none."""
        try:
            return look(self.config, key)
        except (KeyError, IndexError, ValueError, TypeError):
            return None

    def own_code(self) -> list[str]:
        """Return the configuration keys that name the bundle's own Python code (``scripts.net``), used or not."""
        names = "|".join(["scripts", *(re.escape(path.stem) for path in self.folder.glob("*.py"))])
        code = re.compile(rf"(?s)(\$.*)?(?<![\w.@])({names})\b.*")
        return [key for key, value in nodes(self.config) if isinstance(value, str) and code.fullmatch(value)]

    def place(self, part: str) -> str | None:
        """Return the configuration key of a part, or ``None`` if the bundle has no such part.

        Raises:
            BundleError: the bundle lacks a needed part.
        """
        from monai.bundle import ConfigParser

        # MONAI's parser also finds a key whose macro leads nowhere; a later error then names this key.
        place = next(
            (
                key
                for key in PLACES[part]
                for find in (self.get, ConfigParser(self.config).get)
                if find(key) is not None
            ),
            None,
        )
        if place is None and part in NEEDED:
            raise BundleError(
                f"{self.name}: no key for {part}: looked for {', '.join(map(repr, PLACES[part]))}. Say where it is "
                f"by key {PLACES[part][0]!r}: bundle_overrides={{{PLACES[part][0]!r}: '@KEY'}}"
            )
        return place and self.follow(place)

    def follow(self, key: str, steps: int = DEEPEST) -> str:
        """Follow references (``@other``) from a key, and return the last key; without a reference, the key itself."""
        value = self.get(key)
        if not steps:
            raise BundleError(f"{self.name}: key {key!r} refers to itself")
        leads = isinstance(value, str) and value.startswith("@") and self.get(value[1:]) is not None
        return self.follow(value[1:], steps - 1) if leads else key

    def make(self, key: str, **arguments: Any) -> Any:
        """Make a new object from the configuration under a key, with all objects that it refers to.

        Args:
            key: key of the object in the configuration.
            arguments: arguments that replace those in the file; no list or dict.

        Raises:
            BundleError: the object cannot be made (names file, key and the first cause).
        """
        from monai.bundle import ConfigParser

        logging.getLogger("monai.data.nvimgcodec_pydicom_plugin").setLevel(logging.ERROR)
        with telling(f"{self.name}: key {key!r} cannot be made"), warnings.catch_warnings():
            # LoadImage's warning about a missing decoder for GPUs
            warnings.filterwarnings("ignore", message="NvImgCodecPydicomReader: nvImageCodec")
            config = copy.deepcopy(self.config)
            if arguments:
                look(config, key).update(arguments)
            if self.sealed is not None:
                return Sealed(config, self.sealed).make(key)
            with code_of(self.folder):
                return ConfigParser(config).get_parsed_content(key)


def read_files(folder: Path, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return the merged content of a bundle's configuration files, where later files override, and the bundle's name.

    Raises:
        BundleError: a file is missing, or is no JSON or YAML object.
    """
    from monai.bundle import ConfigParser

    there = {file.stem: file for suffix in SUFFIXES for file in sorted((folder / CONFIGS).glob(f"*{suffix}"))}
    if lacking := [name for name in names if name not in there]:
        listed = ", ".join(file.name for file in there.values()) or f"no folder {CONFIGS} with one"
        raise BundleError(
            f"MONAI bundle {folder}: no {CONFIGS}/{lacking[0]}.json (or .yaml); there is {listed}. A bundle is a "
            "folder with configs/train.json in it"
        )
    files = [there[name] for name in names]
    name = f"MONAI bundle {folder.name!r}, {' and '.join(f'{CONFIGS}/{file.name}' for file in files)}"
    with telling(f"{name} cannot be read"):
        for part in sorted({*names, METADATA}.intersection(there)):
            with there[part].open(encoding="utf-8", errors="replace") as file:
                look_at_size(file.read(LARGEST_FILE + 1))
        if odd := [file.name for file in files if not isinstance(ConfigParser.load_config_file(file), dict)]:
            raise ValueError(f"{odd[0]} must hold an object, {{key: value}}, and holds a list or a single value")
        config = ConfigParser.load_config_files(files)
    with telling(f"MONAI bundle {folder.name!r}, {CONFIGS}/{METADATA} cannot be read"):
        config["_meta_"] = ConfigParser.load_config_file(there[METADATA]) if METADATA in there else {}
    return config, name


def look_at_size(text: str) -> None:
    """Refuse a configuration on which a reader of YAML would spend seconds: its time grows by the square of the depth.

    Raises:
        ValueError: the text is longer than ``LARGEST_FILE`` characters, or its brackets are nested too deep.
    """
    opened = accumulate((mark in "[{") - (mark in "]}") for mark in text[: LARGEST_FILE + 1])
    if len(text) > LARGEST_FILE or max(opened, default=0) > 3 * DEEPEST:  # those in texts included
        raise ValueError(f"longer than {LARGEST_FILE} characters, or {3 * DEEPEST} brackets within each other")


@contextmanager
def telling(what: str, kind: Callable[[str], Exception] = BundleError) -> Iterator[None]:
    """Turn an error in the ``with`` block into an error of ``kind``: one line that begins with ``what``.

    A ``BundleError``, a ``DataError`` and errors about memory are raised unchanged.
    """
    try:
        yield
    except (BundleError, DataError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:  # a bundle's configuration is code, which may raise any error
        cause = first_cause(error)
        reason = " ".join(str(cause).split()) if isinstance(cause, Refused) else describe_error(cause)  # ours uncut
        raise kind(f"{what}: {reason}") from error


def first_cause(error: BaseException) -> BaseException:
    """Return the first error of a chain of causes; MONAI wraps an error in another one at every step."""
    return error if error.__cause__ is None else first_cause(error.__cause__)


@contextmanager
def code_of(folder: Path) -> Iterator[None]:
    """Let modules in a bundle's folder (``scripts.net``) be imported inside the context.

    Raises:
        BundleError: a module of the same name from outside the bundle was already imported.
    """
    names = {path.stem for path in (*folder.glob("*.py"), *(file.parent for file in folder.glob("*/*.py")))}
    others = {
        key: top
        for key in [*sys.modules]  # another thread may import meanwhile
        for top in [key.partition(".")[0]]
        if top in names and _folders.get(top) != folder
    }
    if foreign := [top for top in others.values() if top not in _folders]:
        raise BundleError(
            f"MONAI bundle {folder.name!r}: its module {foreign[0]!r} has the name of one that is loaded already; "
            "rename it"
        )
    for key in others:  # modules of another bundle; its objects keep their classes
        del sys.modules[key]
    _folders.update(dict.fromkeys(names, folder))
    sys.path.insert(0, str(folder))
    try:
        with belonging_to(f"MONAI bundle {folder}"):
            yield
    finally:
        sys.path.remove(str(folder))
