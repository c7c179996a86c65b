"""Write the server's curves to MLflow, by FLARE's own receiver. Importing this module needs the package ``mlflow``."""

from __future__ import annotations

import re
from typing import Any

try:
    from nvflare.app_opt.tracking.mlflow.mlflow_receiver import MLflowReceiver
except ImportError as error:
    raise ImportError(
        f"this job writes its curves to MLflow, which cannot be imported here ({error}): pip install "
        "'fairflare[mlflow]' where the job is made and at the server, or make the job without it"
    ) from error
from nvflare.apis.analytix import AnalyticsData
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from fairflare.flare.tracking import EVENT

EVENTS = (EVENT, f"fed.{EVENT}")


class MLflow(MLflowReceiver):
    """Write curves that the server sends to MLflow.

    FLARE's own MLflow receiver has an MLflow run for each site and drops the server's values. This receiver has a run
    for each sender: one for the server, with all curves of a job, and one for a site only if its script sends values.

    If the MLflow store does not answer, the job goes on without curves: after the first failure nothing more is sent to
    the store, and the server's log reports this.

    Args:
        tracking_uri: address of the store; ``None`` for FLARE's default, an SQLite file in the job's results.
        kw_args: ``experiment_name``, ``run_name``, ``experiment_tags`` and ``run_tags``, as for FLARE's receiver.
        artifact_location: location for artifacts, as for FLARE's receiver.
        events: events whose values are written; ``None`` for those of the server and of the sites.
        buffer_flush_time: seconds between two deliveries.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        kw_args: dict[str, Any] | None = None,
        artifact_location: str | None = None,
        events: list[str] | None = None,
        buffer_flush_time: float = 1,
    ) -> None:
        super().__init__(tracking_uri, kw_args, artifact_location, events or list(EVENTS), buffer_flush_time)
        self.buffer_flush_time = buffer_flush_time  # the export of a job reads arguments from attributes of their name
        self.failed = False

    @classmethod
    def like(cls, receiver: MLflowReceiver) -> MLflow:
        """Make a receiver with the settings of FLARE's receiver, and with its events unless they are the defaults."""
        events = None if receiver.events == [f"fed.{EVENT}"] else receiver.events
        kept = receiver.tracking_uri, receiver.kw_args, receiver.artifact_location
        return cls(*kept, events, receiver.buff_flush_time)

    def initialize(self, fl_ctx: FLContext) -> None:
        """Connect to the store and start the server's MLflow run.

        FLARE's receiver would start a run for each connected site instead.
        """
        import mlflow

        mlflow.set_tracking_uri(self._get_tracking_uri(fl_ctx))
        self._run_of(fl_ctx.get_identity_name(), fl_ctx)

    def save(self, fl_ctx: FLContext, shareable: Shareable, record_origin: str) -> None:
        if self.failed:
            return
        try:
            self._run_of(record_origin, fl_ctx)
            super().save(fl_ctx, shareable, record_origin)
        except Exception:
            self.failed = True
            self.log_error(fl_ctx, "MLflow: no more curves of this job are sent to it", fire_event=False)
            raise

    def buffer_data(self, data: AnalyticsData, record_origin: str) -> None:
        data.tag = tag(data.tag)
        super().buffer_data(data, record_origin)

    def finalize(self, fl_ctx: FLContext) -> None:
        if not self.failed:
            super().finalize(fl_ctx)

    def _run_of(self, origin: str, fl_ctx: FLContext) -> None:
        if origin in self.buffer:
            return
        name = self.kw_args.get("experiment_name") or "FLARE FL Experiment"
        tags = self._get_tags("experiment_tags", kwargs=self.kw_args)
        self._mlflow_setup(self._get_artifact_location(self.artifact_location, fl_ctx), name, tags, [origin], fl_ctx)
        self._init_buffer([origin])


def tag(name: str) -> str:
    """Return a curve's name with ``_`` in place of characters and parts that MLflow refuses.

    >>> tag("cka//site #1"), tag("weight/../a")
    ('cka/_/site _1', 'weight/_/a')
    """
    parts = re.sub(r"[^\w./: -]", "_", name).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
