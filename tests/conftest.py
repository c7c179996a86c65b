"""What several tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The page at the end of a run takes two seconds, and hundreds of tests end a run; those of the page turn it on.
os.environ.setdefault("FAIRFLARE_REPORT", "0")
settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small networks are slower with two threads than with one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
