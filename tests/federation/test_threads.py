"""Test that the server's weights do not depend on its number of threads."""

from __future__ import annotations

from pathlib import Path

import torch

from fairflare.base.settings import settings
from fairflare.methods.base.rule import RoundInputs, Weighing
from fairflare.methods.fed_avg import FedAvg

from .examples import whole_round


@settings
class Watched(FedAvg):
    def weigh(self, inputs: RoundInputs) -> Weighing:
        self.threads = torch.get_num_threads()
        return super().weigh(inputs)


def test_weights_are_made_with_one_thread(tmp_path: Path) -> None:
    rule, before = Watched(), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        whole_round(rule, tmp_path)
        assert (rule.threads, torch.get_num_threads()) == (1, 3)
    finally:
        torch.set_num_threads(before)
