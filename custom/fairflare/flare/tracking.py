"""Send a run's curves as FLARE's analytics events, which any FLARE receiver (TensorBoard by default) writes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from nvflare.apis.analytix import AnalyticsDataType
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.widgets.streaming import AnalyticsReceiver

from fairflare.federation.record.curves import NO_CURVES, Curves

log = logging.getLogger(__name__)
EVENT = "analytix_log_stats"

if find_spec("tensorboard"):
    from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
else:

    class TBAnalyticsReceiver(AnalyticsReceiver):  # type: ignore[no-redef]
        """Replace FLARE's receiver if TensorBoard is not installed; no curves are written."""

        def __init__(self, tb_folder: str = "tb_events", events: list[str] | None = None) -> None:
            super().__init__(events=events)
            self.tb_folder = tb_folder

        def initialize(self, fl_ctx: Any) -> None:
            """Log that no curves are written, as TensorBoard is not installed."""
            log.warning(NO_CURVES)

        def save(self, fl_ctx: Any, shareable: Any, record_origin: str) -> None:
            """Ignore a value of a curve, as no curves are written."""

        def finalize(self, fl_ctx: Any) -> None:
            """Do nothing, as no file is open."""


class TensorBoard(TBAnalyticsReceiver):
    """Offer FLARE's TensorBoard receiver under a class path of this package, as for all classes that a job names."""


class FlareEvents(Curves):
    """Fire FLARE's events of a round, and send curves as FLARE's analytics events.

    Args:
        controller: FLARE's controller that fires the events.
        directions: see :class:`fairflare.federation.record.curves.Curves`.
    """

    def __init__(self, controller: Any, directions: Mapping[str, bool] | None = None) -> None:
        super().__init__(directions)
        self.controller = controller

    def scalar(self, tag: str, value: float, step: int) -> None:
        send_analytic_dxo(
            self.controller,
            create_analytic_dxo(tag=tag, value=value, data_type=AnalyticsDataType.SCALAR, global_step=step),
            self.controller.fl_ctx,
            EVENT,
            fire_fed_event=False,
        )

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

    def best_model(self, state: Mapping[str, Any], number: int) -> None:
        """Fire FLARE's event of a new best model, for the components that handle it.

        The event's model is the one that was validated, not the current global model.
        """
        self.controller.fl_ctx.set_prop(
            AppConstants.GLOBAL_MODEL,
            make_model_learnable(dict(state), {"current_round": number}),
            private=True,
            sticky=False,
        )
        self.controller.event(AppEventType.GLOBAL_BEST_MODEL_AVAILABLE)
