"""Give FLARE's other components access to the run's model files, by a persistor."""

from __future__ import annotations

from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.model import ModelLearnable
from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor

from fairflare.federation.record.models import BEST_MODEL_FILE, MODEL_FILE


class RunModels(PTFileModelPersistor):
    """Read the run's ``FL_global_model.pt`` and ``best_FL_global_model.pt`` for FLARE's model locators.

    Only :class:`fairflare.federation.record.models.ModelFiles` writes these files, in FLARE's layout. FLARE's event of
    a new best model is fired after its file was written, so nothing is written twice. The class is needed because
    FLARE's own persistor is not on FLARE's default allow list of classes.
    """

    def __init__(self) -> None:
        super().__init__(
            global_model_file_name=MODEL_FILE,
            best_global_model_file_name=BEST_MODEL_FILE,
            allow_numpy_conversion=False,  # NumPy has no bfloat16
            load_device="cpu",
        )

    def handle_event(self, event: str, fl_ctx: FLContext) -> None:
        """Find the run's folder when a run starts; ignore other events, at which FLARE's class would save models."""
        if event == EventType.START_RUN:
            self._initialize(fl_ctx)
            self.log_dir = fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id())

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        """Return the current global model, or an empty model before the first round."""
        path = Path(self.log_dir) / MODEL_FILE
        self.ckpt_preload_path = str(path) if path.is_file() else None
        return super().load_model(fl_ctx)

    def save_model(self, ml: ModelLearnable, fl_ctx: FLContext) -> None:
        """Refuse to save a model, since another workflow would overwrite the run's result.

        Raises:
            RuntimeError: always; the other workflow needs its own persistor.
        """
        raise RuntimeError(
            "the model files of this run are written by RoundsController; give this workflow a persistor of its own"
        )
