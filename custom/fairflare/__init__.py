"""FairFlare: fair federated learning for medical images on NVIDIA FLARE.

The names of this package are what programs may rely on (docs/api.md says how stable each is). They are imported when
they are first used, so that ``import fairflare`` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.4.0"

if TYPE_CHECKING:
    from fairflare.api import Comparison as Comparison
    from fairflare.api import Results as Results
    from fairflare.api import compare as compare
    from fairflare.api import describe as describe
    from fairflare.api import list_methods as list_methods
    from fairflare.api import run as run
    from fairflare.base.metric import Metric as Metric
    from fairflare.base.settings import Flag as Flag
    from fairflare.base.settings import NonNegative as NonNegative
    from fairflare.base.settings import Positive as Positive
    from fairflare.base.settings import PositiveInt as PositiveInt
    from fairflare.base.settings import settings as settings
    from fairflare.base.site_data import SiteData as SiteData
    from fairflare.base.task import Task as Task
    from fairflare.federation.plan.run_settings import RunSettings as RunSettings
    from fairflare.flare.export.environments import PocEnv as PocEnv
    from fairflare.flare.export.recipes import FairRecipe as Recipe
    from fairflare.methods.base.catalog import Method as Method
    from fairflare.methods.base.reports import Field as ReportField
    from fairflare.methods.base.rule import RoundInputs as RoundInputs
    from fairflare.methods.base.rule import Rule as Rule
    from fairflare.methods.base.rule import Weighing as AggregationWeights
    from fairflare.methods.base.training import LocalTraining as LocalTraining
    from fairflare.methods.base.training import SiteRun as SiteRun
    from fairflare.tasks.classification import ClassificationTask as ClassificationTask
    from fairflare.tasks.segmentation import SegmentationTask as SegmentationTask

#: Module of each public name, and the name there where it differs.
_PLACES = {
    **dict.fromkeys(("Comparison", "Results", "compare", "describe", "list_methods", "run"), "api"),
    **dict.fromkeys(("Flag", "NonNegative", "Positive", "PositiveInt", "settings"), "base.settings"),
    "AggregationWeights": "methods.base.rule:Weighing",
    "ClassificationTask": "tasks.classification",
    "LocalTraining": "methods.base.training",
    "Method": "methods.base.catalog",
    "Metric": "base.metric",
    "PocEnv": "flare.export.environments",
    "Recipe": "flare.export.recipes:FairRecipe",
    "ReportField": "methods.base.reports:Field",
    "RoundInputs": "methods.base.rule",
    "Rule": "methods.base.rule",
    "RunSettings": "federation.plan.run_settings",
    "SegmentationTask": "tasks.segmentation",
    "SiteData": "base.site_data",
    "SiteRun": "methods.base.training",
    "Task": "base.task",
}
# Written out, as type checkers do not compute it; a test compares it with the imports above.
__all__ = [
    "AggregationWeights", "ClassificationTask", "Comparison", "Flag", "LocalTraining", "Method", "Metric",
    "NonNegative", "PocEnv", "Positive", "PositiveInt", "Recipe", "ReportField", "Results", "RoundInputs", "Rule",
    "RunSettings", "SegmentationTask", "SiteData", "SiteRun", "Task", "compare", "describe", "list_methods", "run",
    "settings",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, other = _PLACES[name].partition(":")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), other or name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
