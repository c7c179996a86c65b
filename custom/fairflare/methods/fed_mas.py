r"""Fed-MAS: aggregation by rescue factors, measured against a frozen self-supervised network.

Elbatel et al., "Federated Model Aggregation via Self-Supervised Priors for Highly Imbalanced Medical Image
Classification", DeCaF @ MICCAI 2023. For classes with a long tail.

A round, in the paper's order: each site measures by class how far the received model's projected features are from
those of a frozen network that all sites hold (w, Eqs. 1-2); trains with balanced softmax and the same distance as
a second loss (Eq. 4), gathering the distances on the way (w^); and reports one number, RF = sum_c w_c w^_c (Eq. 3).
The server averages in proportion to RF (Eq. 5).

The halves' switches are the paper's ablations: ``mas=False`` is "BSM with KD", and with ``lambda_f=0`` on top BSM-FL.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fairflare.core.priors import RF_MODES, RunningClassMean, prior_distance, rescue_factor
from fairflare.core.weighting import rescue_weights
from fairflare.methods.base import (
    FairAggregator,
    Field,
    LocalTraining,
    Method,
    RoundInputs,
    SiteError,
    SiteRun,
    Weighing,
    sample_weights,
)
from fairflare.methods.fed_avg import FedAvg

if TYPE_CHECKING:
    from fairflare.tasks.priors import PriorNetwork

log = logging.getLogger(__name__)

RF_SOURCES = ("prior", "supervised")
MAX_RESCUE_FACTOR = 16e6  # 16 E |C|, for a million of epochs times classes


# ------------------------------------------------------------------------------------------------ site half


class RescueTraining(LocalTraining):
    r"""Fed-MAS, site half: training towards a frozen prior network, and a report of the rescue factor.

    .. math:: L = L_{sup} + \lambda_f\, \bar\ell_f, \qquad RF = \sum_{c \in C_k} w_c\, \hat w_c

    w: mean distance by class of the *received* model, in evaluation mode, without augmentation, over all training
    images. w^: the same while training, of the forward pass in front of each step, a mean for each epoch, added over
    the epochs. Both stay at the site; RF and the prior's fingerprint leave it.

    The prior's features of the images as they are, without augmentation, are computed once and kept (memory and state
    folder, 4 bytes a feature). With ``augment`` the distance is then from the features of the changed image to the
    prior's of the unchanged one; ``cache_features=False`` runs the prior on every changed image, as the paper.

    The model needs ``embed``, ``head``, ``project`` and ``projector``: set ``projector_dim`` of the task.

    Args:
        lambda_f: weight of the distance in the loss, finite and ``>= 0``. 0 without ``mas`` at the server: no prior.
        prior: checkpoint of the prior network, unless the site's own file names one with ``"prior"``; ``None``: the
            packaged one (for ``prior_network="embedded"``).
        prior_network: its architecture, see :func:`fairflare.tasks.priors.load_prior`.
        prior_image_size: images are resized to this for the prior; ``None``: as the task has them.
        rf_mode: ``"paper"`` (Eq. 3), ``"code"`` (both divergences normalised first) or ``"class_mean"``.
        rf_source: ``"prior"``, or ``"supervised"``: RF of the criterion's losses, the authors' code for
            ``lambda_f=0``.
        cache_features: see above.
        args, kwargs: of :class:`LocalTraining`; see ``SETTINGS`` for the defaults of the paper.

    Source:
        Elbatel et al., sections 2.1 and 2.2; the authors' code where the paper is silent.
    """

    def __init__(
        self,
        *args: Any,
        lambda_f: float = 3.0,
        prior: str | None = None,
        prior_network: str = "embedded",
        prior_image_size: int | None = None,
        rf_mode: str = "paper",
        rf_source: str = "prior",
        cache_features: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        from fairflare.tasks.priors import check_image_size, check_prior_network

        if isinstance(lambda_f, bool) or not (math.isfinite(lambda_f) and lambda_f >= 0):
            raise ValueError(f"lambda_f must be finite and >= 0, got {lambda_f!r}")
        if prior is not None and (not isinstance(prior, str) or not prior):
            raise ValueError(f"prior must be a path, got {prior!r}")
        if rf_mode not in RF_MODES:
            raise ValueError(f"rf_mode must be one of {RF_MODES}, got {rf_mode!r}")
        if rf_source not in RF_SOURCES:
            raise ValueError(f"rf_source must be one of {RF_SOURCES}, got {rf_source!r}")
        self.lambda_f = lambda_f
        self.prior = prior
        self.prior_network = check_prior_network(prior_network)
        self.prior_image_size = check_image_size(prior_image_size)
        self.rf_mode = rf_mode
        self.rf_source = rf_source
        self.cache_features = bool(cache_features)
        # Of the process; one object may serve several sites.
        self._networks: dict[str | None, PriorNetwork] = {}
        self._caches: dict[str, FeatureCache] = {}
        self._forget()

    def _forget(self) -> None:
        self._network: PriorNetwork | None = None
        self._cache: FeatureCache | None = None
        self._before: torch.Tensor | None = None  # w
        self._during: RunningClassMean | None = None  # w^
        self._open_epoch = 0
        self._fresh = False  # the next loss is the one in front of a step

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        self._forget()
        weighed = bool(run.directives.get("rescue_factor"))
        if self.lambda_f > 0 or (weighed and self.rf_source == "prior"):
            self._network = self._open_prior(run, model)
            if self.cache_features and run.data.order("training") is not None:
                kept = self._caches.get(run.site)
                if kept is None or kept.fingerprint != self._network.fingerprint:
                    kept = self._caches[run.site] = FeatureCache(run, self._network)
                self._cache = kept
        if weighed:
            self._during = RunningClassMean(len(self._class_counts(run)))
        if weighed or self._cache is not None:
            self._look_at_all(run, model)

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._network is None and self._during is None:
            return super().loss(run, model, inputs, targets)
        features = model.embed(inputs)  # type: ignore[operator]
        outputs = model.head(features)  # type: ignore[operator]
        loss = self.criterion_loss(run, outputs, targets)
        gathered = None
        if self._network is not None:
            # A projector that nothing trains needs no gradient either.
            with torch.set_grad_enabled(self.lambda_f > 0):
                gathered = prior_distance(_project(model, features), self._prior_features(run, inputs))
            if self.lambda_f > 0:
                loss = loss + self.lambda_f * gathered.mean()
        if self._during is not None and self._fresh:
            if self.rf_source == "supervised":
                with torch.no_grad():
                    gathered = self.criterion_losses(run, outputs, targets)
            assert gathered is not None
            while self._open_epoch < run.epoch:
                self._during.end_epoch()
                self._open_epoch += 1
            self._during.add(gathered, targets)
        self._fresh = False
        return loss

    def step(
        self,
        run: SiteRun,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        self._fresh = True  # a step may look at the loss twice
        return super().step(run, model, optimizer, closure)

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        report: dict[str, Any] = {}
        if self._network is not None:
            report["prior"] = self._network.fingerprint
        if self._during is not None and self._before is not None:
            self._during.end_epoch()
            counts = self._class_counts(run)
            during = self._during.total(self._before)
            factor = rescue_factor(self._before, during, counts, self.rf_mode)
            report["rescue_factor"] = factor
            run.store.save(
                "divergence",
                run.current_round,
                {"before": self._before, "during": during, "counts": counts, "rescue_factor": factor},
            )
        self._forget()
        return report

    # -- pieces

    def _look_at_all(self, run: SiteRun, model: torch.nn.Module) -> None:
        """One pass over the images as they are: w of the received model, and the features that are not known yet."""
        from fairflare.tasks.base import evaluating

        order = run.data.order("training")
        measured = None if self._during is None else RunningClassMean(self._during.num_classes)
        seen = 0
        with evaluating(model):
            for inputs, targets in run.data.batches("training", batch_size=self.batch_size):
                run.batch = None if order is None else order[seen : seen + len(inputs)]
                seen += len(inputs)
                if self._cache is not None and self._network is not None and run.batch is not None:
                    self._cache.update(run, self._network, run.batch, inputs)
                if measured is None:
                    continue
                inputs, targets = inputs.to(run.device), targets.to(run.device)
                features = model.embed(inputs)  # type: ignore[operator]
                if self.rf_source == "supervised":
                    values = self.criterion_losses(run, model.head(features), targets)  # type: ignore[operator]
                else:
                    values = prior_distance(_project(model, features), self._prior_features(run, inputs))
                measured.add(values, targets)
        run.batch = None
        if self._cache is not None:
            self._cache.save(run)
        self._before = None if measured is None else measured.means()

    def _prior_features(self, run: SiteRun, inputs: torch.Tensor) -> torch.Tensor:
        """(n, d) of the batch: known ones where there are, else of the inputs as they come."""
        assert self._network is not None
        if self._cache is not None and run.batch is not None:
            return self._cache.features[run.batch].to(run.device)
        return self._network(inputs)

    def _open_prior(self, run: SiteRun, model: torch.nn.Module) -> PriorNetwork:
        from fairflare.tasks.priors import load_prior

        file = run.settings.get("prior", self.prior)
        if file is not None and (not isinstance(file, str) or not file):
            raise SiteError(
                f"site {run.site!r}: 'prior' in the site's fairflare.json must be a path, got {file!r}",
                public=f"site {run.site!r}: key 'prior' in the site file is not usable",
            )
        if file not in self._networks:
            try:
                self._networks[file] = load_prior(self.prior_network, file, self.prior_image_size)
            except ValueError as error:
                raise SiteError(
                    f"site {run.site!r}: {error}",
                    public=f"site {run.site!r}: its checkpoint of the prior network {self.prior_network!r} cannot be "
                    "used (details in the site's log)",
                ) from error
        network = self._networks[file].to(run.device)
        projector = getattr(model, "projector", None)
        if projector is None or not all(hasattr(model, name) for name in ("embed", "head", "project")):
            raise SiteError(
                f"site {run.site!r}: Fed-MAS needs a projection head next to the classifier; set projector_dim="
                f"{network.width} of the classification task"
            )
        width = _last_width(projector)
        if width is not None and width != network.width:
            raise SiteError(
                f"site {run.site!r}: the prior network {network.name!r} has {network.width} features, the projection "
                f"head {width}; set projector_dim={network.width} of the task, or choose another prior_network"
            )
        return network

    def _class_counts(self, run: SiteRun) -> torch.Tensor:
        counts = run.data.class_counts("training")
        if counts is None:
            raise SiteError(
                f"site {run.site!r}: Fed-MAS measures by class, and the task's data have no classes; choose a "
                "classification task"
            )
        return counts


class FeatureCache:
    """The prior's features of a site's training images, each with a checksum of its image.

    Kept in memory and, because the next round may be another process, in the site's state folder. An image whose
    checksum differs (the data folder was changed) is computed again.
    """

    def __init__(self, run: SiteRun, network: PriorNetwork) -> None:
        self.fingerprint = network.fingerprint
        count = run.data.num_samples("training")
        self.checks = torch.full((count,), -1, dtype=torch.int64)
        self.features = torch.zeros(count, network.width)
        self.computed = 0  # images that went through the prior
        self._changed = False
        kept = run.store.load_before("prior_features", run.current_round)
        if kept is not None and kept["fingerprint"] == self.fingerprint and len(kept["checks"]) == count:
            self.checks, self.features = kept["checks"], kept["features"]

    def update(self, run: SiteRun, network: PriorNetwork, numbers: list[int], inputs: torch.Tensor) -> None:
        """Computes what is not known of these images, given without augmentation."""
        checks = torch.tensor([zlib.crc32(image.contiguous().numpy().tobytes()) for image in inputs])
        chosen = torch.tensor(numbers)
        new = self.checks[chosen] != checks
        if not bool(new.any()):
            return
        found = network(inputs[new].to(run.device)).float().cpu()
        if not bool(torch.isfinite(found).all()):
            raise SiteError(f"site {run.site!r}: the prior network gives features that are not finite")
        self.checks[chosen[new]] = checks[new]
        self.features[chosen[new]] = torch.nn.functional.normalize(found, dim=1)
        self.computed += len(found)
        self._changed = True

    def save(self, run: SiteRun) -> None:
        """Writes the features if they are new."""
        if self._changed:
            value = {"fingerprint": self.fingerprint, "checks": self.checks, "features": self.features}
            run.store.save("prior_features", run.current_round, value)
            self._changed = False


def _project(model: torch.nn.Module, features: torch.Tensor) -> torch.Tensor:
    """The projections; a batch of one has no statistics, so batch norm then uses its running ones."""
    projector = model.projector
    assert isinstance(projector, torch.nn.Module)
    if len(features) > 1 or not projector.training:
        return model.project(features)  # type: ignore[operator]
    log.debug("a batch of one image: the projector's batch norm is not updated")
    projector.eval()
    try:
        return model.project(features)  # type: ignore[operator]
    finally:
        projector.train()


def _last_width(projector: torch.nn.Module) -> int | None:
    """Output width of a projector that ends in a linear layer."""
    layers = [module for module in projector.modules() if isinstance(module, torch.nn.Linear)]
    return layers[-1].out_features if layers else None


# ------------------------------------------------------------------------------------------------ server half


class FedMAS(FairAggregator):
    r"""Fed-MAS, server half: weights in proportion to the rescue factor.

    .. math:: a_k = RF_k / \sum_j RF_j

    A factor that is not a number counts as the mean of the others; all 0, or none a number: equal weights.

    Args:
        mas: False: weights by number of samples ("BSM with KD", Table 2); rescue factors are then not asked for.
        min_sites: see :class:`FairAggregator`.

    Raises:
        RuntimeError: (in :meth:`weigh`) the sites do not all hold the same prior network (names them).

    Source:
        Elbatel et al., Eq. (5).
    """

    report_fields = (
        Field("rescue_factor", low=0, high=MAX_RESCUE_FACTOR, nan_ok=True, infinite_ok=True, required=False),
        Field("prior", "text", required=False),
    )

    def __init__(self, mas: bool = True, min_sites: int = 1) -> None:
        super().__init__(min_sites)
        self.mas = bool(mas)

    def directives(self, current_round: int, num_rounds: int) -> dict[str, Any]:
        return {"rescue_factor": True} if self.mas else {}

    def check_report(self, report: dict[str, Any], site: str) -> dict[str, Any]:
        if self.mas and report["rescue_factor"] is None:
            Field("rescue_factor").read(report, site)  # says what is missing
        return report

    def weigh(self, inputs: RoundInputs) -> Weighing:
        self._check_priors(inputs)
        if not self.mas:
            return Weighing(sites=sample_weights(inputs))
        return Weighing(sites=rescue_weights({site: inputs.reports[site]["rescue_factor"] for site in inputs.sites}))

    def _check_priors(self, inputs: RoundInputs) -> None:
        """Distances to different networks cannot be compared."""
        holders: dict[str, list[str]] = {}
        for site in inputs.sites:
            holders.setdefault(inputs.reports[site]["prior"] or "none", []).append(site)
        if len(holders) > 1:
            found = "; ".join(f"{name}: {', '.join(sites)}" for name, sites in sorted(holders.items()))
            raise RuntimeError(
                f"Fed-MAS, round {inputs.current_round}: the sites do not hold the same prior network (fingerprint: "
                f"sites): {found}. Give every site the same checkpoint file ('prior' in its fairflare.json) and the "
                "same version of fairflare"
            )


# Of the paper (HyperKvasir) and, where it is silent, its code.
SETTINGS: dict[str, Any] = {
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "schedule": "cosine",
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "batch_size": 64,
    "local_epochs": 10,
    "max_grad_norm": 5.0,
    "keep_optimizer_state": False,
    "criterion": "balanced_softmax",
    "augment": True,
}
LEARNS: dict[str, Any] = {
    "phantom": "endoscopy",
    "phantom_sites": 4,
    "partition": "dirichlet",
    "alpha": 0.5,
    "corrupted_sites": 0,
}
WITH_PROJECTOR = {**LEARNS, "projector_dim": 96}  # of the packaged prior; MoCo's ResNet-50: 2048
_COMMON: dict[str, Any] = {
    "site": SETTINGS,
    "source": "Elbatel et al., DeCaF @ MICCAI 2023",
    "task": "classification",
    # A narrow network, few images and rounds: Adam gets further in them.
    "small": {
        "optimizer": "adam",
        "learning_rate": 1e-3,
        "schedule": "constant",
        "weight_decay": 0.0,
        "batch_size": 32,
        "local_epochs": 2,
    },
    "num_sites": 4,
    "num_rounds": 5,
}
METHODS = [
    Method(
        name="fed_mas",
        title="Fed-MAS",
        summary="sites far from a frozen self-supervised network weigh more; for long-tailed classes",
        aggregator=FedMAS,
        training=RescueTraining,
        learns=WITH_PROJECTOR,
        **_COMMON,
    ),
    Method(
        name="bsm_kd",
        title="BSM + KD",
        summary="Fed-MAS's local training, weights by number of samples (ablation: no MAS)",
        aggregator=FedMAS,
        training=RescueTraining,
        server={"mas": False},
        learns=WITH_PROJECTOR,
        **_COMMON,
    ),
    Method(
        name="bsm_fl",
        title="BSM-FL",
        summary="balanced softmax at the sites, FedAvg at the server",
        aggregator=FedAvg,
        training=LocalTraining,
        learns=LEARNS,
        **_COMMON,
    ),
]
