"""Read a MONAI bundle's configuration, and make objects from its keys: sealed, or by MONAI's own parser.

Only requested objects are made: no data set of the bundle's own, no handler, no engine, no ``initialize`` or ``run``.
"""

from __future__ import annotations

import copy
import itertools
import logging
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from fairflare.base.checks import unknown
from fairflare.base.disk.bundle_files import BundleError
from fairflare.base.own_errors import in_one_line
from fairflare.tasks.bundles.sealed import DEEPEST, Sealed, look

CONFIGS, METADATA = "configs", "metadata"
SUFFIXES = (".json", ".yaml", ".yml")
#: Keys at which each part is searched, in this order; the first are those of MONAI's bundle specification.
PLACES: Mapping[str, tuple[str, ...]] = {
    "network": ("network_def", "net_def", "network", "net"),
    "loss": ("loss", "loss_function", "lossfn", "train#loss", "train#trainer#loss_function"),
    "optimizer": ("optimizer", "train#optimizer", "train#trainer#optimizer"),
    "train_preprocessing": ("train#preprocessing", "train#dataset#transform", "preprocessing", "train_transforms"),
    "train_inferer": ("train#inferer", "train#trainer#inferer"),
    "train_batch_size": (
        "train#dataloader#batch_size", "train#trainer#train_data_loader#batch_size", "train_dataloader#batch_size",
    ),
    "validate_preprocessing": (
        "validate#preprocessing", "validate#dataset#transform", "val_preprocessing", "eval_transforms",
    ),
    "validate_inferer": ("validate#inferer", "validate#evaluator#inferer", "evaluator#inferer"),
    "validate_postprocessing": (
        "validate#postprocessing", "validate#evaluator#postprocessing", "evaluator#postprocessing",
    ),
    "validate_batch_size": ("validate#dataloader#batch_size", "validate#evaluator#val_data_loader#batch_size"),
    "key_metric": ("validate#key_metric", "validate#evaluator#key_val_metric", "evaluator#key_val_metric"),
}  # fmt: skip
LARGEST_FILE = 2**18
LARGEST = 50_000  # values of a configuration, with what macros repeat
_imported: set[str] = set()  # names of top-level modules that were imported from a bundle


