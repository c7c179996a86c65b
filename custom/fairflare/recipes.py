"""A FLARE Recipe for each method: ``FedAvgRecipe``, ``FedISMRecipe`` ...; ``docs/recipes.md`` shows them at work.

The classes of single methods are made when they are asked for, from the settings that the method declares; see
:mod:`fairflare.flare.export.method_recipes`.
"""

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


def __dir__() -> list[str]:
    return sorted([*_ALWAYS, *class_names(), "__all__", "__doc__", "__name__"])


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted([*_ALWAYS, *class_names()])
    if name in globals():
        return globals()[name]
    methods = {} if name.startswith("_") else class_names()
    if name not in methods:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = make_class(name, methods[name])
    return made
