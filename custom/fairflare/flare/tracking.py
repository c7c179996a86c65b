"""Curves through FLARE's analytics events: any FLARE receiver (TensorBoard by default) writes them on the server."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from nvflare.apis.analytix import AnalyticsDataType
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.widgets.streaming import AnalyticsReceiver

from fairflare.core.fairness import higher_is_better, summarize
from fairflare.federation.collecting.transport import Listener, RoundRecord

log = logging.getLogger(__name__)
EVENT = "analytix_log_stats"

if find_spec("tensorboard"):
    from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
else:

    class TBAnalyticsReceiver(AnalyticsReceiver):  # type: ignore[no-redef]
        """Stands for FLARE's receiver where TensorBoard is not installed: the curves are not written."""

        def __init__(self, tb_folder: str = "tb_events", events: list[str] | None = None) -> None:
            super().__init__(events=events)
            self.tb_folder = tb_folder

        def initialize(self, fl_ctx: Any) -> None:
            """Says so."""
            log.warning("no curves for TensorBoard: it is not installed (pip install 'fairflare[tensorboard]')")

        def save(self, fl_ctx: Any, shareable: Any, record_origin: str) -> None:
            """Keeps nothing."""

        def finalize(self, fl_ctx: Any) -> None:
            """Has nothing to close."""


class TensorBoard(TBAnalyticsReceiver):
    """FLARE's TensorBoard receiver under our prefix, as all that a job of ours names."""


class FlareEvents(Listener):
    """FLARE's events of a round, and curves as scalars: flat tags ``what/where``, the round as step.

    Args:
        controller: fires them.
        directions: of the task's metrics, see :meth:`fairflare.base.task.Task.directions`.
    """

    def __init__(self, controller: Any, directions: Mapping[str, bool] | None = None) -> None:
        self.controller, self.directions = controller, directions

    def scalar(self, tag: str, value: Any, step: int) -> None:
        """One scalar; anything that is no finite number is left out."""
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return
        dxo = create_analytic_dxo(tag=tag, value=float(value), data_type=AnalyticsDataType.SCALAR, global_step=step)
        send_analytic_dxo(self.controller, dxo, self.controller.fl_ctx, EVENT, fire_fed_event=False)

    def round_started(self, current_round: int) -> None:
        self.controller.fl_ctx.set_prop(AppConstants.CURRENT_ROUND, current_round, private=True, sticky=False)
        self.controller.event(AppEventType.ROUND_STARTED)

    def before_aggregation(self) -> None:
        self.controller.event(AppEventType.BEFORE_AGGREGATION)

    def aggregated(self, state: Mapping[str, Any]) -> None:
        self.controller.fire_event_with_data(
            AppEventType.AFTER_AGGREGATION,
            self.controller.fl_ctx,
            AppConstants.AGGREGATION_RESULT,
            FLModel(params=dict(state)),
        )

    def best_model(self, state: Mapping[str, Any], made: int) -> None:
        """For whoever keeps FLARE's best model: it is not the current one, but the one that was validated."""
        fl_ctx = self.controller.fl_ctx
        model = make_model_learnable(dict(state), {"current_round": made})
        fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, model, private=True, sticky=False)
        self.controller.event(AppEventType.GLOBAL_BEST_MODEL_AVAILABLE)

    def round_done(self, record: RoundRecord, metric: str) -> None:
        """Train loss and validation metric by site, their spread, and the weights."""
        by_layer = [(layer, *item) for layer, by in (record.layers or {}).items() for item in by.items()]
        curves = [
            *((f"train_loss/{site}", values.get("loss")) for site, values in record.train.items()),
            *self._of_split("validation", metric, record.validation),
            *((f"weight/{site}", weight) for site, weight in (record.site_weights or {}).items()),
            *((f"report_{name}/{site}", v) for site, by in record.reports.items() for name, v in by.items()),
            *record.values.items(),
            *((f"{kind}/{layer}/{site}", of.get(kind)) for layer, site, of in by_layer for kind in ("cka", "weight")),
        ]
        for tag, value in curves:
            self.scalar(tag, value, record.current_round)

    def tested(self, test: Mapping[str, Mapping[str, float]], metric: str, step: int) -> None:
        """The final table."""
        for tag, value in self._of_split("test", metric, test):
            self.scalar(tag, value, step)

    def _of_split(
        self, split: str, metric: str, measured: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[str, float]]:
        """Curves of a metric: of each site, and what summarizes them."""
        scores = {site: values[metric] for site, values in measured.items() if metric in values}
        tag = f"{split}_{metric}"
        yield from ((f"{tag}/{site}", value) for site, value in scores.items())
        if scores:
            summary = summarize(scores, higher_is_better=higher_is_better(metric, self.directions))
            yield from ((f"{tag}/average", summary.mean), (f"{tag}/std", summary.std), (f"{tag}/worst", summary.worst))
