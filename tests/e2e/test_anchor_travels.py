"""Test the anchor in half the bytes through FLARE's simulator."""

from __future__ import annotations

import json

import pytest
import torch

from fairflare.federation.transports.local import run_local
from fairflare.recipes import FairRecipe

from .conftest import TINY
from .test_simulator import global_model


@pytest.mark.e2e
@pytest.mark.long
def test_the_anchor_as_a_difference_gives_the_bits_of_one_process(simulate, tmp_path):
    """Check the anchor in bfloat16 through FLARE; one site's child processes find the state saved for them."""
    settings = {**TINY, "local_epochs": 1, "anchor_as": "difference"}
    recipe = FairRecipe("fed_lwr", sites=2, num_rounds=1, settings=settings)
    recipe.export(str(tmp_path / "jobs"))
    local = {"sites": {"site-2": {"isolate": True}}}
    run = simulate(tmp_path / "jobs" / "fed_lwr", threads=2, local=local)
    assert run.code == 0, run.log[-3000:]
    assert not run.results["rounds"][0]["left_out"]
    here = run_local(recipe.plan, tmp_path / "here")
    document = json.loads((here / "results.json").read_text())
    assert run.results["rounds"][0]["layers"] == document["rounds"][0]["layers"]
    sent = [{p["name"]: p["bytes_out"] for p in found["rounds"][0]["phases"]} for found in (run.results, document)]
    assert sent[0] == sent[1]
    assert sent[0]["anchor"] < 0.6 * sent[0]["train"]
    single = torch.load(here.parent / "FL_global_model.pt", weights_only=True)["model"]
    assert all(torch.equal(tensor, single[name]) for name, tensor in global_model(run).items())
