r"""Define FedRDN, in which each training image is normalised by the statistics of a random site.

Yan et al., "A Simple Data Augmentation for Feature Distribution Skewed Federated Learning", CVPR 2025.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fairflare.base.checks import refuse
from fairflare.base.settings import settings
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import Home
from fairflare.methods.base.reports import TRAINING, Field
from fairflare.methods.base.rule import RoundInputs, State, Weighing, read_reports
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining, SiteRun, refuse_at
from fairflare.methods.fed_avg import FedAvg

if TYPE_CHECKING:
    from fairflare.base.task import Task

NORM = "input_norm"
TOLD = "input_statistics"


@dataclass
class OwnStatistics(Home):
    """Measure the means and deviations of the site's training images once, and store them at the site."""

    def begin(self, run: SiteRun, model: torch.nn.Module, received: State) -> dict[str, torch.Tensor]:
        from fairflare.core.features.input_norm import pool_pixels

        state = super().begin(run, model, received)
        refuse_at(run.site, {
            "fed_rdn needs a network of FairFlare's tasks, with adapters=fed_rdn": f"{NORM}.running_mean" not in state,
        })  # fmt: skip
        if not int(state[f"{NORM}.num_batches_tracked"]):
            statistics = pool_pixels(run.data.batches("training", batch_size=self.half.batch_size))
            for name, value in zip(("running_mean", "running_var"), statistics or (), strict=False):
                state[f"{NORM}.{name}"] = value.to(state[f"{NORM}.{name}"])
            state[f"{NORM}.num_batches_tracked"] = torch.tensor(1)
        return state


@settings
class RandomStatistics(LocalTraining):
    r"""Train on images normalised by a random site's statistics, and test with the site's own statistics (FedRDN).

    .. math:: x' = (x - \mu_j) / \sigma_j

    by channel, with j drawn anew for each image and step, uniformly from all sites that have reported theirs, this
    one included; :math:`\mu, \sigma` are over all pixels of a site's training images. At first j is the site itself.

    Source:
        Yan et al., section 3.
    """

    @property
    def home(self) -> Home:
        return OwnStatistics(self, lambda model: [n for n in model.state_dict() if n.startswith(f"{NORM}.")], KEPT)

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        kind = getattr(getattr(task, "adapters", None), "kind", None)
        padded = getattr(task, "resize", "") == "pad" or getattr(task, "spacing", None) is not None
        refuse({
            f"fed_rdn normalises images in the network; the task has adapters={kind or 'none'}: set adapters=fed_rdn": (
                kind != "fed_rdn"
            ),
            "fed_rdn measures all pixels, also the edge that resize=pad (of volumes spacing) puts around an image for "
            "classification; set resize to 'stretch' or 'crop', of volumes leave out spacing": (
                padded and getattr(task, "class_labels", False)
            ),
        })  # fmt: skip

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        norm: Any = model.get_submodule(NORM)
        sites = [site for site in run.directives.get(TOLD) or () if len(site[0]) == norm.num_features]
        norm.sites = torch.tensor(sites) if sites else None

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        norm: Any = model.get_submodule(NORM)
        return {"input_mean": norm.running_mean.tolist(), "input_std": norm.running_var.sqrt().tolist()}


KEPT = "mean and variance of the site's training images, by channel, with which it validates and tests"
REVEALS = "how bright the site's images are and how much they vary: its scanner, stain or population"


@settings
class FedRDN(FedAvg):
    """Average the sites' models, and send all sites the input statistics of each site, without its name (FedRDN).

    The statistics of an absent site are kept, so that the other sites go on drawing them.

    Source:
        Yan et al., section 3.
    """

    # Pictures lie in [0, 1], volumes may be standardised. A plan clips them at the percentiles 0.5 and 99.5, of which
    # none is farther from the mean than 14.2 standard deviations (Chebyshev).
    report_fields = (
        Field("input_mean", "vector", low=-15, high=15, of=TRAINING, home_ok=True, reveals=REVEALS,
              doc="mean of all pixels of the training images, by channel"),
        Field("input_std", "vector", low=0, high=15, of=TRAINING, home_ok=True, same_length_as="input_mean",
              reveals=REVEALS, doc="standard deviation of these pixels, by channel"),
    )  # fmt: skip
    directive_docs: ClassVar[dict[str, str]] = {
        TOLD: "means and deviations of the images of every site, by channel, without the sites' names; few sites can "
        "tell whose they are"
    }

    weighs: ClassVar[bool] = False
    _statistics = Saved(dict[str, list[list[float]]])

    def directives(self, current_round: int, num_rounds: int, sites: Sequence[str]) -> dict[str, Any]:
        return {TOLD: [self._statistics[site] for site in sorted(self._statistics)]}

    def weigh(self, inputs: RoundInputs) -> Weighing:
        reported = read_reports(inputs, "input_std")
        known = {site: stds for site, stds in reported.items() if stds and all(map(math.isfinite, stds))}
        lengths = [len(stds) for stds in known.values()]
        channels = max(lengths, key=lengths.count, default=0)  # the number at most sites
        alike = {s: stds for s, stds in known.items() if len(stds) == channels}
        by_channel = [inputs.moderated({s: stds[c] for s, stds in alike.items()}, "input_std") for c in range(channels)]
        for site in alike:
            self._statistics[site] = [inputs.reports[site]["input_mean"], [deviation[site] for deviation in by_channel]]
        return super().weigh(inputs)


METHODS = [
    Method(
        name="fed_rdn",
        title="FedRDN",
        summary="each training image is normalised by the brightness and contrast of a random site",
        rule=FedRDN,
        training=RandomStatistics,
        learns={"adapters": "fed_rdn"},
        keeps=("adapters",),
        group="local",
        source="Yan et al., CVPR 2025",
    )
]
