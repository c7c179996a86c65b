"""Job folders as they were exported before a method's server half was a rule."""

from __future__ import annotations

import json
from pathlib import Path

OLD_JOB = "this job folder was exported by an older fairflare; export it again"
# What the twelve job folders of version 0.1.0 named, before parts and rules: class and settings that are gone.
OLD_TRAININGS = {"bsm_fl": "fairflare.methods.base.LocalTraining", "fed_avg": "fairflare.methods.base.LocalTraining"}
OLD_FED_MRL = {
    "use_som": True, "mu_policy": "qmix", "zeta": 0.95, "mean_loss": "mean", "action_mode": "grid",
    "share_agents": False, "double_q": False, "gamma": 0.99, "agent_rate": 0.001, "agent_hidden": 64, "warmup": 10,
    "updates": 8, "explore": 0.3, "cautious": False, "grid": [5, 5], "som_init": "sample", "som_input": "weights",
    "sigma_0": 2.0, "kappa": 0.1, "sigma_min": 0.5, "eta_som": 0.5, "som_epochs": 1, "sigma_w": 1.0,
    "som_restart": False, "agent_seed": 0,
}  # fmt: skip


def as_exported_before(folder: Path, name: str) -> None:
    """Turns a job folder into what the exporter wrote before there were rules."""
    config = folder / "app" / "config"
    server = json.loads((config / "config_fed_server.json").read_text())
    client = json.loads((config / "config_fed_client.json").read_text())
    arguments = server["workflows"][0]["args"]
    rule = arguments.pop("rule")
    settings = OLD_FED_MRL if name == "fed_mrl" else rule["args"]
    arguments["aggregator"] = {"path": rule["path"], "args": {**settings, "min_sites": 1}}
    if name in OLD_TRAININGS:
        client["executors"][0]["executor"]["args"]["training"]["path"] = OLD_TRAININGS[name]
    (config / "config_fed_server.json").write_text(json.dumps(server))
    (config / "config_fed_client.json").write_text(json.dumps(client))
