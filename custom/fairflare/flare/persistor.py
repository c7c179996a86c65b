"""The run's model files as FLARE's other components look for them: through a persistor."""

from __future__ import annotations

from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.model import ModelLearnable
from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor

from fairflare.federation.record.models import BEST_MODEL_FILE, MODEL_FILE


class RunModels(PTFileModelPersistor):
    """``FL_global_model.pt`` and ``best_FL_global_model.pt`` of the run directory, for FLARE's locators to read.

    :class:`fairflare.federation.record.models.ModelFiles` alone writes them, in FLARE's layout; FLARE's event of a new
    best model is fired when that file is there already, so nothing is written twice. Under our prefix, since FLARE's
    own class is not on its default allow list.
    """

    def __init__(self) -> None:
        super().__init__(
            global_model_file_name=MODEL_FILE,
            best_global_model_file_name=BEST_MODEL_FILE,
            allow_numpy_conversion=False,  # NumPy has no bfloat16
            load_device="cpu",
        )

    def handle_event(self, event: str, fl_ctx: FLContext) -> None:
        """Find the run's folder when a run starts, and do nothing else.

        The stock class would write the best model here, too.
        """
        if event == EventType.START_RUN:
            self._initialize(fl_ctx)
            self.log_dir = fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id())

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        """Return the current global model; an empty one before the first round."""
        path = Path(self.log_dir) / MODEL_FILE
        self.ckpt_preload_path = str(path) if path.is_file() else None
        return super().load_model(fl_ctx)

    def save_model(self, ml: ModelLearnable, fl_ctx: FLContext) -> None:
        """Refuse to save: another workflow would replace the run's result.

        Raises:
            RuntimeError: always; give that workflow a persistor of its own.
        """
        raise RuntimeError("the model files of this run are written by RoundsController; give this workflow its own")
