"""Test that the server's memory hardly grows with the number of sites that answer at once, over a real network.

Beyond the budget of ``models_in_memory``, that is; here it is 0.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.bench_server_memory import OURS, in_poc, in_simulator, prepare_poc

from .poc_tools import poc_system

MEGABYTES = 60


def found_in(mode: str, folder: Path, sites: list[str]) -> dict[str, float]:
    folder.mkdir()
    if mode == "simulator":
        return in_simulator(folder, OURS, sites, MEGABYTES, 2, models_in_memory=0)
    with poc_system(folder / "system", sites) as poc:
        prepare_poc(poc, sites, models_in_memory=0)
        return in_poc(poc, folder, OURS, sites, MEGABYTES, 2)


@pytest.mark.e2e
@pytest.mark.walk
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["poc", "simulator"])
def test_six_sites_need_little_more_than_two(mode, tmp_path):
    found = {}
    for count in (2, 6):
        sites = [f"site-{number}" for number in range(1, count + 1)]
        found[count] = found_in(mode, tmp_path / str(count), sites)
    # Held in memory, four more replies would be four models and their copies.
    assert found[6]["replies"] - found[2]["replies"] < 1.5 * MEGABYTES, found
    # And the whole run: were the model sent to all sites at once, two models more.
    assert found[6]["peak"] - found[2]["peak"] < 1.5 * MEGABYTES, found
