"""Define the fine-tuning of a site's own model after a method's rounds (``personalise=finetune``).

The site starts from the common model, trains a part of it on its own images, and chooses the number of steps on its
validation split; no step at all is a candidate too. Then it tests both models on the same images.
``docs/personal_models.md`` describes the benefit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fairflare.base.cases.resampling import units_of
from fairflare.base.settings import Flag, settings
from fairflare.core.features.norms import norms_of
from fairflare.core.features.parts import HEAD, only
from fairflare.core.statistics.intervals import paired_gain
from fairflare.exchange.sent_tensors import fingerprint
from fairflare.methods.base.home import choose_tuned_part
from fairflare.methods.base.local_loop import Trained
from fairflare.methods.base.training import LocalTraining, SiteRun, pick_settings

DIRECTIVE, OWN_GAIN = "fine_tuning", "own_gain"
PASSES, PATIENCE = 20, 5  # passes at most; so many without a better value on the validation split end the training
FEWEST = 10  # validation cases (patients where known), below which the number of steps cannot be chosen
PREFIX, PROGRESS = "tuning_", "progress"  # names in the site's store


@settings
class FineTuning(LocalTraining):
    """Fine-tune the received model at a site; validate after each pass, stop early, and keep the best.

    A pass is one over the training images, or ``local_steps`` steps. With the head alone, norm layers stay
    in evaluation mode, so that their statistics do not change.

    Args:
        shares: the own model is sent to the server, to be tested at the other sites.
    """

    shares: Flag = False

    @classmethod
    def choose(cls, training: LocalTraining, directives: Mapping[str, Any], *, shares: bool) -> LocalTraining:
        """Return the site half of this task: ``training``, or the fine-tuning if the server's directives ask for it.

        The fine-tuning has the settings of ``training``, a tenth of its learning rate, no schedule, and none of the
        method's terms.
        """
        if DIRECTIVE not in directives:
            return training
        fixed = {
            "learning_rate": training.learning_rate / 10, "schedule": "constant", "lowest_rate": None,
            "keep_optimizer_state": True, "local_epochs": 1,
        }  # fmt: skip
        return cls(**{**pick_settings(training), **fixed, "shares": shares})

    def sends(self, names: Iterable[str]) -> list[str]:
        return list(names) if self.shares else []

    def begin_round(self, run: SiteRun, model: torch.nn.Module) -> None:
        still = norms_of("all") if choose_tuned_part(self.personalise) == HEAD else ()
        for module in [module for module in model.modules() if isinstance(module, still)]:
            module.eval()

    def train(self, run: SiteRun, model: torch.nn.Module) -> Trained:
        """Fine-tune ``model`` in place, and test it; an interrupted training continues after its last complete pass."""
        common, before = deepcopy(model.state_dict()), run.metrics.get(run.task.primary_metric, math.nan)
        sign = 1 if run.task.primary.higher_is_better else -1
        labelled = run.data.num_samples("training") > 0
        enough = labelled and run.data.num_cases("validation") >= FEWEST and math.isfinite(before)
        store = replace(run.store, prefix=PREFIX)
        with only(model, choose_tuned_part(self.personalise)):
            stored = store.load_at(PROGRESS, 0)
            fresh = {  # how far the training has come, and the best model so far
                "start": fingerprint(common), "passes": 0, "steps": 0, "losses": [], "model": common,
                "best": common, "value": before, "best_steps": 0, "best_pass": 0,
            }  # fmt: skip
            progress: dict[str, Any] = stored if stored is not None and stored["start"] == fresh["start"] else fresh
            model.load_state_dict(progress["model"])
            while enough and progress["passes"] < PASSES and progress["passes"] - progress["best_pass"] < PATIENCE:
                numbers = {
                    "current_round": progress["passes"],
                    "num_rounds": PASSES,
                    "seed": run.seed + progress["passes"],
                }
                trained = super().train(replace(run, store=store, **numbers), model)
                batches = run.data.batches("validation", batch_size=self.batch_size)
                value = run.task_on("validation").evaluate(model, batches, run.device)[run.task.primary_metric]
                progress |= {
                    "passes": progress["passes"] + 1, "steps": progress["steps"] + (trained.num_steps or 0),
                    "losses": [*progress["losses"], *trained.epoch_losses], "model": deepcopy(model.state_dict()),
                }  # fmt: skip
                if sign * value > sign * progress["value"]:
                    progress |= {
                        "best": progress["model"],
                        "value": value,
                        "best_steps": progress["steps"],
                        "best_pass": progress["passes"],
                    }
                store.save(PROGRESS, 0, progress, kept=1)
            model.load_state_dict(progress["best"])
        stats = {
            "tuned_steps": progress["best_steps"], "tuned_passes": progress["passes"],
            **({"tuned_before": before, "tuned_after": progress["value"]} if enough else {}),
            **({OWN_GAIN: self._gain(run, model, common, sign)} if progress["best_steps"] else {}),
        }  # fmt: skip
        return Trained(progress["losses"], progress["steps"], run.data.num_samples("training"), more=stats)

    def _gain(self, run: SiteRun, model: torch.nn.Module, common: dict[str, torch.Tensor], sign: int) -> list[float]:
        """Return the values of the common and the own model on the test split, and the gain with its interval.

        ``model`` is the own one before and afterwards.
        """
        task = run.task_on("test")
        units = units_of(run.data.cases("test"), run.data.num_samples("test"))
        drawn, tuned, values, draws = units.draw(run.site, 1000), deepcopy(model.state_dict()), [], []
        for state in (common, tuned):
            model.load_state_dict(state)
            batches = run.data.batches("test", batch_size=self.batch_size)
            values.append(task.evaluate(model, batches, run.device)[run.task.primary_metric])
            draws.append(task.resampled(model, run.data, drawn, run.device) or [math.nan])
        gained = np.subtract(draws[1], draws[0])
        return [*values, *paired_gain(sign * (values[1] - values[0]), sign * gained, len(units.members))]
