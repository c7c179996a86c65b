r"""Define CFFL: the better a site's own model is, the larger the share of the round's change that the site is sent.

Lyu et al., "Collaborative Fairness in Federated Learning", 2020, and the authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from fairflare.base.settings import Positive, Share, settings
from fairflare.core.aggregation.entries import add_entries, largest_overall, pack_entries
from fairflare.core.aggregation.fair_rules import finite_or_mean
from fairflare.core.aggregation.reputations import cffl_reputations, cffl_shares, whole
from fairflare.core.states import difference
from fairflare.core.weighting import normalise
from fairflare.methods.base.catalog import Method
from fairflare.methods.base.home import BUFFERS_STAY, OwnModel, buffers
from fairflare.methods.base.local_loop import Trained
from fairflare.methods.base.reports import VALIDATION, Field
from fairflare.methods.base.rule import RoundInputs, State, Steps, Weighing, sample_weights
from fairflare.methods.base.saved import Saved
from fairflare.methods.base.training import LocalTraining, SiteRun
from fairflare.methods.parts.downloads import Downloads
from fairflare.methods.parts.probes import ReportsScore, score

SENT = "sent"  # name under which a site stores its sent update, of which the server sends a part back


@settings
class ClippedUpdates(ReportsScore, LocalTraining):
    """Train the site's own model, clip every entry of its change, and report the resulting model's metric (CFFL).

    The site keeps its model with the clipped update. In the next round it adds the entries that the server sends, minus
    its own update's part in them. Buffers (the batch norms' statistics) stay at the site, as trained.

    Args:
        grad_clip: largest change of a parameter in a round, ``> 0``.

    Source:
        Lyu et al., 2020; ``grad_clip``: the authors' code.
    """

    grad_clip: Positive = 0.01

    @property
    def home(self) -> CollaborativeModel:
        return CollaborativeModel(self, buffers, BUFFERS_STAY)

    def train(self, run: SiteRun, model: torch.nn.Module) -> Trained:
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trained = super().train(run, model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                moved = (parameter - before[name]).clamp_(-self.grad_clip, self.grad_clip)
                parameter.copy_(before[name] + moved)
        return trained

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        return {"own_metric": score(self, run, model, "validation")}


class CollaborativeModel(OwnModel):
    """Store a site's CFFL model: add its clipped update, then the server's entries minus the site's part in them."""

    def hand_in(self, run: SiteRun, start: State, local: State) -> tuple[State, State]:
        most = self.half.grad_clip
        # Rounding may make the difference of two numbers slightly larger than the clipped change.
        update = {name: tensor.clamp(-most, most) for name, tensor in difference(local, start).items()}
        run.store.save(SENT, run.current_round, update)
        return update, local

    def take(self, run: SiteRun, last: State, download: State, entry: Mapping[str, Any]) -> State:
        sent = run.store.load_at(SENT, run.current_round - 1)
        # Without its stored update (damaged), the site cannot subtract its own part, which would then count twice.
        return last if sent is None else add_entries(last, download, sent, float(entry["own_weight"]))


