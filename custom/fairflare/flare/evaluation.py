"""Test given models, or make a plan of nnU-Net, at every site in a FLARE job without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fairflare.base.settings import field_names, settings
from fairflare.federation.collecting.transport import Listener
from fairflare.federation.plan.run_settings import Place, PlanRun, WithoutTraining
from fairflare.federation.server.planning import Planning
from fairflare.federation.server.rounds import Rounds
from fairflare.flare.controller import RoundsController

MODELS = "models"  # folder of the models' files in the server's app, which no site is sent
RESULTS = "evaluation"  # folder in the run directory, with a folder for each model


@settings
class EvaluationController(WithoutTraining, RoundsController):
    """Test each model as the final test of a run does, one after the other.

    Args:
        models: names of the models, whose files the server's app has.
    """

    models: list[str]

    def lead(self, place: Place, listeners: Sequence[Listener]) -> None:
        """Test each given model at the sites, and write its results into a folder of its own."""
        shared = {name: getattr(self, name) for name in field_names(WithoutTraining)}
        for model in self.models:
            run = WithoutTraining(**{**shared, "label": model, "initial_ckpt": f"{model}.safetensors"})
            place_of_model = replace(
                place, run_dir=place.run_dir / RESULTS / model, carried=Path(self.get_app_dir()) / MODELS
            )
            Rounds(self.task, self.rule, run, self, place_of_model, listeners).run()


@settings
class PlanController(PlanRun, RoundsController):
    """Ask the sites for counts of their cases, and write a plan beside the results."""

    def lead(self, place: Place, listeners: Sequence[Listener]) -> None:
        """Lead the exchanges with the sites, and write ``plan.json`` beside the results."""
        run = PlanRun(**{name: getattr(self, name) for name in field_names(PlanRun)})
        Planning(self.task, self.rule, run, self, place, listeners).run()
