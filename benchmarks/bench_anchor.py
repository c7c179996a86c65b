"""Measure what the anchor of Fed-LWR in half the bytes does to the weights, in each round of one run.

    python benchmarks/bench_anchor.py [--rounds 5] [--data FILE --set in_channels=3 ...]

The run is one with the anchor as it is. In each round the sites are also asked about the same anchor in bfloat16
(``anchor_as=bf16``) and as a difference in bfloat16 to the model that they began the round with (``difference``): same
models, same images. What differs is the form. The table has, over the rounds, layers and sites, the error of 1 - delta
relative to it and that of the weights (Eq. 5), and the anchor phase's bytes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from fairflare.core.weighting import dissimilarity_weights
from fairflare.exchange.anchor_forms import lighter
from fairflare.exchange.messages import Message, num_bytes
from fairflare.federation.collecting.transport import Question
from fairflare.federation.plan.plan import Plan, make_plan
from fairflare.federation.transports import local as in_process
from fairflare.federation.transports.local import LocalTransport, run_local

FORMS: tuple[Any, ...] = ("model", "bf16", "difference")
SETTINGS: dict[str, Any] = {"image_size": [32, 32], "features": [8, 8, 16, 32, 64, 8], "local_epochs": 1}


class AskedThrice(LocalTransport):
    """Ask about the anchor in every form; the run continues with the answer about the unchanged anchor."""

    received: Any = None
    found: list[dict[str, dict[str, Any]]]
    sent: dict[str, int]

    def ask(self, question: Question) -> None:
        if question.name == "train":
            self.received = question.task.params
            question.task.meta["anchor_as"] = "difference"  # so that the sites save their model
        elif question.name == "anchor":
            by_form = {}
            for form in FORMS:
                params = lighter(question.task.params, self.received, form)
                self.sent[form] = num_bytes(params)
                meta = {**question.task.meta, "anchor_as": form}
                task = Message(params, meta=meta, current_round=question.task.current_round)
                replies = {site: self._answer(site, "anchor", task) for site in question.sites}
                by_form[form] = {site: reply.meta["report"] for site, reply in replies.items()}
            self.found.append(by_form)
        super().ask(question)


def main() -> None:
    parser = run_parser(__doc__, rounds=5)
    plan, local = planned(parser.parse_args(), SETTINGS)
    AskedThrice.found, AskedThrice.sent = [], {}
    in_process.LocalTransport = AskedThrice  # type: ignore[misc]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fairflare_anchor_") as folder:
        run_local(plan, Path(folder), local)
    print("| form | bytes a site | 1 - delta: median error | largest | weights: median error | largest |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for form in FORMS:
        scores, weights = errors(AskedThrice.found, form)
        figures = [f"{x.median():.1e} | {x.max():.1e}" for x in (scores, weights)]
        print(f"| {form} | {AskedThrice.sent[form]} | " + " | ".join(figures) + " |")
    values = torch.tensor([v for r in AskedThrice.found for x in r["model"].values() for v in x["dissimilarity"]])
    print(f"1 - delta: {values.min():.1e} to {values.max():.1e}, median {values.median():.1e}; {len(values)} values")


def run_parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """Return the argument parser of a benchmark that looks into one run of Fed-LWR."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--data", type=Path, help="local/fairflare.json of some sites; default: the phantom")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    return parser


def planned(given: argparse.Namespace, settings: dict[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """Return the plan of the run, and the sites' private settings."""
    local = json.loads(given.data.read_text()) if given.data else {}
    asked = {key: json.loads(value) for key, _, value in (item.partition("=") for item in given.set)}
    sites = list(local["sites"]) if local else 6
    return make_plan("fed_lwr", sites=sites, num_rounds=given.rounds, settings={**settings, **asked}), local


def errors(rounds: list[dict[str, dict[str, Any]]], form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return relative errors of 1 - delta, and absolute errors of the weights."""
    scores, weights = [], []
    for by_form in rounds:
        exact, other = (_by_site(by_form[name]) for name in ("model", form))
        weighed = [dissimilarity_weights(x, clip_min=0.0, clip_max=1.0) for x in (exact, other)]
        for site, layers in exact.items():
            scores += [abs(other[site][name] / value - 1) for name, value in layers.items() if value > 0]
            weights += [abs(weighed[1][name][site] - weighed[0][name][site]) for name in layers]
    return torch.tensor(scores), torch.tensor(weights)


def _by_site(reports: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {site: dict(zip(x["layers"], x["dissimilarity"], strict=True)) for site, x in reports.items()}


if __name__ == "__main__":
    main()
