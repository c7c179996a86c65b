"""Write a run's curves over rounds, with tags such as ``train_loss/site-1``, for FLARE's receivers and TensorBoard."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fairflare.core.fairness import higher_is_better, summarize
from fairflare.federation.collecting.transport import Listener
from fairflare.reporting.documents import RoundRecord

EVENTS_FOLDER = "tb_events"  # folder in the run directory, named as by FLARE's receiver
NO_CURVES = "no curves for TensorBoard: it is not installed (pip install 'fairflare[tensorboard]')"


class Curves(Listener):
    """Write curves of each round's train losses, validation metric, its spread and weights, and of the final test.

    Args:
        directions: whether larger values are better, by metric, see :meth:`fairflare.base.task.Task.directions`.
    """

    def __init__(self, directions: Mapping[str, bool] | None = None) -> None:
        self.directions = directions

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Write one finite value of a curve; the step is the round's number. Subclasses implement this."""
        raise NotImplementedError

    def _write(self, curves: Iterable[tuple[str, Any]], step: int) -> None:
        for tag, value in curves:
            if isinstance(value, (int, float)) and math.isfinite(value):
                self.scalar(tag, float(value), step)

    def round_done(self, record: RoundRecord, metric: str) -> None:
        by_layer = [(layer, *item) for layer, by in (record.layers or {}).items() for item in by.items()]
        self._write([
            *((f"train_loss/{site}", values.get("loss")) for site, values in record.train.items()),
            *self._split_curves("validation", metric, record.validation),
            *((f"weight/{site}", weight) for site, weight in (record.site_weights or {}).items()),
            *((f"report_{name}/{site}", v) for site, by in record.reports.items() for name, v in by.items()),
            *record.values.items(),
            *(
                (f"{kind}/{layer}/{site}", values.get(kind))
                for layer, site, values in by_layer
                for kind in ("cka", "weight")
            ),
        ], record.current_round)  # fmt: skip

    def tested(self, test: Mapping[str, Mapping[str, float]], metric: str, step: int) -> None:
        self._write(self._split_curves("test", metric, test), step)

    def _split_curves(
        self, split: str, metric: str, measured: Mapping[str, Mapping[str, Any]]
    ) -> Iterator[tuple[str, float]]:
        """Yield a tag and a value of a metric: for each site, and for each summary over the sites."""
        scores = {site: values[metric] for site, values in measured.items() if metric in values}
        tag = f"{split}_{metric}"
        yield from ((f"{tag}/{site}", value) for site, value in scores.items())
        if scores:
            summary = summarize(scores, higher_is_better=higher_is_better(metric, self.directions))
            yield from ((f"{tag}/average", summary.mean), (f"{tag}/std", summary.std), (f"{tag}/worst", summary.worst))


class EventFiles(Curves):
    """Write the curves as TensorBoard files where no FLARE receiver does so; a context manager.

    Nothing is written where the package ``tensorboard`` is not installed.

    Args:
        run_dir: the server's run directory.
        directions: see :class:`Curves`.
    """

    def __init__(self, run_dir: Path, directions: Mapping[str, bool] | None = None) -> None:
        super().__init__(directions)
        self.folder = run_dir / EVENTS_FOLDER
        self._writer: Any = None

    def __enter__(self) -> EventFiles:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def round_done(self, record: RoundRecord, metric: str) -> None:
        if record.current_round == 0:  # remove the curves of an earlier run in this folder
            shutil.rmtree(self.folder, ignore_errors=True)
        super().round_done(record, metric)

    def scalar(self, tag: str, value: float, step: int) -> None:
        if self._writer is None and find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder / "server"))
        if self._writer is not None:
            self._writer.add_scalar(tag, value, step)
