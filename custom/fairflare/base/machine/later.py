"""Delay the import of large packages until their first use, since most commands and trainings need few of them."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from threading import RLock
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"  # every optimizer imports it, and takes longer for that than for some rounds of training


class Later(ModuleType):
    """Stand in for a package, which is imported at the first use of one of its attributes."""

    def __getattr__(self, name: str) -> Any:
        with vars(self)["_importing"]:
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
        delayed = type(sys.modules.get(name.rpartition(".")[0])) is Later
        spec = PathFinder.find_spec(name, path) if delayed else None
        return spec and ModuleSpec(name, self, loader_state=spec)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the package, and return its module, which that import may have loaded already."""
        assert getattr(sys.modules[spec.name.rpartition(".")[0]], "__all__", True)  # a use, which imports the package
        loaded = sys.modules.get(spec.name)
        module = loaded or module_from_spec(spec.loader_state)
        spec.loader_state = module.__spec__, loaded is None
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, and execute the module unless it is loaded already."""
        spec: Any = module.__spec__
        if spec.loader is self:  # modules of torch's settings keep their own spec
            module.__spec__, new = spec.loader_state
            if new:
                module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]


def import_later(*names: str) -> None:
    """Delay the import of packages until something of them is used."""
    for name in names:
        above = find_spec(name.partition(".")[0])
        below = above is not None and above.name != name
        spec = PathFinder.find_spec(name, above.submodule_search_locations) if below and above else above
        if name not in sys.modules and spec is not None and spec.submodule_search_locations is not None:
            sys.modules[name] = package = Later(name)
            package.__spec__, package.__file__, package.__path__ = spec, spec.origin, spec.submodule_search_locations
            vars(package)["_importing"] = RLock()
    sys.meta_path.insert(0, ModulesOfLater())


def compile_later() -> None:
    """Delay the import of torch's compiler until something is compiled; optimizers only tell it what it must not trace.

    What they tell it is lost where it was not there; that matters only to a program that compiles an optimizer's step.
    """

    import_later(COMPILER)
    package: Any = sys.modules.get(COMPILER)
    if type(package) is Later:
        vars(package).update(
            graph_break=lambda *_, **__: None,
            # Torch's own functions say `wrapping=False`, when they are first called.
            disable=lambda *given, **more: (
                given[0]
                if more == {"wrapping": False}
                else [vars(package).pop("disable"), package.disable(*given, **more)][1]
            ),
        )
