"""Answer the tasks of FLARE's own workflows at a site: ``validate`` a given model, and ``submit_model``.

The messages of these tasks hold a plain model or nothing, but no directives. A failure is reported as a return code.
"""

from __future__ import annotations

import math

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants, ModelName

from fairflare.core.cells import SUPPRESSED, values_of
from fairflare.exchange.messages import STATUS_OK, STATUS_SKIPPED, TASK_VALIDATE, SiteReply, SiteTask, clean_state
from fairflare.exchange.tensor_file import list_names
from fairflare.federation.site.site_file import SUBMITS
from fairflare.federation.site.worker import SiteWorker
from fairflare.flare.messages.wire import META_KEY
from fairflare.methods.base.home import OwnModel
from fairflare.methods.base.reports import TOO_FEW

SUBMIT_MODEL = AppConstants.TASK_SUBMIT_MODEL


class NotServed(Exception):
    """Signal that a site does not perform a task of FLARE; the text is for the site's own log.

    Args:
        code: the return code that FLARE gets.
        why: the reason, for the site's own log.
    """

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


def is_stock(task_name: str, shareable: Shareable) -> bool:
    """Return whether a task comes from one of FLARE's own workflows, not from FairFlare's controller."""
    if task_name == SUBMIT_MODEL:
        return True
    if task_name != TASK_VALIDATE:
        return False
    if shareable.get_header(AppConstants.MODEL_OWNER):
        return True
    try:
        return META_KEY not in from_shareable(shareable).meta
    except (TypeError, ValueError):  # not FairFlare's message either; the decoder raises the error
        return False


def validation(shareable: Shareable, asked: SiteTask | None) -> SiteTask:
    """Return the request to test the model in a ``validate`` task of FLARE's own workflows.

    The model, of tensors or NumPy arrays, is tested exactly as it was sent. If the method keeps parts of the model at
    the site, these parts are not used: the sent model is the common one, or another site's.

    Args:
        shareable: FLARE's message.
        asked: the last request of FairFlare's controller, which names the run and the tensors of its model files;
            ``None`` if there was no request yet.

    Raises:
        NotServed: the message holds no whole model.
    """
    try:
        dxo = from_shareable(shareable)
        if dxo.data_kind != DataKind.WEIGHTS or not dxo.data:
            raise ValueError(f"it holds {dxo.data_kind}, needed is a whole model ({DataKind.WEIGHTS})")
        state = clean_state(dxo.data)
    except (AttributeError, TypeError, ValueError) as error:
        raise NotServed(ReturnCode.BAD_TASK_DATA, f"the model to validate cannot be used: {error}") from error
    of_run = asked or SiteTask(TASK_VALIDATE, {}, current_round=0, num_rounds=1, seed=0)
    return SiteTask(
        name=TASK_VALIDATE,
        state=state,
        current_round=0,
        num_rounds=1,
        seed=of_run.seed,
        experiment=of_run.experiment,
        run=of_run.run,
        exchange=of_run.exchange,
        makes=of_run.makes,
        rest=of_run.rest,
        as_sent=True,
    )


def metrics_of(reply: SiteReply, primary: str) -> DXO:
    """Return the metrics of a reply in the form in which FLARE stores them; values that are not finite are left out.

    Raises:
        NotServed: the model could not be tested, or its ``primary`` metric is withheld or not finite.
    """
    values, odd = values_of(reply.metrics), ReturnCode.EXECUTION_RESULT_ERROR
    held = any(cell.metric == primary and cell.reason == SUPPRESSED for cell in reply.metrics)
    metrics = {name: value for name, value in values.items() if math.isfinite(value)}
    _refuse_if(
        (reply.status == STATUS_SKIPPED, ReturnCode.TASK_ABORTED, reply.reason),
        (reply.status != STATUS_OK, ReturnCode.EXECUTION_EXCEPTION, reply.reason),
        (held, odd, f"{primary} is {SUPPRESSED}: {TOO_FEW}"),
        (primary not in metrics, odd, f"{primary} is {values.get(primary)}, no number"),
    )
    return DXO(DataKind.METRICS, data=metrics)


def check_submission(shareable: Shareable, worker: SiteWorker, asked: SiteTask | None = None) -> None:
    """Check that a site may send its local model in answer to ``submit_model``.

    Raises:
        NotServed: the site's own file does not allow it, there is no model of the requested name, or the method keeps
            the model or parts of it at the site.
    """
    allowed, name = worker.settings.get(SUBMITS, False), shareable.get_header(AppConstants.SUBMIT_MODEL_NAME)
    no, keeps_model = ReturnCode.TASK_UNSUPPORTED, isinstance(worker.training.home, OwnModel)
    _refuse_if(
        (not isinstance(allowed, bool), no, f"setting {SUBMITS!r} must be true or false, got {allowed!r:.80}"),
        (
            not allowed,
            no,
            "the local model was asked for and not given, as cross-site evaluation sends it to all other sites; "
            f'"{SUBMITS}": true in local/fairflare.json allows it',
        ),
        (
            name not in (ModelName.BEST_MODEL, ModelName.FINAL_MODEL),
            ReturnCode.MODEL_UNRECOGNIZED,
            f"there is no local model {name!r:.80}",
        ),
        (keeps_model, no, "the local model is not sent: by the job's method it is this site's alone"),
    )
    # Checked last, because finding the tensors that stay at the site means building the network.
    if stays := worker.stays(asked):
        raise NotServed(
            no,
            f"the local model is not sent: {list_names(stays)} of it stay at this site by the job's method",
        )


def _refuse_if(*cases: tuple[bool, str, str]) -> None:
    """Raise ``NotServed`` for the first case whose condition holds; a case is (condition, return code, reason)."""
    for there, code, why in cases:
        if there:
            raise NotServed(code, why)
