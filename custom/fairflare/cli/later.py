"""Large packages that a command imports when it first uses them: most command lines are answered without tensors."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import RLock
from types import ModuleType
from typing import Any

#: Packages that take longest to import, and that much of the package names at the top of its files.
LARGE = ("torch", "monai", "scipy")
LOCK = RLock()


class Later(ModuleType):
    """Stand in for a package that is imported at the first use of anything in it."""

    def __getattr__(self, name: str) -> Any:
        with LOCK:
            if type(self) is Later:
                self.__class__ = ModuleType  # type: ignore[assignment]
                vars(self)["__spec__"].loader.exec_module(self)
        return getattr(self, name)


class ModulesOfLater:
    """Find a module of a package that is not imported yet: with the package, which may import the module too."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Import the package; say where the module is only if it is there now, which else would be run again."""
        package = sys.modules.get(name.partition(".")[0])
        if type(package) is not Later:
            return None
        package.__getattr__("__version__")
        if (module := sys.modules.get(name)) is None:
            return None
        module.__spec__ = ModuleSpec(name, self, loader_state=module.__spec__)  # type: ignore[arg-type]
        return module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that is there."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def import_later() -> None:
    """Let ``import torch`` and its like cost nothing before something of the package is used."""
    for name in LARGE:
        spec = None if name in sys.modules else find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            sys.modules[name] = package = Later(name)
            package.__spec__, package.__file__, package.__path__ = spec, spec.origin, spec.submodule_search_locations
    sys.meta_path.insert(0, ModulesOfLater())
