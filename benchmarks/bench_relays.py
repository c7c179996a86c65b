"""Run rounds through FLARE's relays: a provisioned network on loopback, with real processes, TLS and signed kits.

    python benchmarks/bench_relays.py [--sites 20] [--relays 2] [--methods q_fed_avg fed_lwr ditto creff fed_mrl]
    python benchmarks/bench_relays.py --sites 4 --relays 0    # the same without relays: every site asks the server

Half of the sites talk to the first relay, half to the second, none to the server. One method of each shape: one weight
a site, two phases, parts that stay at the site, tensors that the server makes, agents that choose for each site. Each
run gives the bits of a run in one process, or says where it does not. Every process is ended by its id.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.e2e.poc_tools import ADMIN, SERVER, PocSystem, free_ports, processes, wait_for  # noqa: E402

SETTINGS: dict[str, Any] = {
    "image_size": [32, 32], "features": [4, 4, 8, 8], "max_pool": False,
    "local_epochs": 1,
}  # fmt: skip
ALSO: dict[str, dict[str, Any]] = {
    "creff": {"feature_steps": 3, "classifier_epochs": 2, "gradient_repeats": 1},
    "fed_mrl": {"mu_policy": "qmix"},
}
METHODS = ("q_fed_avg", "fed_lwr", "ditto", "cgsv", "creff", "fed_mrl")


class Network(PocSystem):
    """Run a provisioned network: kits of server, relays and sites, started by their own scripts.

    Args:
        root: an empty folder.
        sites: names.
        relays: how many; the sites are dealt to them in turn. 0: all talk to the server.
    """

    def __init__(self, root: Path, sites: Sequence[str], relays: int) -> None:
        super().__init__(root, sites)
        self.relays = [f"relay-{index + 1}" for index in range(relays)]

    def nvflare(self, *arguments: str, timeout: float = 120, check: bool = True) -> str:
        kit = ["--startup-kit", str(self.kit(ADMIN))] if arguments[0] in ("job", "system") else []
        return super().nvflare(*arguments, *kit, timeout=timeout, check=check)

    def prepare(self) -> None:
        path = self.write_project()
        project = json.loads(path.read_text())
        of_site = {site: self.relays[i % len(self.relays)] for i, site in enumerate(self.sites) if self.relays}
        for entry in project["participants"]:
            if entry["name"] in of_site:
                entry["connect_to"] = {"name": of_site[entry["name"]]}
        for name, port in zip(self.relays, free_ports(len(self.relays)), strict=True):
            host = {"default_host": SERVER, "port": port, "scheme": "grpc", "connection_security": "mtls"}
            project["participants"].append({"name": name, "type": "relay", "org": "test", "listening_host": host})
        path.write_text(json.dumps(project))
        self.nvflare("provision", "-p", str(path), "-w", str(self.workspace))

    def start(self, timeout: int = 300) -> None:
        for names in ([SERVER], self.relays, self.sites):
            for name in names:
                with (self.kit(name) / "start.out").open("wb") as out:
                    subprocess.Popen(
                        ["./startup/start.sh"], cwd=self.kit(name), env=self.env, stdin=subprocess.DEVNULL, stdout=out,
                        stderr=subprocess.STDOUT, start_new_session=True,
                    )  # fmt: skip
            time.sleep(5 if names else 0)

        def all_here() -> bool:
            said = self.nvflare("system", "status", check=False, timeout=60)
            return all(f"{site}" in said for site in self.sites)

        wait_for("registration of all sites", all_here, timeout, period=2)


def resident(mark: str, word: str) -> float:
    """Return MB of the processes with a word in their command."""
    total = 0
    for pid, command in processes(mark).items():
        if word in command:
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return total / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--relays", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--keep", type=Path, help="a folder for the logs")
    given = parser.parse_args()
    import torch

    from fairflare.federation.plan.bounds import FOR_HOSPITALS
    from fairflare.federation.transports.local import run_local
    from fairflare.recipes import FairRecipe

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    sites = [f"site-{index + 1:02d}" for index in range(given.sites)]
    with tempfile.TemporaryDirectory(prefix="fairflare_relays_") as name:
        root = given.keep or Path(name)
        network = Network(root / "network", sites, given.relays)
        try:
            network.prepare()
            for participant in (SERVER, *sites):
                network.allow(participant)
            for place, site in enumerate(sites):
                mine = {"num_threads": 1, "phantom_site": place + 1}
                network.edit_local(site, "fairflare.json", lambda c, mine=mine: c.update(mine))
            started = time.monotonic()
            network.start(120 + 20 * len(sites))
            print(
                f"{len(sites)} sites, {given.relays} relays: started in {time.monotonic() - started:.0f} s", flush=True
            )
            print("| method | seconds a round | train | anchor | KB out a site | KB in a site | relay MB | bits |")
            print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |", flush=True)
            for method in given.methods:
                settings = {**FOR_HOSPITALS, **SETTINGS, **ALSO.get(method, {})}
                settings |= {
                    "phantom_sites": len(sites),
                    "phantom_samples": 40 * len(sites),
                    "phantom_test": max(184, 40 * len(sites)),  # 184 is the least that 23 classes need
                }
                recipe = FairRecipe(
                    method, sites=sites, packaging="preinstalled", settings=settings, num_rounds=given.rounds,
                    min_sites=2, phase_timeout=900, task="classification",
                )  # fmt: skip
                folder = root / method
                recipe.export(str(folder))
                job = network.submit(folder / recipe.name)
                said = network.wait(job, 900)
                relay = resident(network.mark, "/relay-1")
                if "FINISHED:COMPLETED" not in said:
                    print(f"{method}: {said[-1500:]}", flush=True)
                    continue
                workspace = network.download(job)
                results = json.loads((workspace / "fairflare" / "results.json").read_text())
                here = run_local(
                    recipe.plan, folder / "here", {"sites": {s: {"phantom_site": i + 1} for i, s in enumerate(sites)}}
                )
                ours = torch.load(here.parent / "FL_global_model.pt", weights_only=True)["model"]
                found = torch.load(workspace / "FL_global_model.pt", weights_only=True)["model"]
                same = ours.keys() == found.keys() and all(torch.equal(t, found[k]) for k, t in ours.items())
                print(row(method, results, len(sites), relay, same), flush=True)
        finally:
            network.close()


def row(method: str, results: dict[str, Any], sites: int, relay: float, same: bool) -> str:
    """Return a line of the table about the last round, which has no process's start in it."""
    last = results["rounds"][-1]
    phases = {phase["name"]: phase for phase in last["phases"]}
    seconds = {name: phases[name]["seconds"] if name in phases else 0.0 for name in ("train", "anchor")}
    out, back = (sum(p[key] for p in phases.values()) / 1000 / sites for key in ("bytes_out", "bytes_in"))
    left = sum(len(record["left_out"]) for record in results["rounds"])
    bits = ("the same" if same else "OTHER") + (f", {left} left out" if left else "")
    return (
        f"| {method} | {sum(p['seconds'] for p in phases.values()):.1f} | {seconds['train']:.1f} | "
        f"{seconds['anchor']:.1f} | {out:.0f} | {back:.0f} | {relay:.0f} | {bits} |"
    )


if __name__ == "__main__":
    main()
