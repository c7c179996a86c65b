"""Lead the rounds after a method's own, in which the classifier alone is trained anew (cRT); see ``methods/crt.py``.

The server re-initialises nothing: the sites re-initialise the classifier, all from the same seed, after they have
measured the received model. So the last model of the method's own rounds is validated like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairflare.federation.plan.run_settings import RunSettings
from fairflare.methods.base.rule import FollowsNumRounds, MakesTensors, Rule, SeesModel, State, Weighing
from fairflare.methods.crt import ClassifierAverage
from fairflare.methods.parts.classifier_retraining import classifier_names


class Retraining:
    """Choose the rule and the trained tensors of a round; with ``crt_rounds=0`` the method's rule and all tensors.

    Args:
        rule: the method's server half.
        run: settings of the run.

    Attributes:
        own: rule of the method's own rounds: ``rule``, unless sites withhold the reports that it needs.
    """

    def __init__(self, rule: Rule, run: RunSettings) -> None:
        self.rule, self.run = rule, run
        self.own = rule
        self.classifier = ClassifierAverage(
            weights=run.crt_weights,
            epochs=run.crt_epochs,
            mask_absent=run.crt_mask_absent,
            seed=run.seed,
            first_round=run.num_rounds,
        )

    def rule_at(self, current_round: int) -> Rule:
        """Return a round's rule: the classifier's while it is retrained, else (also in the final test) the method's."""
        return self.classifier if (self.run.num_rounds <= current_round < self.run.rounds_in_all) else self.own

    def start_round(self, state: State, current_round: int) -> State:
        """Begin a round with the global model, and return those of its tensors that the sites train in the round."""
        rule = self.rule_at(current_round)
        if isinstance(rule, SeesModel):
            rule.begin_round(state)
        if rule is self.own:
            prefixes = rule.makes if isinstance(rule, MakesTensors) else ()
            return {name: tensor for name, tensor in state.items() if not name.startswith(prefixes)}
        return {name: state[name] for name in classifier_names(state)}

    def remember(self, weighing: Weighing, current_round: int) -> None:
        """Store the weights that the method gave the sites, for ``crt_weights="method"``; not in extra rounds."""
        if self.rule_at(current_round) is self.own:
            self.classifier.remember(weighing)

    # -- state of both rules that is saved in checkpoints

    def follows_num_rounds(self) -> list[str]:
        return self.rule.follows_num_rounds() if isinstance(self.rule, FollowsNumRounds) else []

    def state_dict(self) -> dict[str, Any]:
        if not self.run.crt_rounds:
            return self.rule.state_dict()
        return {"rule": self.rule.state_dict(), "classifier": self.classifier.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.run.crt_rounds:
            self.classifier.load_state_dict(state["classifier"])
        self.rule.load_state_dict(state["rule"] if self.run.crt_rounds else state)
