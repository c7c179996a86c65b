r"""FedMRL: a fairness loss, a proximal coefficient for every site chosen by QMIX, weights from a self-organizing map.

Sahoo et al., "FedMRL: Data Heterogeneity Aware Federated Multi-agent Deep Reinforcement Learning for Medical Imaging",
MICCAI 2024. The published code neither runs nor follows the paper; this is the paper, read as ``docs/fed_mrl.md`` says.
Three parts that can be switched off alone:

- A, at the sites: the objective, :math:`\ell + \frac{\mu_h}{2} \lVert w - w^r \rVert^2 + \lambda (\ell - \bar F)^2`;
- B, at the server: weights from a self-organizing map of the local models;
- C, at the server: agents, one a site, that choose :math:`\mu_h`.

FedProx (Li et al., MLSys 2020) is part A's proximal term alone, and here too.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors.torch import load_file, save_file

from fairflare.core import losses
from fairflare.core.qmix import INITIAL_MU, MU_GRID, QMix, global_accuracy, label_entropy, observation, reward
from fairflare.core.som import SelfOrganizingMap, SomResult
from fairflare.methods.base import (
    FairAggregator,
    Field,
    LocalTraining,
    Method,
    ReportError,
    RoundInputs,
    SiteRun,
    SiteWeights,
    Weighing,
    sample_weights,
)
from fairflare.methods.fed_avg import FedAvg

POLICIES = ("qmix", "vdn", "fixed", "random")
MEANS = ("mean", "weighted", "sum")
FAIR_MODES = ("batch", "epoch")
_SUFFIX = ".safetensors"

# ------------------------------------------------------------------------------------------------ site halves


class ProximalTraining(LocalTraining):
    r"""FedProx, site half: :math:`\ell(w) + \frac{\mu}{2} \lVert w - w^r \rVert^2` over the trainable parameters.

    Args:
        mu: ``>= 0``. A value that the server sends for this site goes before this one; one that is negative or no
            number counts as 1e-5.
        args, kwargs: of :class:`LocalTraining`.

    Source:
        Li et al., MLSys 2020, Eq. (2).
    """

    def __init__(self, *args: Any, mu: float = 0.1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(mu, bool) or not (math.isfinite(mu) and mu >= 0):
            raise ValueError(f"mu must be finite and >= 0, got {mu!r}")
        self.mu = mu
        self._mu = mu
        self._received: dict[str, torch.Tensor] = {}

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        told = (run.directives.get("mu") or {}).get(run.site)
        self._mu = self.mu
        if told is not None:
            self._mu = float(told) if math.isfinite(told) and told >= 0 else INITIAL_MU
        self._received = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        own = self.criterion_loss(run, model(inputs), targets)
        return own + losses.proximal_term(model, self._received, self._mu)


class FairProximalTraining(ProximalTraining):
    r"""FedMRL, site half (part A).

    .. math:: J = \ell_b + \frac{\mu_h}{2} \lVert w - w^r \rVert^2 + \lambda (\ell_b - \bar F)^2

    The mean loss F of the sites comes from the server and is a constant of the round, so the first and third term have
    the gradient :math:`(1 + 2 \lambda (\ell_b - \bar F)) \nabla \ell_b`. Where it turns round (a site far better than
    the mean would be made worse), the factor stays at ``fair_clamp``. Round 0 has no fairness term.

    Args:
        use_fair: part A's fairness term.
        fair_weight: lambda, ``>= 0``.
        fair_clamp: least gradient factor; ``None``: the literal loss, without any limit.
        fair_max: largest one, ``> 0``.
        fair_mode: ``"batch"``: the factor follows each batch; ``"epoch"``: once a round from the mean loss of the
            received model over the whole training set.
        share_entropy: report the entropy of the labels (one number about the site's class balance); False: the server
            uses a neutral value.
        args, kwargs: of :class:`ProximalTraining`.

    Source:
        Sahoo et al., Eqs. (3), (6), (9).
    """

    def __init__(
        self,
        *args: Any,
        use_fair: bool = True,
        fair_weight: float = 1.0,
        fair_clamp: float | None = 0.0,
        fair_max: float = 10.0,
        fair_mode: str = "batch",
        share_entropy: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(fair_weight, bool) or not (math.isfinite(fair_weight) and fair_weight >= 0):
            raise ValueError(f"fair_weight must be finite and >= 0, got {fair_weight!r}")
        if not (math.isfinite(fair_max) and fair_max > 0):
            raise ValueError(f"fair_max must be finite and > 0, got {fair_max!r}")
        if fair_clamp is not None and not 0 <= fair_clamp <= fair_max:
            raise ValueError(f"fair_clamp must lie in [0, fair_max={fair_max!r}] or be absent, got {fair_clamp!r}")
        if fair_mode not in FAIR_MODES:
            raise ValueError(f"fair_mode must be one of {FAIR_MODES}, got {fair_mode!r}")
        self.use_fair = bool(use_fair)
        self.fair_weight = fair_weight
        self.fair_clamp = fair_clamp
        self.fair_max = fair_max
        self.fair_mode = fair_mode
        self.share_entropy = bool(share_entropy)
        self._mean_loss: float | None = None
        self._factor: float | None = None  # of the whole round, with fair_mode "epoch"
        self._batches: list[tuple[float, int]] = []  # (criterion, samples) of the round so far

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        super().begin_round(run, model)
        told = run.directives.get("mean_loss")
        usable = self.use_fair and self.fair_weight > 0 and told is not None and math.isfinite(told)
        self._mean_loss = float(told) if usable and told is not None else None
        self._factor = None
        self._batches = []
        if self._mean_loss is not None and self.fair_mode == "epoch":
            self._factor = self._clamped(self._whole_loss(run, model) - self._mean_loss)

    def loss(self, run: SiteRun, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        own = self.criterion_loss(run, model(inputs), targets)
        self._batches.append((float(own.detach()), len(inputs)))
        return self.fair(own) + losses.proximal_term(model, self._received, self._mu)

    def fair(self, own: torch.Tensor) -> torch.Tensor:
        """The criterion with the fairness term: in value where the loss is literal, in gradient where it is clamped."""
        if self._mean_loss is None:
            return own
        if self._factor is not None:
            return self._factor * own
        if self.fair_clamp is None:
            return own + self.fair_weight * losses.fairness_term(own, self._mean_loss)
        return self._clamped(float(own.detach()) - self._mean_loss) * own

    def _clamped(self, excess: float) -> float:
        factor = 1 + 2 * self.fair_weight * excess
        return factor if self.fair_clamp is None else min(max(factor, self.fair_clamp), self.fair_max)

    def _whole_loss(self, run: SiteRun, model: torch.nn.Module) -> float:
        from fairflare.tasks.base import evaluating

        total = 0.0
        with evaluating(model):
            for inputs, targets in run.data.batches("training", batch_size=self.batch_size):
                outputs = model(inputs.to(run.device))
                total += float(self.criterion_losses(run, outputs, targets.to(run.device)).double().sum())
        return total / run.data.num_samples("training")

    def report(self, run: SiteRun, model: torch.nn.Module) -> dict[str, Any]:
        per_epoch = math.ceil(run.data.num_samples("training") / self.batch_size)
        last = self._batches[-per_epoch:]
        counts = run.data.class_counts("training")
        validation = run.data.batches("validation", batch_size=self.batch_size)
        return {
            "train_loss": math.fsum(value * n for value, n in last) / sum(n for _, n in last),
            "accuracy": _accuracy(run, run.task.evaluate(model, validation, run.device)),
            "global_accuracy": _accuracy(run, run.metrics),
            "num_validation": run.data.num_samples("validation"),
            "entropy": label_entropy(counts.tolist()) if self.share_entropy and counts is not None else None,
            "num_classes": len(counts) if counts is not None else None,
            "mu": self._mu,
        }


def _accuracy(run: SiteRun, metrics: Mapping[str, float]) -> float:
    """Accuracy where the task has one, else its primary metric; both in [0, 1]."""
    return metrics.get("accuracy", metrics[run.task.primary_metric])


# ------------------------------------------------------------------------------------------------ server half


class FedMRL(FairAggregator):
    r"""FedMRL, server half (parts B and C).

    Args:
        use_som: weights from the map; False: by number of samples.
        mu_policy: ``"qmix"``; ``"vdn"``: Q_tot is a plain sum (the paper's Eq. 4); ``"fixed"``: the sites' own mu;
            ``"random"``: a control.
        zeta: target accuracy of the reward, a fraction in [0, 1].
        mean_loss: F of the fairness term: ``"mean"`` over the sites, ``"weighted"`` by samples, or ``"sum"`` (the text
            after Eq. 9; not a fairness term any more).
        actions: mu to choose from, ascending in [0, 1]; ``None``: the specification's ten.
        action_mode, share_agents, double_q, gamma, agent_rate, agent_hidden, warmup, updates: of
            :class:`fairflare.core.qmix.QMix` (``agent_rate`` is its learning rate).
        explore: share of the rounds in which exploration falls from 1 to 0.05, in [0, 1].
        cautious: explore with small mu only during the warm-up.
        grid, som_init, som_input, sigma_0, kappa, sigma_min, eta_som, som_epochs, sigma_w, som_restart: of
            :class:`fairflare.core.som.SelfOrganizingMap`.
        agent_seed: of QMIX and the map.
        min_sites: see :class:`FairAggregator`.

    The agents are the sites of the first round, also those that failed in it; with agents a site that joins later is
    refused. One that is absent keeps its last observation and action.

    Source:
        Sahoo et al., sections 3.1 and 3.3, with the corrections that ``docs/fed_mrl.md`` lists.
    """

    report_fields = (
        Field("train_loss", low=0, nan_ok=True, infinite_ok=True),
        Field("accuracy", low=0, high=1),
        Field("global_accuracy", low=0, high=1),
        Field("num_validation", low=0, high=1e9),
        Field("entropy", low=-50, high=1e-6, required=False),
        Field("num_classes", low=1, high=1e6, required=False),
        Field("mu", low=0, required=False),
    )

    def __init__(
        self,
        use_som: bool = True,
        mu_policy: str = "qmix",
        zeta: float = 0.95,
        mean_loss: str = "mean",
        actions: Sequence[float] | None = None,
        action_mode: str = "grid",
        share_agents: bool = False,
        double_q: bool = False,
        gamma: float = 0.99,
        agent_rate: float = 1e-3,
        agent_hidden: int = 64,
        warmup: int = 10,
        updates: int = 8,
        explore: float = 0.3,
        cautious: bool = False,
        grid: Sequence[int] = (5, 5),
        som_init: str = "sample",
        som_input: str = "weights",
        sigma_0: float = 2.0,
        kappa: float = 0.1,
        sigma_min: float = 0.5,
        eta_som: float = 0.5,
        som_epochs: int = 1,
        sigma_w: float = 1.0,
        som_restart: bool = False,
        agent_seed: int = 0,
        min_sites: int = 1,
    ) -> None:
        super().__init__(min_sites)
        if mu_policy not in POLICIES:
            raise ValueError(f"mu_policy must be one of {POLICIES}, got {mu_policy!r}")
        if isinstance(zeta, bool) or not 0 <= zeta <= 1:
            raise ValueError(f"zeta is a fraction in [0, 1], got {zeta!r} (a percentage is 100 times too large)")
        if mean_loss not in MEANS:
            raise ValueError(f"mean_loss must be one of {MEANS}, got {mean_loss!r}")
        if not 0 <= explore <= 1:
            raise ValueError(f"explore must lie in [0, 1], got {explore!r}")
        chosen = MU_GRID if actions is None else tuple(actions)
        if not chosen or list(chosen) != sorted(set(chosen)) or not all(0 <= a <= 1 for a in chosen):
            raise ValueError(f"actions must be ascending numbers in [0, 1], at least one, got {actions!r}")
        self.use_som = bool(use_som)
        self.mu_policy = mu_policy
        self.zeta = zeta
        self.mean_loss = mean_loss
        self.actions = actions
        self.action_mode = action_mode
        self.share_agents = bool(share_agents)
        self.double_q = bool(double_q)
        self.gamma = gamma
        self.agent_rate = agent_rate
        self.agent_hidden = agent_hidden
        self.warmup = warmup
        self.updates = updates
        self.explore = explore
        self.cautious = bool(cautious)
        self.grid = grid
        self.som_init = som_init
        self.som_input = som_input
        self.sigma_0 = sigma_0
        self.kappa = kappa
        self.sigma_min = sigma_min
        self.eta_som = eta_som
        self.som_epochs = som_epochs
        self.sigma_w = sigma_w
        self.som_restart = bool(som_restart)
        self.agent_seed = agent_seed
        self._mu: dict[str, float] = {}
        self._mean: float | None = None
        self._classes = 1
        self._entropy: dict[str, float] = {}  # told once, kept
        self._agents: QMix | None = None
        self._names: list[str] = []
        self._steps = 0
        self._map = self._new_map()
        self._new_agents(["a"], 1)  # refuses settings out of range now, not after the first round
        self._neurons: _Neurons | None = None

    # -- the round

    def directives(self, current_round: int, num_rounds: int) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._mean is not None:
            told["mean_loss"] = self._mean
        if self.mu_policy != "fixed":
            told["mu"] = {**dict.fromkeys(self._asked, INITIAL_MU), **self._mu}
        return told

    def check_report(self, report: dict[str, Any], site: str) -> dict[str, Any]:
        if self._agents is not None and site not in self._names:
            raise ReportError(
                f"site {site!r} joined after the first round; FedMRL has an agent for each site from the start "
                f"({', '.join(self._names)}): start a new run"
            )
        return report

    def weigh(self, inputs: RoundInputs) -> Weighing:
        if inputs.received is None and (self.use_som or self.mu_policy != "fixed"):
            raise RuntimeError(
                "FedMRL's map needs the model that the sites received, and its agents tell the sites mu, which a stock "
                "controller does not do; run it with fairflare.flare.controller.RoundsController, or set use_som=False "
                "and mu_policy='fixed'"
            )
        if not self._names:
            self._names = sorted({*inputs.asked, *inputs.sites})
        found = self._place(inputs) if self.use_som else None
        weights = found.weights if found is not None else sample_weights(inputs)
        values: dict[str, float] = {}
        self._mean = self._mean_of(inputs)
        if self._mean is not None:
            values["mean_loss"] = self._mean
        accuracy = global_accuracy(
            {site: inputs.reports[site]["global_accuracy"] for site in inputs.sites},
            {site: inputs.reports[site]["num_validation"] for site in inputs.sites},
        )
        earned = None if accuracy is None else reward(accuracy, self.zeta)
        if earned is not None:
            values["reward"] = earned
        self._choose(inputs, earned, values)
        details: dict[str, Any] = {}
        if found is not None:
            details["som"] = {
                "u_matrix": found.u_matrix.tolist(),
                "bmu": {site: list(cell) for site, cell in found.bmu.items()},
                "sigma": found.sigma,
            }
        return Weighing(sites=_for_all(weights, inputs.sites), values=values, details=details)

    def _mean_of(self, inputs: RoundInputs) -> float | None:
        """F over the finite losses (MRL-2); ``None``: no fairness term next round."""
        found = {s: inputs.reports[s]["train_loss"] for s in inputs.sites}
        finite = {s: v for s, v in found.items() if math.isfinite(v)}
        if not finite:
            return None
        if self.mean_loss == "sum":
            return math.fsum(finite.values())
        share = {s: inputs.num_samples[s] if self.mean_loss == "weighted" else 1 for s in finite}
        return math.fsum(share[s] * v for s, v in finite.items()) / sum(share.values())

    # -- part C

    def _choose(self, inputs: RoundInputs, earned: float | None, values: dict[str, float]) -> None:
        """The next mu of every site."""
        if self.mu_policy == "fixed":
            return
        if self.mu_policy == "random":
            for site in inputs.sites:
                drawn = random.Random(f"{self.agent_seed}/{site}/{inputs.current_round}")
                self._mu[site] = drawn.choice(MU_GRID if self.actions is None else tuple(self.actions))
            return
        if self._agents is None:
            self._steps = round(self.explore * inputs.num_rounds)
            self._agents = self._new_agents(self._names, self._steps)
        values["epsilon"] = self._agents.epsilon
        step, learnt = self._agents.end_round(
            self._observations(inputs), earned, done=inputs.current_round == inputs.num_rounds - 1
        )
        chosen = self._agents.chosen(step)
        self._mu = {site: chosen[site] for site in self._names}
        values["q_tot"] = self._agents.joint_value(step)
        if learnt is not None:
            values["td_loss"] = learnt.loss

    def _observations(self, inputs: RoundInputs) -> dict[str, tuple[float, ...]]:
        total = sum(inputs.num_samples[site] for site in inputs.sites)
        seen: dict[str, tuple[float, ...]] = {}
        for site in inputs.sites:
            report = inputs.reports[site]
            if report["num_classes"] is not None:
                self._classes = max(self._classes, int(report["num_classes"]))
            if report["entropy"] is not None:
                self._entropy[site] = report["entropy"]
        for site in inputs.sites:
            report = inputs.reports[site]
            entropy = self._entropy.get(site)
            if entropy is not None:
                entropy = max(entropy, -math.log(self._classes))
            seen[site] = observation(
                entropy,
                inputs.num_samples[site] / total,
                report["accuracy"],
                report["train_loss"],
                num_classes=self._classes,
            )
        return seen

    def _new_agents(self, names: list[str], steps: int) -> QMix:
        return QMix(
            names,
            actions=MU_GRID if self.actions is None else tuple(self.actions),
            mixer="vdn" if self.mu_policy == "vdn" else "qmix",
            action_mode=self.action_mode,  # type: ignore[arg-type]
            share_agents=self.share_agents,
            obs_extras=self.share_agents,
            double_q=self.double_q,
            gamma=self.gamma,
            lr=self.agent_rate,
            hidden=self.agent_hidden,
            warmup=self.warmup,
            updates=self.updates,
            eps_steps=steps,
            eps_prior="small" if self.cautious else None,
            seed=self.agent_seed,
        )

    # -- part B

    def _new_map(self) -> SelfOrganizingMap:
        return SelfOrganizingMap(
            self.grid,
            sigma_0=self.sigma_0,
            kappa=self.kappa,
            sigma_min=self.sigma_min,
            eta=self.eta_som,
            epochs=self.som_epochs,
            sigma_w=self.sigma_w,
            init=self.som_init,  # type: ignore[arg-type]
            space=self.som_input,  # type: ignore[arg-type]
            form="gram",
            restart=self.som_restart,
            seed=self.agent_seed,
        )

    def _place(self, inputs: RoundInputs) -> SomResult:
        assert inputs.received is not None
        if self.som_restart:
            return self._map.step(inputs.states, inputs.received)
        if self._neurons is None:
            self._neurons = _Neurons(self.memory_folder)
        before = self._neurons.at(self._map.rounds) if self._map.rounds else None
        return self._map.step(
            inputs.states, inputs.received, kept=before, keep=self._neurons.begin(self._map.rounds + 1)
        )

    # -- what outlives a round

    def state_dict(self) -> dict[str, Any]:
        return {
            "mu": dict(self._mu),
            "mean_loss": self._mean,
            "entropy": dict(self._entropy),
            "classes": self._classes,
            "names": list(self._names),
            "steps": self._steps,
            "agents": None if self._agents is None else self._agents.state_dict(),
            "map": self._map.state_dict(),
            # On disk they stay where they are; without a folder that outlives this process they travel along.
            "neurons": self._neurons.copy(self._map.rounds) if self._neurons and self.memory_folder is None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._mu = {site: float(mu) for site, mu in state["mu"].items()}
        self._mean = None if state["mean_loss"] is None else float(state["mean_loss"])
        self._entropy = {site: float(e) for site, e in state["entropy"].items()}
        self._classes = int(state["classes"])
        self._names = list(state["names"])
        self._steps = int(state["steps"])
        if state["agents"] is not None:
            self._agents = self._new_agents(self._names, self._steps)
            self._agents.load_state_dict(state["agents"])
        self._map.load_state_dict(state["map"])
        self._neurons = None
        if state["neurons"] is not None:
            self._neurons = _Neurons(self.memory_folder)
            keep = self._neurons.begin(self._map.rounds)
            for name, neurons in state["neurons"].items():
                keep(name, neurons)


def _for_all(weights: SiteWeights, sites: Sequence[str]) -> SiteWeights:
    return {site: weights.get(site, 0.0) for site in sites}


class _Neurons:
    """The map's neurons between rounds, on disk: 25 vectors as long as the model, read and written tensor by tensor.

    Those of the round before are kept too, so that a round can be repeated after a crash.
    """

    def __init__(self, folder: Path | None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="fairflare-som-") if folder is None else None
        self.folder = Path(self._temporary.name) if self._temporary is not None else Path(folder or "") / "som"

    def at(self, rounds: int) -> Mapping[str, torch.Tensor]:
        """Neurons after so many rounds."""
        folder = self._of(rounds)
        if not folder.is_dir():
            raise RuntimeError(f"the map's neurons after {rounds} round(s) are not in {folder}; start a new experiment")
        return _Lazy(folder)

    def copy(self, rounds: int) -> dict[str, torch.Tensor]:
        """The same in memory."""
        return dict(self.at(rounds))

    def begin(self, rounds: int) -> Callable[[str, torch.Tensor], object]:
        """Where the neurons after so many rounds go."""
        folder = self._of(rounds)
        folder.mkdir(parents=True, exist_ok=True)
        for other in self.folder.iterdir():
            if other.name not in (folder.name, self._of(rounds - 1).name):
                for path in other.iterdir():
                    path.unlink()
                other.rmdir()

        def keep(name: str, neurons: torch.Tensor) -> None:
            save_file({"neurons": neurons.contiguous()}, _file(folder, name))

        return keep

    def _of(self, rounds: int) -> Path:
        return self.folder / f"{rounds:06d}"


class _Lazy(Mapping[str, torch.Tensor]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self:
            raise KeyError(name)
        return load_file(_file(self.folder, name))["neurons"]

    def __contains__(self, name: object) -> bool:  # the inherited one would read the tensor
        return isinstance(name, str) and _file(self.folder, name).is_file()

    def __iter__(self) -> Iterator[str]:
        return (unquote(path.name.removesuffix(_SUFFIX)) for path in sorted(self.folder.iterdir()))

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.iterdir())


def _file(folder: Path, name: str) -> Path:
    return folder / (quote(name, safe=" ") + _SUFFIX)


# Of the paper and its code; the paper's text says SGD, its code Adam.
SETTINGS: dict[str, Any] = {
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "betas": (0.9, 0.999),
    "weight_decay": 0.0,
    "batch_size": 32,
    "local_epochs": 1,
    "keep_optimizer_state": False,
}
_COMMON: dict[str, Any] = {
    "task": "classification",
    "learns": {
        "phantom": "dermoscopy7", "phantom_sites": 4, "partition": "shards", "eta": 1.0, "corrupted_sites": 0,
    },
    "small": {"max_pool": True, "phantom_samples": 1500, "phantom_test": 300},
    "num_sites": 4,
    "num_rounds": 5,
}  # fmt: skip
METHODS = [
    Method(
        name="fed_mrl",
        title="FedMRL",
        summary="fairness loss, mu by QMIX, weights by a map (use_fair, mu_policy, use_som: ablations)",
        aggregator=FedMRL,
        training=FairProximalTraining,
        site={**SETTINGS, "mu": INITIAL_MU},
        source="Sahoo et al., MICCAI 2024",
        **_COMMON,
    ),
    Method(
        name="fed_prox",
        title="FedProx",
        summary="local training is pulled towards the received model with strength mu",
        aggregator=FedAvg,
        training=ProximalTraining,
        site=SETTINGS,
        source="Li et al., MLSys 2020",
        **_COMMON,
    ),
]
