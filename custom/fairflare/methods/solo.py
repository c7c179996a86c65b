"""Define Solo, in which every site trains alone: the reference for the benefit of a federation."""

from __future__ import annotations

from fairflare.base.settings import settings
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import Home, every_tensor
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg


@settings
class SoloTraining(LocalTraining):
    """Train for ``num_rounds`` times ``local_epochs`` epochs a model that stays at the site as a whole (Solo).

    Every site starts from the common initial model. With one site, Solo equals FedAvg bit for bit.
    """

    @property
    def home(self) -> Home:
        return Home(self, every_tensor, "the whole model: no update is sent, only metrics and counts")


METHODS = [
    Method(
        name="solo",
        title="Solo",
        summary="every site trains by itself, nothing is averaged",
        rule=FedAvg,
        training=SoloTraining,
        group="own",
        source="the baseline of Yan et al., MICCAI 2024",
    )
]
