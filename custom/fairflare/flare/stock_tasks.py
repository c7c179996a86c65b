"""What FLARE's own workflows ask of a site: ``validate`` a model that is named, ``submit_model``.

Their messages carry a plain model or nothing, no directives, and a failure is a return code.
"""

from __future__ import annotations

import math

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants, ModelName

from fairflare.exchange.messages import STATUS_OK, STATUS_SKIPPED, TASK_VALIDATE, SiteReply, SiteTask, clean_state
from fairflare.exchange.tensor_file import in_words
from fairflare.federation.site.replies import suppressed_in
from fairflare.federation.site.site_file import SUBMITS
from fairflare.federation.site.worker import SiteWorker
from fairflare.flare.messages.wire import META_KEY
from fairflare.methods.base.home import OwnModel
from fairflare.methods.base.reports import SUPPRESSED, TOO_FEW

SUBMIT_MODEL = AppConstants.TASK_SUBMIT_MODEL


class NotServed(Exception):
    """Signal a task that this site does not do; the error's text is for the site's own log.

    Args:
        code: what FLARE is told.
    """

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


def is_stock(task_name: str, shareable: Shareable) -> bool:
    """Return whether one of FLARE's workflows asks, and not our server."""
    if task_name == SUBMIT_MODEL:
        return True
    if task_name != TASK_VALIDATE:
        return False
    if shareable.get_header(AppConstants.MODEL_OWNER):
        return True
    try:
        return META_KEY not in from_shareable(shareable).meta
    except (TypeError, ValueError):  # no message of ours either; its decoder says what is wrong
        return False


def validation(shareable: Shareable, asked: SiteTask | None) -> SiteTask:
    """Return the request to test the model of a stock ``validate`` task, exactly as it came: tensors or NumPy arrays.

    With a method that keeps parts of the model at the site that is the common model, or another site's, without them.

    Args:
        asked: by our server, last: whose run it is, and which tensors its model files hold; ``None``: it has not yet.

    Raises:
        NotServed: it holds no whole model.
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
    """Return the metrics as FLARE stores them; such as are not finite are left out.

    Raises:
        NotServed: the model could not be tested, or its ``primary`` metric is not finite.
    """
    found = {name: float(value) for name, value in reply.metrics.items() if math.isfinite(value)}
    held, odd = primary in suppressed_in({SUPPRESSED: None, **reply.stats}), ReturnCode.EXECUTION_RESULT_ERROR
    _refuse_if(
        (reply.status == STATUS_SKIPPED, ReturnCode.TASK_ABORTED, reply.reason),
        (reply.status != STATUS_OK, ReturnCode.EXECUTION_EXCEPTION, reply.reason),
        (held, odd, f"{primary} is {SUPPRESSED}: {TOO_FEW}"),
        (primary not in found, odd, f"{primary} is {reply.metrics.get(primary)}, no number"),
    )
    return DXO(DataKind.METRICS, data=found)


def check_submission(shareable: Shareable, worker: SiteWorker, asked: SiteTask | None = None) -> None:
    """Check that this site may and can give the model that is asked for.

    Raises:
        NotServed: its own file does not allow it, there is no model of that name, or parts of it stay at the site.
    """
    allowed, name = worker.settings.get(SUBMITS, False), shareable.get_header(AppConstants.SUBMIT_MODEL_NAME)
    no, own = ReturnCode.TASK_UNSUPPORTED, isinstance(worker.training.home, OwnModel)
    known = name in (ModelName.BEST_MODEL, ModelName.FINAL_MODEL)
    _refuse_if(
        (not isinstance(allowed, bool), no, f"setting {SUBMITS!r} must be true or false, got {allowed!r:.80}"),
        (
            not allowed,
            no,
            "the local model was asked for and not given, as cross-site evaluation sends it to all other sites; "
            f'"{SUBMITS}": true in local/fairflare.json allows it',
        ),
        (not known, ReturnCode.MODEL_UNRECOGNIZED, f"there is no local model {name!r:.80}"),
        (own, no, "the local model is not given: by the job's method it is this site's alone"),
    )
    # Checked last, because finding the tensors that stay at the site means building the network.
    if stays := worker.stays(asked):
        raise NotServed(
            no,
            f"the local model is not given: {in_words(stays)} of it stay at this site by the job's method",
        )


def _refuse_if(*cases: tuple[bool, str, str]) -> None:
    """Raise the first of these that is so: whether, what FLARE is told, why."""
    for there, code, why in cases:
        if there:
            raise NotServed(code, why)
