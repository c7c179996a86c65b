"""Read a MONAI bundle's configuration, and make objects from its keys by MONAI's ``ConfigParser``.

Only requested objects are made: no data set of the bundle's own, no handler, no engine, no ``initialize`` or ``run``.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairflare.base.checks import unknown
from fairflare.base.disk.bundle_files import BundleError
from fairflare.base.own_errors import in_one_line

CONFIGS, METADATA = "configs", "metadata"
SUFFIXES = (".json", ".yaml", ".yml")
#: Keys at which each part is searched, in this order; the first are those of MONAI's bundle specification.
PLACES: Mapping[str, tuple[str, ...]] = {
    "network": ("network_def", "net_def", "network", "net"),
    "loss": ("loss", "loss_function", "train#loss", "train#trainer#loss_function"),
    "optimizer": ("optimizer", "train#optimizer", "train#trainer#optimizer"),
    "train_preprocessing": ("train#preprocessing", "train#dataset#transform"),
    "train_inferer": ("train#inferer", "train#trainer#inferer"),
    "train_batch_size": ("train#dataloader#batch_size", "train#trainer#train_data_loader#batch_size"),
    "validate_preprocessing": ("validate#preprocessing", "validate#dataset#transform"),
    "validate_inferer": ("validate#inferer", "validate#evaluator#inferer"),
    "validate_postprocessing": ("validate#postprocessing", "validate#evaluator#postprocessing"),
    "validate_batch_size": ("validate#dataloader#batch_size", "validate#evaluator#val_data_loader#batch_size"),
    "key_metric": ("validate#key_metric", "validate#evaluator#key_val_metric"),
}
_imported: set[str] = set()  # names of top-level modules that were imported from a bundle


class Bundle:
    """Hold the configuration of a MONAI bundle that was read from its folder.

    Args:
        folder: the bundle's folder, which holds ``configs``.
        configs: names of the files in ``configs`` to read, without ending; a later file overrides earlier ones.
        ids: ``{part: key}`` for parts whose key is not in :data:`PLACES`.
        overrides: ``{key: value}`` that replace values of the configuration.

    Raises:
        BundleError: a folder, file or key is missing, a file is no JSON or YAML object, or a part is unknown.
    """

    def __init__(
        self,
        folder: Path,
        configs: Sequence[str] = ("train",),
        ids: Mapping[str, str] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        from monai.bundle import ConfigParser

        self.folder, self.ids = folder, dict(ids or {})
        for part in self.ids:
            if part not in PLACES:
                raise BundleError(f"bundle_ids has no part {part!r}{unknown(part, PLACES, 'docs/bundles.md has all')}")
        files = [self._file(name) for name in configs]
        self.where = " and ".join(f"{CONFIGS}/{file.name}" for file in files)
        self.parser: Any = ConfigParser()
        with self.telling("what it says together"):
            self.parser.read_config([str(file) for file in files])
            if any((folder / CONFIGS / f"{METADATA}{suffix}").is_file() for suffix in SUFFIXES):
                self.parser.read_meta(str(self._file(METADATA)))
            for key, value in (overrides or {}).items():
                if key not in self.parser:
                    raise BundleError(f"bundle_overrides names {key!r}, which {self.where} does not have")
                self.parser[key] = value
            # FairFlare itself sets two values of the configuration: the path of the bundle's folder, and the device.
            for key, value in (("bundle_root", str(folder)), ("device", "$torch.device('cpu')")):
                if key in self.parser:
                    self.parser[key] = value
            self.parser.parse()

    def place(self, part: str) -> str | None:
        """Return the configuration key of a part; ``None``: the bundle has no such part.

        Raises:
            BundleError: ``bundle_ids`` names a key that the configuration lacks.
        """
        if part in self.ids:
            if self.ids[part] not in self.parser:
                raise self.problem(f"bundle_ids says that {part} is {self.ids[part]!r}, which is not there")
            return self.followed(self.ids[part])
        found = next((key for key in PLACES[part] if self.parser.get(key) is not None), None)
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
        while isinstance(value := self.parser[key], str) and value.startswith("@") and value[1:] in self.parser:
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
        from monai.bundle import ConfigParser

        with self.telling(f"key {key!r}"), code_of(self.folder):
            parser = ConfigParser(copy.deepcopy(self.parser.config))
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

    def _file(self, name: str) -> Path:
        """Read the configuration file of this name, to check it, and return its path."""
        from monai.bundle import ConfigParser

        folder = self.folder / CONFIGS
        file = next((path for suffix in SUFFIXES if (path := folder / f"{name}{suffix}").is_file()), None)
        if file is None:
            there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
            raise BundleError(
                f"MONAI bundle {self.folder}: no {CONFIGS}/{name}.json (or .yaml); there is "
                f"{', '.join(there) or f'no folder {CONFIGS}'}. A bundle is a folder with {CONFIGS}/train.json in it"
            )
        where = f"MONAI bundle {self.folder.name!r}: {CONFIGS}/{file.name}"
        try:
            content = ConfigParser.load_config_file(file)
        except Exception as error:  # errors of the JSON or YAML reader, or a key that occurs twice
            raise BundleError(f"{where} cannot be read: {first_cause(error)}") from error
        if not isinstance(content, dict):
            raise BundleError(f"{where} must hold an object, got a {type(content).__name__}")
        return file


def first_cause(error: BaseException) -> str:
    """Return the first cause of an error in short, as MONAI wraps it in a further error at every step."""
    while error.__cause__ is not None:
        error = error.__cause__
    return in_one_line(error)


@contextmanager
def code_of(folder: Path) -> Iterator[None]:
    """Let modules in a bundle's folder (``scripts.net``) be imported inside the context.

    LoadImage's warning about a missing decoder for GPUs is hidden.

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
    logging.getLogger("monai.data.nvimgcodec_pydicom_plugin").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="NvImgCodecPydicomReader: nvImageCodec")
            yield
    finally:
        sys.path.remove(str(folder))
        _imported.update(name for name in names if name in sys.modules and _lies_in(sys.modules[name], folder))


def _lies_in(module: Any, folder: Path) -> bool:
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(place and Path(place).resolve().is_relative_to(folder) for place in places)
