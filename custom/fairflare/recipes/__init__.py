"""The import path of the recipes; see :mod:`fairflare.flare.recipes` and :mod:`fairflare.flare.script_recipe`."""

from fairflare.flare.recipes import FairRecipe, FedAvgRecipe, FedLWRRecipe
from fairflare.flare.script_recipe import ScriptRecipe

__all__ = ["FairRecipe", "FedAvgRecipe", "FedLWRRecipe", "ScriptRecipe"]
