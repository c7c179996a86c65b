"""Measure FLARE's quantization of messages: bytes, and the effect on results.

FLARE's pair of filters (``ModelQuantizer`` at the site, ``ModelDequantizer`` at the server) takes every reply with a
model, in one process, without FLARE's transport. One method of each kind: weights by site (FedAvg), by layer with an
anchor (Fed-LWR), parts for each site (CGSV), a step of its own (FedNova), a second model that stays (Ditto), a part
that the server trains (CReFF). Norms' statistics stay at the sites: FLARE's filter refuses the integers
among them.

    python benchmarks/bench_quantization.py [--kinds float16 adaquant blockwise8 float4 normfloat4] [--rounds 3]

FLARE's filters import ``bitsandbytes``; where it is not installed ``float16`` and ``adaquant``, which do not use it,
are tried with an empty stand-in. ``blockwise8``, ``float4`` and ``normfloat4`` need it, and ask for a GPU; where there
is none, their ``.cuda()`` leaves the tensor where it is, and ``bitsandbytes`` computes on the CPU (with 0.50:
``TORCHDYNAMO_DISABLE=1``, else it compiles for minutes).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from fairflare.exchange.messages import Message
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.transports import local
from fairflare.federation.transports.calls import LocalTransport
from fairflare.reporting.results import read_results
from fairflare.reporting.values import collect_by_site

METHODS = {
    "fed_avg": "weights by site", "fed_lwr": "by layer, anchor", "cgsv": "parts", "fed_nova": "a step of its own",
    "ditto": "a second model stays", "creff": "trained at the server",
}  # fmt: skip
SMALL: dict[str, Any] = {
    "image_size": [33, 33], "features": [8, 8, 16, 16], "phantom": "fundus", "phantom_samples": 120,
    "phantom_test": 80, "phantom_own_test": 20, "partition": "iid", "corrupted_sites": 0, "local_epochs": 1,
    "batch_size": 8,
}  # fmt: skip


def filters(kind: str) -> tuple[Any, Any]:
    """Return FLARE's two filters for one kind of quantization."""
    try:
        importlib.import_module("bitsandbytes")
    except ImportError:
        stand_in = types.ModuleType("bitsandbytes.functional")
        for name in ("quantize_4bit", "quantize_blockwise", "dequantize_4bit", "dequantize_blockwise", "QuantState"):
            setattr(stand_in, name, _absent)
        sys.modules |= {"bitsandbytes": types.ModuleType("bitsandbytes"), "bitsandbytes.functional": stand_in}
    from nvflare.app_opt.pt.quantization.dequantizer import ModelDequantizer
    from nvflare.app_opt.pt.quantization.quantizer import ModelQuantizer

    return ModelQuantizer(kind), ModelDequantizer()


def _absent(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("bitsandbytes is not installed")


class Filtered(LocalTransport):
    """Run sites whose models go through both filters; ``kind`` empty: through none."""

    kind = ""
    nbytes = 0

    def _answer(self, site: str, name: str, task: Message) -> Message:
        message = super()._answer(site, name, task)
        if message.params:
            message.params = self._through(message.params)
        return message

    def _through(self, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from nvflare.apis.dxo import DXO, DataKind
        from nvflare.apis.fl_context import FLContext
        from nvflare.apis.shareable import Shareable

        if self.kind:
            quantizer, dequantizer = filters(self.kind)
            with contextlib.ExitStack() as stack:
                if not torch.cuda.is_available():
                    stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor))
                sent = quantizer.process_dxo(DXO(DataKind.WEIGHT_DIFF, data=dict(params)), Shareable(), FLContext())
                state = [value for of in sent.meta.get("quant_state", {}).values() for value in of.values()]
                Filtered.nbytes += sum(int(getattr(value, "nbytes", 0)) for value in (*sent.data.values(), *state))
                found = dequantizer.process_dxo(sent, Shareable(), FLContext()).data
                # The CPU's kernels for 4 bits give a vector as one row.
                params = {name: found[name].reshape(tensor.shape) for name, tensor in params.items()}
        else:
            Filtered.nbytes += sum(tensor.nbytes for tensor in params.values())
        return params


def run(method: str, kind: str, rounds: int, folder: Path, **options: Any) -> dict[str, Any]:
    """Return bytes up, the final test's mean accuracy, the last round's weights, and the model."""
    statistics = {} if method == "cgsv" else {"norm_statistics": "site"}
    plan = make_plan(
        method, task="classification", sites=3, num_rounds=rounds, settings={**SMALL, **statistics}, **options
    )
    Filtered.kind, Filtered.nbytes = kind, 0
    with mock.patch.object(local, "LocalTransport", Filtered):
        results = local.run_local(plan, folder)
    found = json.loads((results / "results.json").read_text())
    model = torch.load(results.parent / "FL_global_model.pt", weights_only=True)["model"]
    last = found["rounds"][-1]
    layers = {(layer, site): of["weight"] for layer, by in (last["layers"] or {}).items() for site, of in by.items()}
    test = [*collect_by_site(read_results(results), "balanced_accuracy").values()]
    return {
        "bytes": Filtered.nbytes,
        "accuracy": sum(test) / len(test),
        "weights": {**layers, **(last["site_weights"] or {})},
        "model": model,
    }


def row(method: str, what: str, found: dict[str, Any], exact: dict[str, Any]) -> list[str]:
    """Return a row beside the exact run: bytes, and the differences of accuracy, weights and model."""
    weights = max(abs(found["weights"][key] - exact["weights"][key]) for key in exact["weights"])
    trained = [name for name, tensor in exact["model"].items() if tensor.is_floating_point()]
    away = sum(float((found["model"][n].double() - exact["model"][n].double()).square().sum()) for n in trained)
    length = sum(float((exact["model"][n].double() - exact["start"][n].double()).square().sum()) for n in trained)
    return [
        method, METHODS[method], what, f"{found['bytes'] / exact['bytes']:.3f}", f"{found['accuracy']:.3f}",
        f"{found['accuracy'] - exact['accuracy']:+.3f}", f"{weights:.1e}", f"{(away / length) ** 0.5:.1e}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["float16", "adaquant", "blockwise8", "float4", "normfloat4"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    head = ["method", "kind", "replies", "bytes up", "accuracy", "difference", "weights differ by", "model, of its way"]
    print(" | ".join(head), flush=True)
    with tempfile.TemporaryDirectory(prefix="fairflare_bench_") as name:
        for method in args.methods:
            folder = Path(name) / method
            exact = run(method, "", args.rounds, folder / "exact")
            torch.manual_seed(0)
            plan = make_plan(method, task="classification", sites=3, settings=SMALL)
            exact["start"] = plan.task.build_model().state_dict()
            print(" | ".join(row(method, "as they are", exact, exact)), flush=True)
            for kind in args.kinds:
                try:
                    found = run(method, kind, args.rounds, folder / kind)
                except (RuntimeError, AssertionError) as error:
                    print(" | ".join([method, METHODS[method], kind, f"fails: {str(error)[:160]}"]), flush=True)
                    continue
                print(" | ".join(row(method, kind, found, exact)), flush=True)


if __name__ == "__main__":
    main()
