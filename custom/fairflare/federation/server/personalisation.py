"""Lead the fine-tuning after the rounds (``personalise=finetune``), and test the sites' own models at all sites.

Each site trains on from the common model once (``methods/parts/fine_tuning.py``). Its own model is tested beside the
common one in the final test, and, where the site lets it leave (``submit_model``), at all other sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairflare.base.checks import refuse_if
from fairflare.base.task import Metric
from fairflare.exchange.messages import TASK_TRAIN, Message
from fairflare.exchange.staging import Staging
from fairflare.federation.collecting.collector import LikeReceived, read_state
from fairflare.federation.collecting.final_test import SAID, FinalTest, Tested
from fairflare.federation.collecting.phase import Exchange, Phase
from fairflare.federation.site.replies import read_head, read_stats
from fairflare.federation.site.sampling import CASES
from fairflare.methods.base.home import choose_tuned_part
from fairflare.methods.base.rule import State
from fairflare.methods.parts.fine_tuning import DIRECTIVE, OWN_GAIN
from fairflare.reporting.sites.own_models import personal


def own_models(
    site_half: Any, ask: Exchange, test: FinalTest, staging: Staging, metric: Metric, state: State, last: Tested
) -> dict[str, Any] | None:
    """Let every site fine-tune the common model, and return the results' section ``personal``.

    The result is ``None`` if the sites' training, as far as the server knows it, has no fine-tuning.

    Own models that leave their sites are tested at all sites. A site that fails has no own model.

    Args:
        site_half: class path and settings of the sites' training; ``None`` if unknown to the server: no site is asked.
        ask, test: exchange with the sites, and the final test.
        staging: place where the own models that sites let leave wait for their tests.
        metric: the primary metric.
        state: the common model.
        last: the final test of the common model, to which the exchanges are added.
    """
    settings = site_half.get("args", {}) if isinstance(site_half, Mapping) else {}
    part, number = choose_tuned_part(str(settings.get("personalise", ""))), last.phase.current_round
    if not part:
        return None
    statistics = dict[str, dict[str, Any]]()

    def use(phase: Phase, site: str, message: Message) -> None:
        stats = read_stats(site, read_head(site, message, number), metric)
        refuse_if(site, {f"field {OWN_GAIN!r} must have 7 entries": len(stats[OWN_GAIN] or range(7)) != 7})
        if stats["tuned_steps"] and message.params:
            staging.put(site, read_state(LikeReceived(state), message, site, staging))
        statistics[site] = stats

    tuned = ask(
        TASK_TRAIN, number, state, ask.roster.live(number), ask.run.train_timeout, use, directives={DIRECTIVE: True}
    )
    last.phases.append(tuned.record())
    name, at_others = metric.name, dict[str, dict[str, float]]()
    for owner in staging.sites():
        tested = test({**state, **staging.open(owner)}, number)
        last.phases += tested.phases
        at_others[owner] = {
            site: figures[name] for site, figures in tested.test.items() if site != owner and name in figures
        }
    cases = {site: numbers[CASES] for site, numbers in last.collect(SAID).items()}
    return {
        "part": part,
        **personal(metric, statistics, last.test, cases, at_others),
        "left_out": dict(sorted(tuned.left_out.items())),
    }
