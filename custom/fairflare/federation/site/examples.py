"""Draw example predictions at a site, only into the folder that the site's own file names for them.

No reply contains any part of the pictures. A failure to draw them is only logged and costs no round.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fairflare.base.disk.files import csv_text, private_folder, safe_name, write_whole
from fairflare.base.stopping import TaskStopped
from fairflare.exchange.messages import SPLIT_VALIDATION, SiteTask
from fairflare.methods.base.training import LocalTraining, SiteError, SiteRun

log = logging.getLogger(__name__)
EXAMPLES = "examples_folder"  # name of the site's setting for the folder, in local/fairflare.json


def examples_folder(site: str, settings: Mapping[str, Any]) -> Path | None:
    """Return the site's setting ``examples_folder``; ``None``, the default, for no pictures of its images.

    Raises:
        SiteError: the setting is no absolute path (its value is not sent to the server).
    """
    chosen = settings.get(EXAMPLES)
    if chosen is None:
        return None
    path = Path(chosen).expanduser() if isinstance(chosen, str) and chosen else None
    if path is None or not path.is_absolute():
        problem = f"site {site!r}: setting {EXAMPLES!r} must be the absolute path of a folder"
        raise SiteError(f"{problem}, got {chosen!r:.200}; correct it in local/fairflare.json", public=problem)
    return path


def draw_examples(
    folder: Path | None, request: SiteTask, run: SiteRun, model: torch.nn.Module, training: LocalTraining
) -> None:
    """Draw the best, the median and the worst test image after the final test, in a folder of this site and run.

    Write also a CSV file of the values by class that the method measured in the site's last round (Fed-MAS: w and w^).

    Args:
        folder: what :func:`examples_folder` returned; ``None`` if nothing is drawn.
        request: the test that was done. Nothing is drawn unless it is the final test of the run's last model, which is
            recognised by the validation split: no other test of a site's model measures that split as well.
        run, model: the run and the model that were tested.
        training: the method's site half; gives the batch size of the test, so that the outputs drawn are those tested.

    Raises:
        TaskStopped: the job was stopped. Any other error is only logged.
    """
    if folder is None or request.as_sent or SPLIT_VALIDATION not in request.measure:
        return
    try:
        place = folder / safe_name(run.site) / safe_name(request.run or "run") / f"rounds-{request.current_round}"
        private_folder(place)
        made = "SYNTHETIC data, " if run.data.synthetic else ""
        title = f"{run.site}: {made}model after {request.current_round} rounds"
        by_class = getattr(training, "by_class", "")
        if by_class and (kept := run.store.load_before(by_class, request.current_round)):
            _write_by_class(place / "by_class.csv", kept, run.data.class_names)
        drawn = run.task.write_examples(
            model, run.data, place, batch_size=training.batch_size, device=run.device, title=title
        )
    except TaskStopped:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        log.warning("site %s: no example predictions: %s; the test counts all the same", run.site, what)
        return
    if drawn:
        log.info("site %s: best, median and worst test image are in its %s", run.site, EXAMPLES)
    else:
        kind = type(run.task).__name__
        log.warning("site %s: no example predictions: the task (%s) does not know how to draw them", run.site, kind)


def _write_by_class(path: Path, kept: Mapping[str, Any], names: Sequence[str] | None) -> None:
    """Write Fed-MAS's values by class to a CSV file: images, w of the received model, w^ while training.

    Args:
        path: path of the CSV file.
        kept: ``counts`` (images), ``before`` (w) and ``during`` (w^), each with a number for each class. Classes
            without an image are left out of the file.
        names: names of the classes; ``None`` if the numbers of the classes take their place.

    Raises:
        OSError: the file cannot be written.
    """
    counts, before, during = (kept[name].tolist() for name in ("counts", "before", "during"))
    of = names or [str(number) for number in range(len(counts))]
    rows = [row for row in zip(of, counts, before, during, strict=True) if row[1]]
    text = csv_text([["class", "images", "before", "during"], *rows])
    write_whole(path, partial(Path.write_text, data=text, encoding="utf-8"), durable=False)
