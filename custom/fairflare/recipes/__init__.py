"""The import path of the recipes; see :mod:`fairflare.flare.recipes`."""

from fairflare.flare.recipes import FairRecipe, FedAvgRecipe, FedLWRRecipe

__all__ = ["FairRecipe", "FedAvgRecipe", "FedLWRRecipe"]
