"""A FLARE Recipe for each method; ``docs/recipes.md`` shows them at work.

Made by tools/write_recipes.py; change the declarations and run it again.
"""

from fairflare.flare.environments import PocEnv
from fairflare.flare.recipes import FairRecipe
from fairflare.flare.script_recipe import ScriptRecipe
from fairflare.recipes.bsm_fl import BSMFLRecipe
from fairflare.recipes.bsm_kd import BSMKDRecipe
from fairflare.recipes.fed_avg import FedAvgRecipe
from fairflare.recipes.fed_ism import FedISMRecipe
from fairflare.recipes.fed_ism_plus_l import FedISMPlusLRecipe
from fairflare.recipes.fed_ism_plus_s import FedISMPlusSRecipe
from fairflare.recipes.fed_lwr import FedLWRRecipe
from fairflare.recipes.fed_lwr_cosine import FedLWRCosineRecipe
from fairflare.recipes.fed_lwr_last_layer import FedLWRLastLayerRecipe
from fairflare.recipes.fed_mas import FedMASRecipe
from fairflare.recipes.fed_mrl import FedMRLRecipe
from fairflare.recipes.fed_prox import FedProxRecipe

__all__ = [
    "BSMFLRecipe",
    "BSMKDRecipe",
    "FairRecipe",
    "FedAvgRecipe",
    "FedISMPlusLRecipe",
    "FedISMPlusSRecipe",
    "FedISMRecipe",
    "FedLWRCosineRecipe",
    "FedLWRLastLayerRecipe",
    "FedLWRRecipe",
    "FedMASRecipe",
    "FedMRLRecipe",
    "FedProxRecipe",
    "PocEnv",
    "ScriptRecipe",
]
