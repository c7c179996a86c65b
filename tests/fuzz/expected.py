"""Define for which changes the server's treatment of the reply is known."""

from __future__ import annotations

#: Single changes of which it is known what the server must do; ``{metrics}`` stands where the phase has its metrics.
REFUSED = (
    "{own} missing", "{own}.version missing", "{own}.status missing", "{own}.status = None", "{own}.status = x",
    "{own}.status = empty text", "{own}.status = True", "{own}.status wrapped", "{own}.stats = x", "{own}.stats = [1]",
    "{own}.stats.train_loss = x", "{own}.stats.train_loss = long text", "{own}.stats.train_loss = bytes",
    "{own}.stats.ledger = x", "{own}.stats.ledger = long text", "{own}.stats.epsilon = -1",
    "{own}.stats.synthetic = 1", "{own}.stats.seconds = -1", "{own}.stats.seconds = nan",
    "headers.current_round = 7.0", "headers.current_round = -1", "headers = x", "headers = None", "headers missing",
    "an empty reply", "model: no tensor", "model: one more tensor", "model: nested",
    "model: all doubled", "model: all one nan", "model: all one inf", "model: all overflows as float32",
    "model: all complex64", "model: all as list", "model: all as numpy text", "return code 'EXECUTION_EXCEPTION'",
    "{own}.num_steps = bytes", "{own}.num_steps = -1", "{own}.num_samples = -1", "{own}.num_samples = 1e308",
    "{metrics} missing", "{metrics} = {}", "{metrics} = x", "{metrics}.dice = nan", "{metrics}.dice = inf",
    "{metrics}.dice = 7.0", "{metrics}.dice = -0.5", "{metrics}.dice = x", "{metrics}.dice = None",
    "{metrics}.dice = True", "{metrics}.loss = nan", "{metrics}.loss = inf", "{metrics}.loss = -inf", "1001 metrics",
)  # fmt: skip
TAKEN = (
    "model: all as numpy", "model: all as numpy fortran", "model: all as numpy f64", "model: all float16",
    "model: all float64", "model: all bfloat16", "model: turned round", "more content",
    "model: one tensor missing",  # a filter excluded it: it counts as unchanged
    "{own}.reason missing", "{own}.reason = long text", "{own}.reason = forged", "{own}.stats missing",
    "also '{own}.report.unknown' = nan", "{own}.stats.train_loss = nan", "{own}.num_steps missing",
    "{metrics}.loss = 1e30", "{metrics}.dice = 1",
)  # fmt: skip


def expectations(phase: str) -> dict[str, bool]:
    """Return whether the reply is accepted, by the name of the change; other changes may go either way."""
    metrics = {"train": "initial_metrics", "validate": "data"}.get(phase, "-")  # "{metrics}" in their names may be "{}"
    known = dict.fromkeys(REFUSED, False) | dict.fromkeys(TAKEN, True)
    if phase != "train":  # what it says of a training is not looked at
        odd = ("stats", "num_", "model:", *(["metric"] if phase in ("anchor", "norms", "check") else []))
        known = {name: taken for name, taken in known.items() if taken or not any(word in name for word in odd)}
    if phase == "anchor":
        wrong = ("layers missing", "layers = x", "cka missing", "cka = [nan]", "dissimilarity = [1]", "cka = set")
        known |= {f"{{own}}.report.{change}": False for change in wrong}
    if phase == "validate":
        wrong = ("x", "[text]", "[1]", "set")
        known |= {f"{{own}}.stats.resampled = {change}": False for change in wrong}
        known["{own}.stats.resampled missing"] = True
    if phase == "norms":
        wrong = ("norms missing", "norms = x", "norms = [text]", "values missing", "values = [1]", "means = [1]")
        wrong = (*wrong, "variances = [nan]", "variances = set", "more = 1", "more = True", "more missing")
        known |= {f"{{own}}.report.{change}": False for change in wrong if change != "values = [1]"}
        known["{own}.report.values = [1]"] = True  # fewer values than images: a network may look at a part of them
        known |= {f"{{own}}.num_samples{change}": False for change in (" missing", " = None", " = -1", " = 1e308")}
    known |= {f"status {status!r:.20} with reason {'few cases'!r:.20}": False for status in ("failed", "", None, 0)}
    return {name.replace("{own}", "fairflare").replace("{metrics}", metrics): v for name, v in known.items()}
