"""Delay the import of large packages until their first use, since most command lines need no tensors."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import RLock
from types import ModuleType
from typing import Any

#: The packages that take longest to import; many files of this package import them at the top.
LARGE = ("torch", "monai", "scipy")
LOCK = RLock()


class Later(ModuleType):
    """Stand in for a package, which is imported at the first use of one of its attributes."""

    def __getattr__(self, name: str) -> Any:
        with LOCK:
            if type(self) is Later:
                self.__class__ = ModuleType  # type: ignore[assignment]
                vars(self)["__spec__"].loader.exec_module(self)
        return getattr(self, name)


class ModulesOfLater:
    """Find modules of a package whose import was delayed, by an import of the package itself first."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Import a delayed package; return the spec of its module only if the import loaded the module already."""
        package = sys.modules.get(name.partition(".")[0])
        if type(package) is not Later:
            return None
        package.__getattr__("__version__")
        if (module := sys.modules.get(name)) is None:
            return None
        module.__spec__ = ModuleSpec(name, self, loader_state=module.__spec__)  # type: ignore[arg-type]
        return module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that the package's import has loaded already."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec; the module is loaded already and is not executed again."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def import_later() -> None:
    """Delay the import of each package of :data:`LARGE` until something of the package is used."""
    for name in LARGE:
        spec = None if name in sys.modules else find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            sys.modules[name] = package = Later(name)
            package.__spec__, package.__file__, package.__path__ = spec, spec.origin, spec.submodule_search_locations
    sys.meta_path.insert(0, ModulesOfLater())
