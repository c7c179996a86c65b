"""The server's memory does not grow with the number of sites that answer at once, over FLARE's real network."""

from __future__ import annotations

import pytest
from benchmarks.bench_server_memory import OURS, in_poc, prepare_poc

from .poc_tools import poc_system

MEGABYTES = 60


@pytest.mark.e2e
@pytest.mark.walk
@pytest.mark.timeout(900)
def test_six_sites_need_little_more_than_two(tmp_path):
    found = {}
    for count in (2, 6):
        sites = [f"site-{number}" for number in range(1, count + 1)]
        folder = tmp_path / str(count)
        with poc_system(folder / "system", sites) as poc:
            prepare_poc(poc, sites)
            found[count] = in_poc(poc, folder, OURS, sites, MEGABYTES, 2)
    # Held in memory, four more replies would be four models and their copies.
    assert found[6]["replies"] - found[2]["replies"] < 2 * MEGABYTES, found
    # While the model goes out, FLARE needs some tensors for each site.
    assert found[6]["peak"] - found[2]["peak"] < 4 * MEGABYTES, found
