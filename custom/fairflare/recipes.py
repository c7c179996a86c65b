"""A FLARE Recipe for each method: ``FedAvgRecipe``, ``FedISMRecipe`` ...; ``docs/recipes.md`` shows them at work.

The classes of single methods are made when they are asked for, from the settings that the method declares; see
:mod:`fairflare.flare.export.method_recipes`.
"""

import warnings
from typing import Any

from fairflare.federation.plan.run_settings import RunSettings
from fairflare.flare.export.environments import PocEnv
from fairflare.flare.export.method_recipes import class_names, make_class
from fairflare.flare.export.recipes import FairRecipe
from fairflare.flare.export.script_recipe import ScriptRecipe
from fairflare.flare.export.stats_recipe import StatsRecipe

_ALWAYS = {
    "FairRecipe": FairRecipe,
    "PocEnv": PocEnv,
    "RunSettings": RunSettings,
    "ScriptRecipe": ScriptRecipe,
    "StatsRecipe": StatsRecipe,
}
#: Names of 0.2 and before, which go with the next release.
_OLD = {
    "CfflRecipe": "CFFLRecipe", "CgsvRecipe": "CGSVRecipe", "CreffRecipe": "CReFFRecipe", "LdamRecipe": "LDAMRecipe",
    "MoonRecipe": "MOONRecipe",
}  # fmt: skip


def __dir__() -> list[str]:
    return sorted([*_ALWAYS, *class_names(), "__all__", "__doc__", "__name__"])


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted([*_ALWAYS, *class_names()])
    if name in _OLD:
        text = f"{name} is called {_OLD[name]} now, as in the paper; the old name goes with fairflare 0.4"
        warnings.warn(f"fairflare.recipes.{text}", DeprecationWarning, stacklevel=2)
        name = _OLD[name]
    if name in globals():
        return globals()[name]
    methods = {} if name.startswith("_") else class_names()
    if name not in methods:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = make_class(name, methods[name])
    return made
