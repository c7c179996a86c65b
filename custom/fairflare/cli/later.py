"""Delay the import of large packages until their first use, since most command lines need no tensors."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from threading import RLock
from types import ModuleType
from typing import Any

#: The packages that take longest to import; many files of this package import them at the top.
LARGE = ("torch", "monai", "scipy")
LOCKS = {name: RLock() for name in LARGE}


class Later(ModuleType):
    """Stand in for a package, which is imported at the first use of one of its attributes."""

    def __getattr__(self, name: str) -> Any:
        with LOCKS[self.__name__]:
            if type(self) is Later:
                self.__class__ = ModuleType  # type: ignore[assignment]
                vars(self)["__spec__"].loader.exec_module(self)
        return getattr(self, name)


class ModulesOfLater:
    """Find modules of a package whose import was delayed, and import the package itself before such a module.

    Python holds a lock over all imports while it asks for a spec, so the package is imported only when the module is
    made: a thread that imported the package under that lock would wait for ever for a module that another thread is
    importing.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a spec of a delayed package's module; importing it imports the package first."""
        delayed = type(sys.modules.get(name.partition(".")[0])) is Later
        return ModuleSpec(name, self, loader_state=path) if delayed else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the package, and return its module, which that import may have loaded already.

        Raises:
            ModuleNotFoundError: the package has no such module.
        """
        assert sys.modules[spec.name.partition(".")[0]].__version__  # a use, which imports the package
        if (module := sys.modules.get(spec.name)) is not None:
            spec.loader_state = (module.__spec__, True)
            return module
        spec_of_file = PathFinder.find_spec(spec.name, spec.loader_state)
        if spec_of_file is None:
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)
        spec.loader_state = (spec_of_file, False)
        return module_from_spec(spec_of_file)

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, and execute the module unless it is loaded already."""
        assert module.__spec__ is not None
        module.__spec__, loaded = module.__spec__.loader_state
        if not loaded:
            module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]


def import_later() -> None:
    """Delay the import of each package of :data:`LARGE` until something of the package is used."""
    for name in LARGE:
        spec = None if name in sys.modules else find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            sys.modules[name] = package = Later(name)
            package.__spec__, package.__file__, package.__path__ = spec, spec.origin, spec.submodule_search_locations
    sys.meta_path.insert(0, ModulesOfLater())