@settings
class CFFL(Downloads, Steps):
    r"""Send sites entries of the round's change in proportion to their reputations c (CFFL).

    .. math:: x_k = \frac{v_k}{\sum_j v_j}, \quad c \leftarrow \tfrac12 c + \tfrac12 \widehat{\sinh(\alpha x)}, \quad
              w \leftarrow w + \sum_k \frac{n_k}{\sum_j n_j} \Delta_k

    over the reputable sites, v the metric of a site's own model on its validation images. A site with c below
    ``c_th`` / (number of reputable sites) is not reputable any more: its update does not count and it is sent nothing.
    A reputable site is sent the :math:`\lfloor (c_k / \max c)(n_k / \max n) D \rfloor` largest entries of the change.
    An absent site keeps its c and is sent nothing in the round after; a new site starts with the mean c. A metric that
    its site withholds (``min_cases``) is replaced by the mean of the other sites' metrics.

    Args:
        cffl_alpha: alpha, ``> 0``; the authors' code lets it grow to 10.
        c_th: threshold, in (0, 1], over the number of reputable sites. The authors: 1/3, and 1/6 for unequal classes.
        cffl_rep: ``"paper"``: as above; ``"code"``: :math:`c \leftarrow \sinh(\alpha (0.8\,c + 0.2\,x))`, from 0, and
            n_k over the samples of *all* sites of the round, so that the common step shrinks when one is removed.

    Source:
        Lyu et al., 2020; the authors' code.
    """

    report_fields = (
        Field(
            "own_metric", low=0, high=1, nan_ok=True,
            doc="accuracy (or the primary metric) of the site's own trained model on its validation images",
            of=VALIDATION,
            measures="score",
        ),
    )  # fmt: skip

    cffl_alpha: Positive = 5.0
    c_th: Share = 1 / 3
    cffl_rep: Literal["paper", "code"] = "paper"

    _reputations = Saved(dict[str, float])
    _removed = Saved(list[str])

    def weigh(self, inputs: RoundInputs) -> Weighing:
        sites = [site for site in inputs.sites if site not in self._removed]
        if sites:
            self._update(inputs, sites)
            sites = [site for site in sites if site not in self._removed]
        sizes = inputs.moderated({site: float(inputs.num_samples[site]) for site in inputs.sites}, "number of samples")
        shares, step = dict.fromkeys(inputs.sites, 0.0), 1.0 if sites else 0.0
        if sites:
            shares |= cffl_shares({s: self._reputations[s] for s in sites}, {s: sizes[s] for s in sites})
            mean = normalise({site: float(inputs.num_samples[site]) for site in sites})
            weights = inputs.remembered({**dict.fromkeys(inputs.sites, 0.0), **mean})
            if self.cffl_rep == "code":
                step = math.fsum(sample_weights(inputs)[site] for site in sites)
        else:  # no site is reputable, so no update counts
            weights = dict.fromkeys(inputs.sites, 1 / len(inputs.sites))
        self.remember(inputs, shares, {site: step * weight for site, weight in weights.items()})
        details = {"reputation": dict(self._reputations), "removed": list(self._removed), "share": shares}
        self.step = None if step == 1 else step  # with None, the result has the same bits as the plain mean
        return Weighing(sites=weights, details=details)

    def _update(self, inputs: RoundInputs, sites: list[str]) -> None:
        """Update the reputations of the round's sites, and remove sites whose reputation is below the threshold."""
        known = {site: value for site, value in self._reputations.items() if site not in self._removed}
        new = 0.0 if self.cffl_rep == "code" else 1 / len(sites)
        entry = sum(known.values()) / len(known) if known else new
        before = {site: known.get(site, entry) for site in sites}
        metrics = {site: inputs.reports[site]["own_metric"] for site in sites}
        # A site that withholds its metric (too few cases) gets the mean of the other sites' metrics, not a bad metric.
        mean = finite_or_mean(metrics)
        metrics |= {site: mean[site] for site in sites if "own_metric" in inputs.suppressed.get(site, ())}
        self._reputations |= cffl_reputations(before, metrics, self.cffl_alpha, self.cffl_rep)
        reputable = whole({site: c for site, c in self._reputations.items() if site not in self._removed})
        low = [site for site in sites if reputable[site] < self.c_th / len(reputable)]
        self._removed = [] if len(low) == len(reputable) else sorted([*self._removed, *low])
        self._reputations |= reputable
        self._reputations |= whole({site: c for site, c in reputable.items() if site not in self._removed})

    def part(self, change: State, share: float) -> dict[str, torch.Tensor]:
        total = sum(change[name].numel() for name in change)
        parts: dict[str, torch.Tensor] = {}
        for name, mask in largest_overall(change, math.floor(share * total)).items():
            parts |= pack_entries(name, change[name], mask)
        return parts


METHODS = [
    Method(
        name="cffl",
        title="CFFL",
        summary="every site is sent as much of the change as its own model is good",
        rule=CFFL,
        training=ClippedUpdates,
        group="own",
        source="Lyu et al., 2020",
    )
]
