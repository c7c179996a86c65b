"""Train one round by DP-SGD: clip the gradient of each unit (such as a patient), add the gradients up, and add noise.

Autograd computes each unit's gradient from the unit's images alone, so every network and loss can be used in which
images do not influence each other. Opacus only counts the cost (:mod:`fairflare.privacy.ledger`); the tests compare
these steps with those of Opacus.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fairflare.base.checks import group_by_key
from fairflare.base.site_data import SiteData
from fairflare.methods.base.local_loop import Trained, check_finite, continue_optimizer
from fairflare.methods.base.site_run import SiteRun
from fairflare.methods.base.training import LocalTraining
from fairflare.privacy.secret import SecretDraws

log = logging.getLogger(__name__)
MOMENTS = "private_optimizer"  # moments of noised gradients; those of a training without noise are never continued


@dataclass(frozen=True)
class PrivateUnits:
    """Hold the units of a training list (patients, volumes or images), which the privacy guarantee protects.

    Attributes:
        kind: ``patient``, ``volume`` or ``image``; ``case``: some images name a patient, and some do not.
        members: numbers of the images of each unit.
    """

    kind: str
    members: Sequence[Sequence[int]]

    @classmethod
    def find(cls, data: SiteData, split: str = "training") -> PrivateUnits:
        """Return the units of a training list that privacy protects: patients wherever the data name them."""
        cases = data.cases(split) or [("image", str(k)) for k in range(data.num_samples(split))]
        members = group_by_key((case, number) for number, case in enumerate(cases))
        kinds = {case[0] if isinstance(case, tuple) else "case" for case in cases}
        return cls(kinds.pop() if len(kinds) == 1 else "case", list(members.values()))

    def plan(self, training: LocalTraining) -> tuple[float, int]:
        """Return the probability that a unit is in a batch, and the number of steps in a round."""
        each = math.ceil(len(self.members) / training.batch_size)
        return 1 / each, training.local_steps or training.local_epochs * each


@dataclass
class PrivateLoop:
    """Train a model for one round by DP-SGD (private gradients), with a method's settings, loss and optimizer.

    Args:
        half: the method's site half, the part that runs at a site.
        run: the server's task that this site performs, with the site's data.
        model: the network, which is trained in place; only its trained tensors change.
        noise, clip: noise multiplier, and the norm that the gradient of a unit is clipped to.
        images: largest number of images of a drawn unit that are used in a step.
        draws: makes the secret draws of a step.

    Source:
        Abadi et al., CCS 2016, Algorithm 1, with Poisson draws and the expected batch.
    """

    half: LocalTraining
    run: SiteRun
    model: torch.nn.Module
    noise: float
    clip: float
    images: int = 1
    draws: Callable[[], SecretDraws] = SecretDraws

    def train(self, units: PrivateUnits) -> Trained:
        """Train for the round's fixed number of steps, and restore every tensor that is not trained.

        Raises:
            NotFinite: the trained model is not finite.
        """
        training, run, model = self.half, self.run, self.model
        before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        torch.manual_seed(run.seed)  # seeds only dropout, which need not be secret
        model.train()
        training.begin_round(run, model)
        optimizer = continue_optimizer(training, run, model, MOMENTS)
        chance, steps = units.plan(training)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for _ in range(steps):
            draws = self.draws()
            drawn = draws.draw(len(units.members), chance)
            most = iter(range(getattr(training, "gradients", 1)))  # further gradients in a step would not be counted
            training.step(
                run, model, optimizer, partial(self._set_gradients, trained, units, chance, drawn, draws, most)
            )
        names = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        for name, tensor in model.state_dict().items():  # norms' statistics would reveal images without noise
            if name not in names:
                tensor.copy_(before[name])
        check_finite(run, model)
        if training.keep_optimizer_state:
            run.store.save(MOMENTS, run.current_round, optimizer.state_dict())
        return Trained([], steps, run.data.num_samples("training"))

    def _set_gradients(
        self,
        trained: Sequence[torch.nn.Parameter],
        units: PrivateUnits,
        chance: float,
        drawn: Sequence[int],
        draws: SecretDraws,
        most: Iterator[int],
    ) -> torch.Tensor:
        """Set each gradient: the drawn units' clipped gradients, summed, with noise, over their expected number.

        Returns:
            0 in place of the loss, which is not measured.
        """
        next(most)
        total = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in trained]
        for number in drawn:
            try:
                gradients = self._unit_gradients(trained, draws.some(units.members[number], self.images), draws)
            except ValueError as error:  # an unreadable image; a failed round would reveal one patient
                log.warning("site %s: a %s counts as one without a gradient: %s", self.run.site, units.kind, error)
                continue
            norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
            if not math.isfinite(norm):
                continue  # a unit without a gradient counts as one with a gradient of 0
            for summed, gradient in zip(total, gradients, strict=True):
                summed += gradient.double() * min(1.0, self.clip / (norm + 1e-6))
        for parameter, summed in zip(trained, total, strict=True):
            noise = torch.from_numpy(draws.noise(parameter.numel())).view(parameter.shape).to(parameter.device)
            noised = summed + self.noise * self.clip * noise
            parameter.grad = (noised / (len(units.members) * chance)).to(parameter.dtype)
        return torch.zeros(())

    def _unit_gradients(
        self, trained: Sequence[torch.nn.Parameter], images: Sequence[int], draws: SecretDraws
    ) -> list[torch.Tensor]:
        """Return a unit's gradient of each parameter, summed over the unit's images."""
        seed = int(draws.uniform(1)[0] * 2**32)
        inputs, targets = next(iter(self.run.data.chosen("training", images, seed, self.half.augment)))
        self.run.batch, inputs = list(images), self.run.drop_channels(inputs, seed)
        loss = self.half.loss(self.run, self.model, self.run.on_device(inputs), self.run.on_device(targets))
        # Detached, as the zeros of an older PyTorch for an unused parameter require gradients.
        return [g.detach() for g in torch.autograd.grad(loss * len(images), trained, materialize_grads=True)]
