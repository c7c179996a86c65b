"""A FLARE Recipe for each method; ``docs/recipes.md`` shows them at work.

Made by tools/write_recipes.py; change the declarations and run it again.
"""

from fairflare.flare.environments import PocEnv
from fairflare.flare.recipes import FairRecipe
from fairflare.flare.script_recipe import ScriptRecipe
from fairflare.recipes.afl import AFLRecipe
from fairflare.recipes.bsm_fl import BSMFLRecipe
from fairflare.recipes.bsm_kd import BSMKDRecipe
from fairflare.recipes.cffl import CfflRecipe
from fairflare.recipes.cgsv import CgsvRecipe
from fairflare.recipes.creff import CreffRecipe
from fairflare.recipes.crt import CRTRecipe
from fairflare.recipes.ditto import DittoRecipe
from fairflare.recipes.fair_fed import FairFedRecipe
from fairflare.recipes.fed_avg import FedAvgRecipe
from fairflare.recipes.fed_bn import FedBNRecipe
from fairflare.recipes.fed_ce import FedCERecipe
from fairflare.recipes.fed_ga import FedGARecipe
from fairflare.recipes.fed_ism import FedISMRecipe
from fairflare.recipes.fed_ism_plus_l import FedISMPlusLRecipe
from fairflare.recipes.fed_ism_plus_s import FedISMPlusSRecipe
from fairflare.recipes.fed_lc import FedLCRecipe
from fairflare.recipes.fed_lwr import FedLWRRecipe
from fairflare.recipes.fed_lwr_cosine import FedLWRCosineRecipe
from fairflare.recipes.fed_lwr_last_layer import FedLWRLastLayerRecipe
from fairflare.recipes.fed_mas import FedMASRecipe
from fairflare.recipes.fed_mrl import FedMRLRecipe
from fairflare.recipes.fed_nova import FedNovaRecipe
from fairflare.recipes.fed_prox import FedProxRecipe
from fairflare.recipes.ldam import LdamRecipe
from fairflare.recipes.logit_adjustment import LogitAdjustmentRecipe
from fairflare.recipes.moon import MoonRecipe
from fairflare.recipes.q_fed_avg import QFedAvgRecipe
from fairflare.recipes.solo import SoloRecipe

__all__ = [
    "AFLRecipe",
    "BSMFLRecipe",
    "BSMKDRecipe",
    "CRTRecipe",
    "CfflRecipe",
    "CgsvRecipe",
    "CreffRecipe",
    "DittoRecipe",
    "FairFedRecipe",
    "FairRecipe",
    "FedAvgRecipe",
    "FedBNRecipe",
    "FedCERecipe",
    "FedGARecipe",
    "FedISMPlusLRecipe",
    "FedISMPlusSRecipe",
    "FedISMRecipe",
    "FedLCRecipe",
    "FedLWRCosineRecipe",
    "FedLWRLastLayerRecipe",
    "FedLWRRecipe",
    "FedMASRecipe",
    "FedMRLRecipe",
    "FedNovaRecipe",
    "FedProxRecipe",
    "LdamRecipe",
    "LogitAdjustmentRecipe",
    "MoonRecipe",
    "PocEnv",
    "QFedAvgRecipe",
    "ScriptRecipe",
    "SoloRecipe",
]