class Bundle:
    """Hold the configuration of a MONAI bundle that was read from its folder, or that a job carries as a text.

    Args:
        folder: the bundle's folder, which holds ``configs``.
        configs: names of the files in ``configs`` to read, without ending; a later file overrides earlier ones.
        ids: ``{part: key}`` for parts whose key is not in :data:`PLACES`.
        overrides: ``{key: value}`` that replace values of the configuration.
        sealed: classes that it may name, so that nothing of it runs; ``None``: MONAI runs all of it.
        text: what ``fairflare.tasks.bundle.sealed_settings`` gave, which is then read in place of the folder.

    Raises:
        BundleError: a folder, file or key is missing, a file is no JSON or YAML object, or a part is unknown.
    """

    def __init__(
        self,
        folder: Path,
        configs: Sequence[str] = ("train",),
        ids: Mapping[str, str] | None = None,
        overrides: Mapping[str, Any] | None = None,
        *,
        sealed: Collection[str] | None = None,
        text: str | None = None,
    ) -> None:
        self.folder, self.ids, self.sealed = folder, dict(ids or {}), sealed
        for part in self.ids:
            if part not in PLACES:
                raise BundleError(f"bundle_ids has no part {part!r}{unknown(part, PLACES, 'docs/bundles.md has all')}")
        self.where = " and ".join(f"{CONFIGS}/{name}" for name in configs)
        if text is None:
            self.config, self.where = read_files(folder, configs)
        else:
            with self.telling("the text of the job"):
                if len(text) > LARGEST_FILE:
                    raise ValueError(f"longer than {LARGEST_FILE} characters")
                self.config = {**yaml.safe_load(text)}
        for key, value in (overrides or {}).items():
            if not self._set(key, value):
                raise BundleError(f"bundle_overrides names {key!r}, which {self.where} does not have")
        # FairFlare itself sets two values of the configuration: the path of the bundle's folder, and the device.
        self._set("bundle_root", str(folder))
        self._set("device", "$torch.device('cpu')")
        self._sizes = itertools.count()
        with self.telling("what it says together"):
            self.config = self._expanded("", self.config, ())

    def get(self, key: str) -> Any:
        """Return what the configuration has under a key; ``None``: nothing."""
        try:
            return look(self.config, key)
        except (KeyError, IndexError, ValueError, TypeError):
            return None

    def _set(self, key: str, value: Any) -> bool:
        """Replace the value of a key that is there, and return whether it is."""
        above, _, last = f"#{key.replace('::', '#')}".rpartition("#")
        parent: Any = self.get(above[1:]) if above else self.config
        if found := self.get(key) is not None:
            parent[int(last) if isinstance(parent, list) else last] = value
        return found

    def _expanded(self, at: str, value: Any, inside: tuple[str, ...]) -> Any:
        """Return a value of the configuration with macros (``%key``) and relative keys replaced.

        Args:
            at: key of the value.
            value: the value.
            inside: macros that led to it.
        """
        from monai.bundle import ConfigParser

        if next(self._sizes) > LARGEST or at.count("::") > DEEPEST or len(inside) > DEEPEST:
            raise ValueError(f"key {at[-80:]!r}: more than {LARGEST} values, or {DEEPEST} in each other")
        if isinstance(value, dict | list):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            found = {name: self._expanded(f"{at}::{name}".removeprefix("::"), part, inside) for name, part in parts}
            return found if isinstance(value, dict) else [*found.values()]
        if isinstance(value, str):
            value = ConfigParser.resolve_relative_ids(at, value)
            if value.startswith("%"):
                file, key = ConfigParser.split_path_id(value[1:])
                if value in inside or file or self.get(key) is None:
                    raise ValueError(f"key {at!r}: {value:.80} refers to itself, to another file, or to nothing")
                return self._expanded(key, look(self.config, key), (*inside, value))
        return value

    def own_code(self) -> list[str]:
        """Return the keys that name Python of the bundle's own (``scripts.net``), whether a run needs them or not."""
        names = "|".join(["scripts", *(re.escape(path.stem) for path in self.folder.glob("*.py"))])
        code = re.compile(rf"(?s)(\$.*)?(?<![\w.@])({names})\b.*")
        return [key for key, value in strings("", self.config) if code.fullmatch(value)]

    def place(self, part: str) -> str | None:
        """Return the configuration key of a part; ``None``: the bundle has no such part.

        Raises:
            BundleError: ``bundle_ids`` names a key that the configuration lacks.
        """
        if part in self.ids:
            if self.get(self.ids[part]) is None:
                raise self.problem(f"bundle_ids says that {part} is {self.ids[part]!r}, which is not there")
            return self.followed(self.ids[part])
        found = next((key for key in PLACES[part] if self.get(key) is not None), None)
        return None if found is None else self.followed(found)

    def needed(self, part: str) -> str:
        """Return the configuration key of a part, and raise an error if the bundle lacks this part."""
        key = self.place(part)
        if key is None:
            looked = ", ".join(map(repr, PLACES[part]))
            raise self.problem(
                f"no key for {part}: looked for {looked}. Say where it is with bundle_ids={{{part!r}: 'KEY'}}"
            )
        return key

    def followed(self, key: str) -> str:
        """Follow references (``@other``) from a key, and return the last key; without a reference, the key itself."""
        seen = {key}
        while isinstance(value := self.get(key), str) and value.startswith("@") and self.get(value[1:]) is not None:
            if (key := value[1:]) in seen:
                raise self.problem(f"key {key!r} refers to itself")
            seen.add(key)
        return key

    def make(self, key: str, **arguments: Any) -> Any:
        """Make a new object from the configuration under a key, with all objects that it refers to.

        Args:
            key: key of the object in the configuration.
            arguments: arguments that replace those in the file; the replaced ones are not made.

        Raises:
            BundleError: the object cannot be made (names file, key and the first cause).
        """
        logging.getLogger("monai.data.nvimgcodec_pydicom_plugin").setLevel(logging.ERROR)
        with self.telling(f"key {key!r}"), warnings.catch_warnings():
            # LoadImage's warning about a missing decoder for GPUs
            warnings.filterwarnings("ignore", message="NvImgCodecPydicomReader: nvImageCodec")
            if self.sealed is not None:
                return Sealed(self.config, self.sealed).make(key, **arguments)
            from monai.bundle import ConfigParser

            with code_of(self.folder):
                parser = ConfigParser(copy.deepcopy(self.config))
                for name in arguments:
                    parser[f"{key}#{name}"] = None
                if arguments:
                    return parser.get_parsed_content(key, instantiate=False).instantiate(**arguments)
                return parser.get_parsed_content(key)

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Turn any error inside the context into a one-line error that names bundle and file."""
        try:
            yield
        except BundleError:
            raise
        except Exception as error:  # a bundle's configuration is code, which raises what it likes
            raise self.problem(f"{what} cannot be made: {first_cause(error)}") from error

    def problem(self, text: str) -> BundleError:
        """Return an error with this text that names the bundle and its files."""
        return BundleError(f"MONAI bundle {self.folder.name!r}, {self.where}: {text}")


def read_files(folder: Path, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return the content of a bundle's configuration files, a later one before earlier ones, and where it stands.

    Raises:
        BundleError: a file is missing, or is no JSON or YAML object.
    """
    from monai.bundle import ConfigParser

    place = folder / CONFIGS
    there = sorted(path.name for path in place.iterdir()) if place.is_dir() else []
    found: dict[str, Path] = {}
    for name in (*names, METADATA):
        file = next((place / f"{name}{suffix}" for suffix in SUFFIXES if f"{name}{suffix}" in there), None)
        if file is None and name != METADATA:
            raise BundleError(
                f"MONAI bundle {folder}: no {CONFIGS}/{name}.json (or .yaml); there is "
                f"{', '.join(there) or f'no folder {CONFIGS}'}. A bundle is a folder with {CONFIGS}/train.json in it"
            )
        if file is not None:
            found[name] = file
            where = f"MONAI bundle {folder.name!r}: {CONFIGS}/{file.name}"
            try:
                if file.stat().st_size > LARGEST_FILE:
                    raise ValueError(f"larger than {LARGEST_FILE} bytes, so no configuration")
                content = ConfigParser.load_config_file(file)
                if not isinstance(content, dict):
                    raise BundleError(f"{where} must hold an object, got a {type(content).__name__}")
                config = ConfigParser.load_config_files([str(found[name]) for name in names if name in found])
            except BundleError:
                raise
            except Exception as error:  # errors of the JSON or YAML reader, or of merging
                raise BundleError(f"{where} cannot be read: {first_cause(error)}") from error
    if METADATA in found:
        config["_meta_"] = content
    return config, " and ".join(f"{CONFIGS}/{found[name].name}" for name in names)


