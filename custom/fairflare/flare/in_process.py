"""A whole federation in one process: the real controller and site halves, without FLARE's processes between them.

For quick experiments on one machine. Sites work one after the other on one thread each, as in the simulator with one
thread a site, so the results are the simulator's, bit for bit; there is no network, no timeout and no isolation.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel

from fairflare.flare.controller import RoundsController
from fairflare.flare.executor import SITE_FILE, decode_task, encode_reply, read_site_file
from fairflare.flare.site import SiteWorker, safe_name
from fairflare.methods.base import LocalTraining

log = logging.getLogger(__name__)


class InProcessController(RoundsController):
    """The controller with FLARE's transport replaced by calls.

    Args:
        sites: names.
        training: the method's site half.
        folder: of the run; laid out as the simulator's server folder.
        local: content of ``local/fairflare.json``.
        arguments: of :class:`RoundsController`.
    """

    def __init__(
        self, *, sites: list[str], training: LocalTraining, folder: Path, local: Mapping[str, Any], **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.sites = sites
        self.training = training
        self.folder = folder
        self._state = tempfile.TemporaryDirectory(prefix="fairflare-sites-")
        (folder / "local").mkdir(parents=True, exist_ok=True)
        (folder / "local" / SITE_FILE).write_text(json.dumps(dict(local), indent=2) + "\n", encoding="utf-8")
        workspace = SimpleNamespace(
            get_file_path_in_site_config=lambda name: str(folder / "local" / name),
            get_root_dir=lambda: str(folder),
        )
        self.engine = SimpleNamespace(
            get_clients=lambda: [SimpleNamespace(name=site) for site in sites], get_workspace=lambda: workspace
        )
        self.fl_ctx = FLContext()
        self.fl_ctx.set_prop(FLContextKey.CURRENT_RUN, "in_process", private=True, sticky=False)
        self.abort_signal = Signal()
        self._workers: dict[str, SiteWorker] = {}

    def get_run_dir(self) -> str:
        path = self.folder / "server" / "simulate_job"
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def get_app_dir(self) -> str:
        return str(self.folder / "app")

    def event(self, event_type: str) -> None:
        log.debug("%s", event_type)

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        log.debug("%s", event_type)

    def fire_event_with_data(self, event_type: str, fl_ctx: FLContext, key: str, data: Any) -> None:
        log.debug("%s", event_type)

    def info(self, message: str) -> None:
        log.info("%s", message)

    def warning(self, message: str) -> None:
        log.warning("%s", message)

    def error(self, message: str) -> None:
        log.error("%s", message)

    def panic(self, reason: str) -> None:
        raise RuntimeError(reason)

    def get_num_standing_tasks(self) -> int:
        return 0

    def cancel_all_tasks(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is ever waiting."""

    def send_model(
        self,
        task_name: str = "train",
        data: FLModel | None = None,
        targets: list[str] | str | None = None,
        timeout: int = 0,
        wait_time_after_min_received: int = 0,
        callback: Callable[[FLModel], None] | None = None,
    ) -> None:
        assert data is not None
        assert isinstance(targets, list)
        assert callback is not None
        for site in targets:
            request, experiment = decode_task(task_name, data, site)
            answer = encode_reply(self._worker(site, experiment).perform(request), data.current_round)
            answer.meta = {**(answer.meta or {}), "client_name": site}
            callback(answer)

    def _worker(self, site: str, experiment: str) -> SiteWorker:
        if site not in self._workers:
            settings = read_site_file(self.engine.get_workspace(), site)
            root = Path(settings.get("state_root") or self._state.name) if experiment else Path(self._state.name)
            self._workers[site] = SiteWorker(
                site=site,
                task=self.task,
                training=self.training,
                settings=settings,
                state_folder=root / safe_name(experiment or "run") / safe_name(site),
                num_threads=1,
            )
        return self._workers[site]


def run_in_process(recipe: Any, folder: Path, local: Mapping[str, Any] | None = None) -> Path:
    """Runs a :class:`fairflare.recipes.FairRecipe` with named sites.

    Args:
        recipe: with ``sites`` given.
        folder: results go to ``server/simulate_job/fairflare`` in it, as in the simulator.
        local: the sites' private settings, as ``local/fairflare.json``.

    Returns:
        The folder with ``results.json``.

    Raises:
        ValueError: the recipe names no sites.
        RuntimeError: the run failed; the text says why.
    """
    if not recipe.site_names:
        raise ValueError("in one process there are no connected sites: give the recipe their number or names")
    controller = InProcessController(
        sites=list(recipe.site_names),
        training=recipe.training,
        folder=folder,
        local=local or {},
        task=recipe.task,
        aggregator=recipe.aggregator,
        **recipe.rounds,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        controller.run()
    finally:
        torch.set_num_threads(threads)
    return Path(controller.get_run_dir()) / "fairflare"
