"""Define an executor whose site-2 reports nonsense about its training; the other sites are healthy."""

from fairflare.flare.executor import SiteExecutor


class OddExecutor(SiteExecutor):
    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        result = super().execute(task_name, shareable, fl_ctx, abort_signal)
        if task_name == "train" and fl_ctx.get_identity_name() == "site-2":
            own = result["DXO"]["meta"]["fairflare"]
            assert own["status"] == "ok"  # it did train
            own["stats"] = "x"
        return result