def first_cause(error: BaseException) -> str:
    """Return the first cause of an error in short, as MONAI wraps it in a further error at every step."""
    while error.__cause__ is not None:
        error = error.__cause__
    return in_one_line(error)


def strings(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each text of a configuration with its key."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from strings(f"{key}#{name}".lstrip("#"), part)
    elif isinstance(value, str):
        yield key, value


@contextmanager
def code_of(folder: Path) -> Iterator[None]:
    """Let modules in a bundle's folder (``scripts.net``) be imported inside the context.

    Raises:
        BundleError: a module of the same name, which is of no bundle, was already imported.
    """
    folder = folder.resolve()
    packages = [path.name for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py"))]
    names = [name for name in (*packages, *(path.stem for path in folder.glob("*.py"))) if name.isidentifier()]
    for name in names:
        if name in sys.modules and not _lies_in(sys.modules[name], folder):
            if name not in _imported:
                raise BundleError(
                    f"MONAI bundle {folder.name!r}: its module {name!r} has the name of one that is loaded already; "
                    "rename it"
                )
            # The module is another bundle's: it can be dropped, as objects made from it keep their classes.
            for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
                del sys.modules[loaded]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _imported.update(name for name in names if name in sys.modules and _lies_in(sys.modules[name], folder))


def _lies_in(module: Any, folder: Path) -> bool:
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(place and Path(place).resolve().is_relative_to(folder) for place in places)
