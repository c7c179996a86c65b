"""Round checkpoints that outlive the job, since FLARE does not resume one.

A folder per experiment holds ``state.json`` and the files it names. ``state.json`` is replaced last and atomically, so
what it names is complete whenever it can be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fairflare.core.files import write_whole
from fairflare.core.settings import by_name
from fairflare.exchange.messages import clean_state

STATE_FILE = "state.json"


class CheckpointError(ValueError):
    """A checkpoint cannot be gone on from; the text says which, why, and what to do."""


@dataclass
class Checkpoint:
    """What is known after a round.

    Attributes:
        next_round: the first round that is not done.
        model: global model.
        rule: the rule's own state.
        results: the results store's state.
        config: what the run was configured with; compared on resume.
        extra: the run's small state.
    """

    next_round: int
    model: dict[str, torch.Tensor]
    rule: dict[str, Any]
    results: dict[str, Any]
    config: dict[str, Any]
    extra: dict[str, Any]


class CheckpointFolder:
    """Reads and writes :class:`Checkpoint` in one folder; the last complete one is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint; a crash at any point leaves the old one or the new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tag = f"{checkpoint.next_round:06d}"
        model, rule = f"model-{tag}.safetensors", f"rule-{tag}.pt"
        plain = {name: tensor.clone() for name, tensor in clean_state(checkpoint.model).items()}
        write_whole(self.folder / model, lambda path: save_file(plain, path))
        write_whole(self.folder / rule, lambda path: torch.save(checkpoint.rule, path))
        state = {
            "next_round": checkpoint.next_round,
            "model": model,
            "rule": rule,
            "results": checkpoint.results,
            "config": checkpoint.config,
            "extra": checkpoint.extra,
        }
        write_whole(self.folder / STATE_FILE, lambda path: path.write_text(json.dumps(state), encoding="utf-8"))
        for path in self.folder.iterdir():
            if path.name.startswith(("model-", "rule-")) and path.name not in (model, rule):
                path.unlink(missing_ok=True)

    def load(self) -> Checkpoint | None:
        """The last complete checkpoint; ``None`` when there is none.

        Raises:
            CheckpointError: the folder holds something else (names the file).
        """
        path = self.folder / STATE_FILE
        if not path.exists():
            return None
        state: Any = None
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            return Checkpoint(
                next_round=int(state["next_round"]),
                model=load_file(self.folder / state["model"]),
                rule=torch.load(self.folder / state["rule"], map_location="cpu", weights_only=True),
                results=dict(state["results"]),
                config=dict(state["config"]),
                extra=dict(state["extra"]),
            )
        except Exception as e:
            old = isinstance(state, dict) and "aggregator" in state  # version 0.1's name of the rule
            why = "an older fairflare wrote it" if old else f"{type(e).__name__}: {e}"
            raise CheckpointError(
                f"checkpoint {path} cannot be read ({why}); remove its folder to start anew, or use "
                "another experiment id"
            ) from e


def check_same_config(old: Mapping[str, Any], new: Mapping[str, Any], experiment: str) -> None:
    """Refuses to go on with an experiment under other settings; another number of rounds is fine.

    Raises:
        CheckpointError: names each differing setting with both values.
    """
    was, now = by_name(old), by_name(new)
    differing = [
        f"{name}: was {was.get(name)!r}, is {now.get(name)!r}"
        for name in sorted(set(was) | set(now))
        if name != "num_rounds" and was.get(name) != now.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"experiment {experiment!r} has a checkpoint of other settings ({'; '.join(differing)}); give the run "
            "another experiment id, or remove the checkpoint folder"
        )
