"""Every model of a run at every site: the common one, and those that the sites keep for themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fairflare.base.disk.files import safe_name
from fairflare.base.machine.threads import one_thread
from fairflare.base.settings import values_of
from fairflare.exchange.messages import STATUS_OK, SiteTask
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.plan.run_settings import RESULTS_FOLDER
from fairflare.federation.plan.site_training import at_home
from fairflare.federation.site.site_file import own_settings
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.local import RUN_DIR
from fairflare.federation.transports.unseen import common_model, figures_of, request_of
from fairflare.methods.base.home import OwnModel
from fairflare.reporting.compare.matrix import RunMatrix, TestedModel
from fairflare.reporting.results import read_results

LAST_PART = "the sites' own models take a last part from the server, which nobody keeps: they are not tested elsewhere"


class Owner(SiteWorker):
    """A site that also hands out the model that it is measured with. Only where all sites are one person's."""

    def own_model(self, request: SiteTask) -> dict[str, torch.Tensor]:
        """The whole model, on the CPU.

        Raises:
            RuntimeError: what the site kept of the run is gone or damaged.
        """
        with self.state.opened(request) as store:
            run, model = self.open(request, store)
            state = self.training.home.measured(run, model.state_dict())
            found = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
        if store.lost:
            raise RuntimeError(f"site {self.site!r} has not kept its own model: {'; '.join(store.lost)}")
        return found


def at_every_site(
    arguments: Mapping[str, Any],
    workspace: Path,
    local: Mapping[str, Any],
    should_stop: Callable[[], bool | str] = lambda: False,
) -> RunMatrix:
    """Tests the last common model of a run and each site's own at all its sites; keeps the result beside the run's.

    A site's own model is the one that the run measured it with: Solo's, Ditto's second one, the common one with the
    tensors that stay at the site (FedBN). It is tested elsewhere as it is, with nothing of the other site in it.

    Args:
        arguments: of :func:`fairflare.federation.plan.plan.make_plan`, as the run had them; with an experiment.
        workspace: of the run, which has completed.
        local: content of ``local/fairflare.json``; its ``state_root`` is where the sites kept what they keep.
        should_stop: True ends the test.

    Raises:
        RuntimeError: a site has not kept its model, or could not test one; the text says why.
    """
    plan = make_plan(**arguments)
    network, common = common_model(plan, workspace, local)
    home = at_home(values_of(plan.training), network, lambda *_, **__: None)
    run = str(read_results(workspace / RUN_DIR / RESULTS_FOLDER)["info"].get("run") or "")
    sites = {site: _owner(plan, site, local) for site in plan.sites or ()}
    found = RunMatrix(alone=home.tensors == set(common))
    with one_thread():
        if not home.own_everywhere:
            found.models.append(_everywhere(plan, "", common, sites, should_stop))
        if isinstance(plan.training.home, OwnModel):
            found.reason = LAST_PART
        elif home.noted:
            for site, worker in sites.items():
                asked = replace(request_of(plan, common), as_sent=False, experiment=plan.run.experiment, run=run)
                found.models.append(_everywhere(plan, site, worker.own_model(asked), sites, should_stop))
    found.write(workspace / RUN_DIR / RESULTS_FOLDER)
    return found


def _owner(plan: Plan, site: str, local: Mapping[str, Any]) -> Owner:
    settings = own_settings(local, site)
    kept = Path(settings["state_root"]) / safe_name(plan.run.experiment) / safe_name(site)
    return Owner(site, plan.task, plan.training, settings, kept, num_threads=1, tells_all=True)


def _everywhere(
    plan: Plan,
    of: str,
    state: Mapping[str, torch.Tensor],
    sites: Mapping[str, Owner],
    stop: Callable[[], bool | str],
) -> TestedModel:
    """One model at all sites, by the code by which sites test, each with its floor of cases."""
    tests = {}
    request = replace(request_of(plan, state), resample=0)
    for site, worker in sites.items():
        reply = worker.perform(request, lambda: bool(stop()))
        if reply.status != STATUS_OK:
            which = f"the own model of {of!r}" if of else "the common model"
            raise RuntimeError(f"site {site!r} could not test {which}: {reply.reason}")
        tests[site] = figures_of(reply)
    return TestedModel(of=of, tests=tests)
