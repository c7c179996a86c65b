"""Test runs of secure sums in one process: results, lost sites, resumed runs, refusals, and what leaves a site."""

from __future__ import annotations

import copy
import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509 import load_pem_x509_certificate
from cryptography.x509.verification import PolicyBuilder
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from rich.console import Console

from fairflare.base.checks import list_names
from fairflare.base.machine import memory_reuse
from fairflare.cli.run.view import RunView
from fairflare.exchange.messages import Message, SiteTask
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.privacy import page
from fairflare.federation.record.experiment import Experiment
from fairflare.federation.server.rounds import RoundFailed
from fairflare.federation.server.sums import SecureSums, SumLost
from fairflare.federation.site.worker import SiteWorker
from fairflare.federation.transports.calls import LocalTransport
from fairflare.flare.messages.wire import decode_model, encode_model
from fairflare.methods.base.reports import ReportError
from fairflare.methods.base.rule import Weighing
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.methods.q_fed_avg import QFedAvg
from fairflare.privacy.sums import keys as keys_module
from fairflare.privacy.sums.exposure import draw_groups
from fairflare.privacy.sums.keys import SiteKeys, hello_of
from fairflare.privacy.sums.masks import Addition, SumAsked, SumSpoiled
from fairflare.privacy.sums.ring import SumLayout
from fairflare.reporting.notes import run_notes
from fairflare.reporting.results import read_results

from ..fuzz.server import decoded, encoded
from ..tiny import rows
from ..unit.test_sums import certificate, kit
from .summing import FAST, Classes, Drawn, Numbers, Run, TwoNorms, Wire, lost


@pytest.fixture(autouse=True)
def _no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairflare.federation.record.journal.tell_listeners", lambda *args: [])


def quantised_mean(
    run: Run, start: Mapping[str, torch.Tensor], current_round: int, *, anchor: bool = False, of: Any = ()
) -> dict[str, torch.Tensor]:
    """Return the model after a round by loops over integers without any mask, with the weights that sites were told."""
    asked = [task.meta["sums"]["questions"] for _, name, task in run.wire.asked if name == "mask"]
    every = {
        q["label"]: q
        for one in asked
        for q in one
        if q["round"] == current_round and (not of or sorted(q["table"]) == of)
    }
    last = {"params": every["anchor" if anchor else "params"], "buffers": every[f"{'anchor_' * anchor}buffers"]}
    found = dict(start)
    for what, fraction, bound in (("params", 30, 1.0), ("buffers", 40, 2.0**20)):
        table = last[what]["table"]
        updates = {site: run.wire.updates[site, current_round][what] for site in table}
        names = list(updates[min(table)])
        layers = sorted({name.rpartition(".")[0] for name in names})
        for name in names:
            total = np.zeros(start[name].shape, np.int64)
            for site, row in table.items():
                weight = row[layers.index(name.rpartition(".")[0])] if len(row) > 1 else row[0]
                u = updates[site][name].double().numpy()
                total += np.rint(weight * np.clip(u, -bound, bound) * 2**fraction).astype(np.int64)
            change = start[name].double() + torch.from_numpy(total / 2**fraction)
            change = change.clamp(min=0) if name.endswith("running_var") else change
            found[name] = change.to(start[name].dtype)
    trained = run.results["rounds"][current_round]["train"].items()
    steps = max(told["num_steps"] for site, told in trained if not of or site in of)
    return found | {name: start[name] + steps for name in start if name.endswith("num_batches_tracked")}


def start_model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Numbers().build_model().state_dict()


# ------------------------------------------------------------------------------------------------ the result


@pytest.mark.parametrize(("method", "sites"), [("fed_avg", 3), ("fed_ism_plus_l", 4), ("fed_lwr", 6)])
def test_the_result_has_the_bits_of_a_sum_without_masks(method: str, sites: int, tmp_path: Path) -> None:
    run = Run(tmp_path, method, sites, num_rounds=1)()
    wanted = quantised_mean(run, start_model(), 0)
    assert run.model.keys() == wanted.keys()
    assert {name for name, tensor in run.model.items() if not torch.equal(tensor, wanted[name])} == set()


@pytest.mark.parametrize("method", ["fed_avg", "fed_opt", "fed_bn", "fed_nova", "fed_ism_plus_l", "q_fed_avg"])
def test_the_result_is_that_of_the_plain_run(method: str, tmp_path: Path) -> None:
    sums, plain = Run(tmp_path / "a", method)(), Run(tmp_path / "b", method, secure="", max_weight=0.5)()
    for name, tensor in plain.model.items():
        torch.testing.assert_close(sums.model[name], tensor, atol=1e-6, rtol=0)
    assert sums.results["rounds"][1]["site_weights"] == pytest.approx(
        plain.results["rounds"][1]["site_weights"], abs=1e-6
    )
    for one, other in zip(sums.results["rounds"], plain.results["rounds"], strict=True):
        assert one["values"] == pytest.approx(other["values"], rel=1e-5, nan_ok=True)  # q-FedAvg: its step and L


def test_q_fed_avg_is_told_the_norm_of_each_update(tmp_path: Path) -> None:
    """Check what each site tells against its update, that nobody else is asked, and a site that tells none."""
    told: dict[str, float] = {}
    run = Run(tmp_path, "q_fed_avg", num_rounds=1)()
    for site, name, message in run.wire.sent:
        if name == "train":
            update = run.wire.updates[site, 0]["params"].values()
            told[site] = message.meta["report"]["update_norm"]
            assert told[site] == pytest.approx(float(torch.cat([of.flatten() for of in update]).double().norm()))
    assert len(told) == 3
    rule = QFedAvg()
    assert rule.directives(0, 1, ["a"]) == {}
    assert rule.check_report({"probe_loss": 1.0, "update_norm": None}, "a", 1)
    rule.secure = True
    assert rule.directives(0, 1, ["a"]) == {"update_norm": True}
    with pytest.raises(ReportError, match=r"site 'a': .* lacks .*'update_norm'"):
        rule.check_report({"probe_loss": 1.0, "update_norm": None}, "a", 1)


# ------------------------------------------------------------------------------------------------ what leaves a site


def test_nothing_that_leaves_a_site_tells_of_its_update(tmp_path: Path) -> None:
    run = Run(tmp_path, "fed_lwr", 6)()
    vectors = 0
    for site, name, message in run.wire.sent:
        assert (message.params is None) is (name != "mask"), (site, name)
        for at in (0, 1):
            update = run.wire.updates[site, at]
            for label, vector in (message.params or {}).items():
                own = torch.cat(
                    [
                        update["buffers" if "buffers" in label else "params"][n].reshape(-1)
                        for n in sorted(update["buffers" if "buffers" in label else "params"])
                    ]
                ).double()
                correlation = float(np.corrcoef(vector.double().numpy(), own.numpy())[0, 1])
                assert abs(correlation) < 4 / math.sqrt(len(own)), (site, label, at)
                vectors += 1
    assert vectors == 6 * 2 * 2 * 2 * 2  # sites, rounds, sums, kinds of tensors; each beside two updates
    sent = torch.cat([m.params["params"] for _, name, m in run.wire.sent if name == "mask" and "params" in m.params])
    counts = np.bincount(sent.numpy().view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * math.sqrt(2 * 255)


def test_what_the_further_messages_hold_is_declared(tmp_path: Path) -> None:
    run = Run(tmp_path, "fed_lwr", 4, num_rounds=1)()
    declared = {"keys": [{"hello"}, set()], "mask": [{"saturated"}]}
    declared["release"] = [{"params", "buffers"}, {"anchor", "anchor_buffers"}]
    seen = set()
    for _, name, message in run.wire.sent:
        if name in declared:
            seen.add(name)
            assert set(message.meta["report"]) in declared[name]
            assert set(message.meta["stats"]) == {"seconds"}
            assert (message.metrics, message.meta["num_samples"], message.meta["num_steps"]) == ([], None, None)
            assert all(f"`{key}`" in page() for key in ("sums", *message.meta["report"]) if name == "mask")
    assert seen == set(declared)


def test_a_site_whose_file_allows_sums_only_refuses_another_run_before_its_first_round(tmp_path: Path) -> None:
    local = {"sites": {"site-2": {"secure": "sums"}}}
    run = Run(tmp_path, secure="", num_rounds=1, local=local)
    why = "^check.*site-2'.* set secure.*all_sites=false"
    with pytest.raises(RoundFailed, match=why):
        run()
    assert (run.results["rounds"], {name for _, name, _ in run.wire.asked}) == ([], {"check"})
    without = Run(tmp_path / "a", secure="", num_rounds=1, local=local, require_all_sites=False)()
    (left,) = without.results["rounds"][0]["left_out"]
    assert (left["site"], "its own file has secure=sums, the run has not" in left["reason"]) == ("site-2", True)
    assert Run(tmp_path / "b", num_rounds=1, local=local)().results["rounds"][0]["left_out"] == []


@pytest.mark.parametrize(
    ("name", "rounds", "groups", "refused"),
    [
        ("check", 1, (), True), ("check", 0, (), False), ("check", 0, ("sex",), True), ("validate", 1, (), False),
        ("validate", 0, ("sex",), True), ("train", 1, (), True), ("norms", 1, (), True),
        ("anchor", 1, (), True),
    ],
)  # fmt: skip
def test_what_a_site_that_allows_sums_only_refuses(
    name: str, rounds: int, groups: tuple[str, ...], refused: bool, tmp_path: Path
) -> None:
    """Check each question of a run without sums: a job that only measures a given model takes no update and no sum."""
    here = SiteWorker("site-1", Numbers(), LocalTraining(**FAST), {"secure": "sums"}, tmp_path)
    asked = SiteTask(name, start_model(), 0, rounds, 0, groups=groups)
    reply = here.perform(asked)
    assert (reply.status == "skipped" and "secure=sums" in reply.reason) == refused
    assert "secure=sums" not in here.perform(replace(asked, sums={"run": bytes(32)})).reason


def test_the_run_says_in_words_that_it_sums(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shown = io.StringIO()
    with caplog.at_level("INFO"), RunView(Console(file=shown, width=200)) as view:
        run = Run(tmp_path, num_rounds=1)
        run.rounds.journal.listeners.append(view)
        run()
    first, second, *_ = shown.getvalue().splitlines()
    assert (first[:6], second) == (
        "check:",
        "Secure sums of 3 sites, keys unsigned: protects from a curious server only",
    )
    told = "Secure sums of 3 sites, keys unsigned: protects from a curious server only. No site's model leaves it"
    assert run.results["info"]["sums"].startswith(told)
    assert told in caplog.text
    assert run_notes(read_results(run.folder / "fairflare"))[0].startswith(told)


def provisioned(run: Run, folder: Path, key_of: Mapping[str, str] | None = None) -> None:
    """Give each site of a run a startup kit; ``key_of`` names the private key of a site that has another one now."""
    arguments, shown = Wire._arguments, dict[str, str]()

    def kits(wire: Wire, site: str, experiment: str) -> dict[str, Any]:
        own, key = folder / site, (key_of or {}).get(site, site)
        own.mkdir(parents=True, exist_ok=True)
        content = {
            "client.crt": certificate(site, key=key), "client.key": kit(key).key, "rootCA.pem": certificate("project")
        }  # fmt: skip
        for name, data in content.items():
            if not (own / name).exists() or key != shown.get(site, key):
                (own / name).write_bytes(data)
        shown[site] = key
        return {**arguments(wire, site, experiment), "startup": own}

    run.wire._arguments = kits.__get__(run.wire)  # type: ignore[method-assign]


def test_sites_with_startup_kits_sign_their_keys(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=1)
    provisioned(run, tmp_path / "kits")
    assert run().results["info"]["sums"].startswith("Secure sums of 3 sites, keys signed with certificates.")
    (tmp_path / "b").mkdir()
    other = Run(tmp_path / "b", num_rounds=1, local={"sites": {"site-1": {"secure_pins": {"site-2": "ab"}}}})
    provisioned(other, tmp_path / "kits")
    with pytest.raises(RoundFailed, match=r"certificate of site 'site-2' .*is ab"):
        other()


@pytest.mark.parametrize("pinned", [False, True])
def test_a_site_that_gets_a_new_certificate_in_a_run(pinned: bool, tmp_path: Path) -> None:
    """Let a site come late, so that all agree on keys again, after another one was provisioned anew; pins hold it."""
    keys: dict[str, str] = {}

    def renewed(site: str, name: str, count: int) -> Any:
        if (site, name, count) == ("site-3", "train", 0):
            keys[site] = "another key"
        return "it is not there yet" if (site, name, count) == ("site-4", "keys", 0) else None

    pins: dict[str, str] = {}
    run = Run(tmp_path, sites=4, twist=renewed, local={"sites": {"site-1": {"secure_pins": pins}}})
    provisioned(run, tmp_path / "kits", keys)
    if pinned:
        for site in SHARED:
            run.wire._arguments(site, "")  # writes the kit
            shown = (tmp_path / "kits" / site / "client.crt").read_bytes()
            pins[site] = load_pem_x509_certificate(shown).fingerprint(SHA256()).hex()
        (left,) = run().results["rounds"][1]["left_out"]  # the one that alone refuses another; no sum is opened with it
        assert left["site"] == "site-1"
        assert re.search(rf"certificate of site 'site-3' is .*, pinned is {pins['site-3']}", left["reason"])
        assert run.results["rounds"][1]["accepted"] == ["site-2", "site-3", "site-4"]
        return
    first, second = run().results["rounds"]
    assert first["site_weights"].keys() == {"site-1", "site-2", "site-3"}
    assert second["site_weights"].keys() == {"site-1", "site-2", "site-3", "site-4"}


def test_a_site_whose_clock_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a site's clock be before its partners' certificates; the others open their sum without it."""
    run, answer = Run(tmp_path, sites=4, num_rounds=1), Wire._answer
    provisioned(run, tmp_path / "kits")
    before = datetime.now(timezone.utc) - timedelta(days=300)

    def late(wire: Wire, site: str, name: str, task: Message) -> Any:
        with monkeypatch.context() as patch:
            if site == "site-3":
                patch.setattr(keys_module, "PolicyBuilder", lambda: PolicyBuilder().time(before))
            return answer(wire, site, name, task)

    run.wire._answer = late.__get__(run.wire)  # type: ignore[method-assign]
    (left,) = run().results["rounds"][0]["left_out"]
    assert re.search(r"site 'site-3' says: .*'site-1' .* by this site's clock; set this clock", left["reason"])
    assert (left["site"], {site for site, _ in messages(run, "mask")}) == ("site-3", {"site-1", "site-2", "site-4"})


def test_two_runs_of_one_experiment_at_a_site_at_a_time(tmp_path: Path) -> None:
    """Let another run ask a site for keys in the middle of a round: it is left out by name, and back in the next."""

    def another(site: str, name: str, count: int) -> None:
        if (site, name, count) == ("site-4", "mask", 0):
            SiteKeys(site, tmp_path / "state" / "run" / site).hello(b"\x07" * 32)

    first, second = Run(tmp_path, sites=4, twist=another)().results["rounds"]
    ((site, reason),) = ((x["site"], x["reason"]) for x in first["left_out"])
    assert site == "site-4"
    assert "of two jobs of one experiment at a time end one, as each replaces the other's keys" in reason
    assert second["site_weights"].keys() == {"site-1", "site-2", "site-3", "site-4"}


def test_no_mean_is_of_two_sites_who_would_know_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a method weigh one of three sites with 0."""
    of_two = Weighing(sites={"site-1": 0.5, "site-2": 0.5, "site-3": 0.0})
    monkeypatch.setattr(FedAvg, "weigh", lambda *_: of_two)
    record = Run(tmp_path, num_rounds=1)().results["rounds"][0]
    assert record["site_weights"] == dict.fromkeys(("site-1", "site-2", "site-3"), 1 / 3)
    assert "weights of this round made equal" in record["warnings"][0]["text"]


@pytest.mark.parametrize("which", ["trained tensors", "buffers"])
def test_only_the_weights_that_were_made_equal_are_recorded_so(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a method weigh one of three sites with 0 in the trained tensors, or in the buffers."""
    own, of_two = ({f"site-{k + 1}": w for k, w in enumerate(row)} for row in ((0.5, 0.3, 0.2), (0.5, 0.5, 0.0)))
    rows = (of_two, own) if which == "trained tensors" else (own, of_two)
    monkeypatch.setattr(FedAvg, "weigh", lambda *_: Weighing(sites=rows[0], buffers=rows[1]))
    used, mean = list[Weighing](), SecureSums.mean
    monkeypatch.setattr(SecureSums, "mean", lambda *args: used.append((found := mean(*args))[0]) or found)
    run = Run(tmp_path, num_rounds=1)()
    wanted = [own if row is own else dict.fromkeys(own, 1 / 3) for row in rows]
    assert [used[0].sites, used[0].buffers] == wanted
    told = {q["label"]: q["table"] for _, n, m in run.wire.asked if n == "mask" for q in m.meta["sums"]["questions"]}
    assert [{site: row[0] for site, row in told[label].items()} for label in ("params", "buffers")] == wanted
    assert run.results["rounds"][0]["site_weights"] == wanted[0]
    assert f"this round ({which} alone) made equal" in run.results["rounds"][0]["warnings"][0]["text"]


def test_a_site_without_its_whole_startup_kit_agrees_on_no_unsigned_keys(tmp_path: Path) -> None:
    """Check pins that nobody could hold to a certificate, and a kit that lacks a file; the others go on without it."""
    arguments, part = Wire._arguments, tmp_path / "kit"
    part.mkdir()
    (part / "client.crt").write_bytes(certificate("site-4"))

    def kits(wire: Wire, site: str, experiment: str) -> dict[str, Any]:
        return {**arguments(wire, site, experiment), **({"startup": part} if site == "site-4" else {})}

    local = {"sites": {"site-3": {"secure_pins": {"site-2": "ab"}}}}
    run = Run(tmp_path, sites=5, num_rounds=1, local=local)
    run.wire._arguments = kits.__get__(run.wire)  # type: ignore[method-assign]
    run()
    reasons = {site: message.meta["reason"] for site, message in messages(run, "keys") if message.meta["reason"]}
    assert reasons.keys() == {"site-3", "site-4"}
    assert "its startup kit lacks 'client.crt', 'client.key', 'rootCA.pem', so nobody would sign" in reasons["site-3"]
    assert "its startup kit lacks 'client.key', 'rootCA.pem', so nobody would sign" in reasons["site-4"]


# ------------------------------------------------------------------------------------------------ further sums

RECALIBRATED: dict[str, Any] = {"half": {"norm_statistics": "recalibrated"}, "norm_statistics": "recalibrated"}
CREFF: dict[str, Any] = {"half": {"gradient_repeats": 2}, "rule": {"classifier_epochs": 5, "num_features": 4}}
SHARED = {"site-1": (0, 1), "site-2": (0, 1), "site-3": (0, 1), "site-4": (1, 0)}


def messages(run: Run, name: str) -> list[tuple[str, Message]]:
    return [(site, message) for site, of, message in run.wire.sent if of == name]


def test_recalibrated_norms_are_those_of_the_plain_run(tmp_path: Path) -> None:
    options = {**RECALIBRATED, "task": TwoNorms()}
    sums = Run(tmp_path / "a", **options)()
    plain = Run(tmp_path / "b", secure="", max_weight=0.5, **options)()
    for name, tensor in plain.model.items():
        torch.testing.assert_close(sums.model[name], tensor, atol=1e-6, rtol=1e-6)
    (one, other) = (run.results["rounds"][1]["details"]["norms"] for run in (sums, plain))
    assert one == other
    assert one["exchanges"] == 2
    told = messages(sums, "norms")
    assert len(told) == 2 * 3 * one["exchanges"]
    for _, message in told:
        assert set(message.meta["report"]) == {"norms", "values", "more"}
        assert message.params is None
    vectors = [message.params["norms"] for _, message in messages(sums, "mask") if "norms" in message.params]
    counts = np.bincount(torch.cat(vectors).numpy().view(np.uint8), minlength=256)
    assert ((counts - counts.sum() / 256) ** 2 / (counts.sum() / 256)).sum() < 255 + 5 * math.sqrt(2 * 255)


def test_a_site_lost_in_the_sum_of_norms_is_left_out_of_the_norms_alone(tmp_path: Path) -> None:
    """Lose a site in the second sum of a round; the plain run, in which it is silent about norms, has the same."""
    options: dict[str, Any] = {**RECALIBRATED, "task": TwoNorms(), "sites": 4, "num_rounds": 1}
    run = Run(tmp_path / "a", twist=lost("site-4", "mask", 1, first=2), **options)()
    plain = Run(tmp_path / "b", twist=lost("site-4", "norms", 9, first=1), secure="", max_weight=0.5, **options)()
    left = {(x["site"], x["phase"]) for x in run.results["rounds"][0]["left_out"]}
    assert left == {("site-4", "mask"), ("site-4", "norms")}
    assert run.results["rounds"][0]["details"]["norms"]["images"].keys() == {"site-1", "site-2", "site-3"}
    assert torch.allclose(run.model["3.running_mean"], plain.model["3.running_mean"], atol=1e-6)


def test_a_server_that_dies_after_the_sums_of_norms_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    options = {**RECALIBRATED, "task": TwoNorms(), "experiment": "e"}
    whole = Run(tmp_path / "whole", **options)()
    dies_before_the_checkpoint(Run(tmp_path, **options), monkeypatch)
    again = Run(tmp_path, **options)()
    assert all(torch.equal(tensor, whole.model[key]) for key, tensor in again.model.items())


def test_moments_are_not_sent_in_the_clear_by_a_site_that_allows_sums_only(tmp_path: Path) -> None:
    """Ask for moments in a run without secure sums whose training the site never refused."""
    local = {"sites": {"site-3": {"secure": "sums"}}}

    run = Run(tmp_path, secure="", num_rounds=1, min_sites=2, local=local, **RECALIBRATED)
    asked = run.wire._answer

    def through(site: str, name: str, task: Message) -> Any:
        if (site, name) == ("site-3", "check"):  # the server lies
            return asked(site, name, replace(task, meta={**task.meta, "sums": {"run": bytes(32)}}))
        if (site, name) == ("site-3", "train"):
            task = replace(task, meta={**task.meta, "sums": {"run": bytes(32)}})
            answer = asked(site, name, task)
            return Message(
                {name: tensor * 0 for name, tensor in start_model().items()},
                True,
                rows({"dice": 0.5}, "validation"),
                answer.meta,
            )
        return asked(site, name, task)

    run.wire._answer = through  # type: ignore[method-assign]
    left = {(x["site"], x["phase"]): x["reason"] for x in run().results["rounds"][0]["left_out"]}
    assert "its own file has secure=sums, the run has not" in left["site-3", "norms"]


def test_creff_sums_the_gradients_of_a_class(tmp_path: Path) -> None:
    """Compare with the plain run, whose gradients come in the clear; and the opened mean with a loop over the sites."""
    sums = Run(tmp_path / "a", "creff", 4, task=Classes(SHARED), **CREFF)()
    plain = Run(tmp_path / "b", "creff", 4, task=Classes(SHARED), secure="", max_weight=0.5, **CREFF)()
    for name, tensor in plain.model.items():
        torch.testing.assert_close(sums.model[name], tensor, atol=1e-6, rtol=1e-6)
    for one, other in zip(sums.results["rounds"], plain.results["rounds"], strict=True):
        assert one["values"] == pytest.approx(other["values"], rel=1e-5)
        assert one["values"]["classes"] == 2
    for site, message in messages(sums, "train"):
        assert message.meta["report"] == {"gradient_classes": sorted(SHARED[site])}
    for site, message in messages(sums, "mask"):
        assert set(message.params) == {"params", "buffers", "class_gradients"}
        for at in (0, 1):
            own = torch.cat([*sums.wire.updates[site, at]["class_gradients"].values()]).double()
            sent = message.params["class_gradients"].double()
            assert abs(float(np.corrcoef(sent.numpy(), own.numpy())[0, 1])) < 4 / math.sqrt(len(own))


def test_a_class_that_few_sites_have_is_not_summed(tmp_path: Path) -> None:
    """Check three, two and one site with a class, a site whose single sample stays hidden, and a class without site."""
    have = {"site-1": (0, 1, 2), "site-2": (0, 1, 2), "site-3": (0, 1), "site-4": (0, 3)}
    task = Classes(have, single={"site-3": 2})
    run = Run(tmp_path, "creff", 4, task=task, num_rounds=1, min_cases=2, **CREFF)()
    (question,) = (q for q in messages_asked(run, "site-1") if q["label"] == "class_gradients")
    third = pytest.approx(1 / 3)
    assert question["table"]["site-1"] == [0.25, third, 0.0, 0.0]
    assert question["table"]["site-3"] == [0.25, third, 0.0, 0.0]
    assert question["table"]["site-4"] == [0.25, 0.0, 0.0, 0.0]
    told = dict(messages(run, "train"))
    assert told["site-3"].meta["report"] == {"gradient_classes": [0, 1]}
    assert run.results["rounds"][0]["values"]["classes"] == 2
    (warning,) = (w for w in run.results["rounds"][0]["warnings"] if w["kind"] == "exposure")
    assert warning["text"].startswith("gradients of classes '2', '3' are not summed: fewer than 3 sites have one")


def messages_asked(run: Run, site: str) -> list[Any]:
    return [
        q for at, name, task in run.wire.asked if (at, name) == (site, "mask") for q in task.meta["sums"]["questions"]
    ]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"site-1": 0.5, "site-2": 0.5}, "a class has the numbers of fewer than 3 sites"),
        ({"site-1": 0.4, "site-2": 0.3, "site-3": 0.3}, "a class that it has no numbers of has a weight"),
    ],
)
def test_a_lying_server_s_sum_of_a_class_is_refused_by_name(row: dict[str, float], why: str, tmp_path: Path) -> None:
    """Let the server weigh class 2, which only two sites have, and then a third site for which it is hidden."""
    have = {"site-1": (0, 1, 2), "site-2": (0, 1, 2), "site-3": (0, 1), "site-4": (0, 1)}
    run = Run(tmp_path, "creff", 4, task=Classes(have, single={"site-3": 2}), num_rounds=1, min_cases=2, **CREFF)
    answer = Wire._answer

    def lies(wire: Wire, site: str, name: str, task: Message) -> Any:
        if name == "mask":
            sums = task.meta["sums"]
            for question in (q for q in sums["questions"] if q["label"] == "class_gradients"):
                for member, weights in question["table"].items():
                    weights[2] = row.get(member, 0.0)
        return answer(wire, site, name, task)

    run.wire._answer = lies.__get__(run.wire)  # type: ignore[method-assign]
    with pytest.raises(RoundFailed, match=r"a class .* fewer than 3 sites"):  # a lie or its rest
        run()
    assert any(why in message.meta.get("reason", "") for _, message in messages(run, "mask"))
    assert not messages(run, "release")


def test_one_weight_for_all_classes_is_refused_by_name(tmp_path: Path) -> None:
    """Let the server weigh all classes with one column, which would open class 3, that only one site has."""
    have = {"site-1": (0, 1, 3), "site-2": (0, 1), "site-3": (0, 1), "site-4": (0, 1)}
    run = Run(tmp_path, "creff", 4, task=Classes(have), num_rounds=1, **CREFF)
    answer = Wire._answer

    def lies(wire: Wire, site: str, name: str, task: Message) -> Any:
        if name == "mask":
            for question in (q for q in task.meta["sums"]["questions"] if q["label"] == "class_gradients"):
                question["table"] = {member: [0.25] for member in question["table"]}
        return answer(wire, site, name, task)

    run.wire._answer = lies.__get__(run.wire)  # type: ignore[method-assign]
    with pytest.raises(RoundFailed, match="the table has 1 layers, its model 4"):
        run()


# ------------------------------------------------------------------------------------------------ lost sites


@pytest.mark.parametrize("name", ["train", "mask"])
def test_a_site_that_is_lost_before_the_release_costs_a_new_attempt(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path, sites=4, twist=lost("site-4", name, 1))()
    first, second = run.results["rounds"]
    assert {(x["site"], x["phase"]) for x in first["left_out"]} == {("site-4", name)}
    assert first["site_weights"].keys() == {"site-1", "site-2", "site-3"}
    assert second["site_weights"].keys() == {"site-1", "site-2", "site-3", "site-4"}  # it is back
    attempts = [q["attempt"] for _, n, task in run.wire.asked if n == "mask" for q in task.meta["sums"]["questions"]]
    assert max(attempts) == (1 if name == "mask" else 0)
    only = Run(tmp_path / "b", sites=4, twist=lost("site-4", "train", 1))()
    assert all(torch.equal(tensor, only.model[key]) for key, tensor in run.model.items())


def test_a_rule_that_remembers_weighs_the_round_once(tmp_path: Path) -> None:
    """Check that a second attempt begins with the state that the rule had before the round."""
    run = Run(tmp_path, "fed_ism_plus_l", 5, lost("site-5", "mask", 1, first=1))()
    only = Run(tmp_path / "b", "fed_ism_plus_l", 5, lost("site-5", "train", 1, first=1))()
    assert run.results["rounds"][1]["site_weights"] == only.results["rounds"][1]["site_weights"]


def test_a_late_vector_opens_nothing(tmp_path: Path) -> None:
    """Open attempt 0 with the late vector of the lost site, and the own masks' keys that the others have released."""
    run = Run(tmp_path, sites=4, twist=lost("site-4", "release", 0))
    late: list[Message] = []
    answer = Wire._answer

    def keep(wire: Wire, site: str, name: str, task: Message) -> Any:
        found = answer(wire, site, name, task)
        if (site, name) == ("site-4", "mask") and not late:
            late.append(found)
            return "the connection broke"
        return found

    run.wire._answer = keep.__get__(run.wire)  # type: ignore[method-assign]
    run()
    masks = [(s, task, m) for (s, n, task), (_, _, m) in zip(run.wire.asked, run.wire.sent, strict=True) if n == "mask"]
    plain = masks[0][1].meta["sums"]["questions"][0]
    question = SumAsked.read("server", plain)
    assert (question.attempt, len(question.members)) == (0, 4)
    total = Addition(question, SumLayout.make(dict(Numbers().build_model().named_parameters())))
    for site, _, message in masks[:4]:
        total.add(site, message.params["params"])
    assert total.missing == set()
    keys = {s: m.meta["report"]["params"] for s, n, m in run.wire.sent if n == "release"}
    assert keys.keys() == {"site-1", "site-2", "site-3", "site-4"}
    with pytest.raises(SumSpoiled):
        total.open_sum(keys)


def test_a_site_that_is_lost_while_the_sum_is_opened_is_asked_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fairflare.federation.server.sums.PAUSE", 0.01)
    run = Run(tmp_path, twist=lost("site-2", "release", 2))()
    assert run.results["rounds"][0]["site_weights"].keys() == {"site-1", "site-2", "site-3"}
    plain = Run(tmp_path / "b")()
    assert all(torch.equal(tensor, plain.model[key]) for key, tensor in run.model.items())


def test_a_resumed_round_whose_sum_was_opened_needs_all_its_sites(tmp_path: Path, monkeypatch: Any) -> None:
    """Damage one site's log after its sum was opened and the server died; do both things that the refusal advises."""
    options: dict[str, Any] = {"sites": 4, "experiment": "e"}
    whole = Run(tmp_path / "whole", **options)()
    dies_before_the_checkpoint(Run(tmp_path, **options), monkeypatch)
    log = tmp_path / "state" / "e" / "site-4" / "sums.log"
    kept = log.rename(log.with_name("elsewhere"))
    why = r"with other members .*\['site-4'\] cannot"
    with pytest.raises(RoundFailed, match=why):
        Run(tmp_path, **options)()
    another = Run(tmp_path, twist=lost("site-4", "mask", 9), **options | {"experiment": "another"})()
    assert [record["accepted"] for record in another.results["rounds"]] == [["site-1", "site-2", "site-3"]] * 2
    kept.rename(log)
    again = Run(tmp_path, **options)()
    assert all(torch.equal(tensor, whole.model[key]) for key, tensor in again.model.items())


def dies_before_the_checkpoint(run: Run, monkeypatch: Any) -> None:
    """Run until the server dies between the release of round 1 and its checkpoint."""
    save = Experiment.save

    def dies(self: Experiment, next_round: int, state: Any) -> None:
        if next_round == 2:
            raise KeyboardInterrupt
        save(self, next_round, state)

    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            run()


@pytest.mark.parametrize(("method", "sites"), [("fed_avg", 3), ("fed_lwr", 4)])
def test_a_server_that_dies_between_release_and_checkpoint_goes_on(
    method: str, sites: int, tmp_path: Path, monkeypatch: Any
) -> None:
    whole = Run(tmp_path / "whole", method, sites, experiment="e")()
    dies_before_the_checkpoint(Run(tmp_path, method, sites, experiment="e"), monkeypatch)
    again = Run(tmp_path, method, sites, experiment="e")()
    assert all(torch.equal(tensor, whole.model[key]) for key, tensor in again.model.items())
    assert again.results["rounds"][1]["current_round"] == 1


def test_a_site_answers_a_resumed_round_with_the_update_that_it_kept(tmp_path: Path, monkeypatch: Any) -> None:
    """Let every image change between two jobs: only the kept answers fit the sum that was opened before."""
    whole, drawn = Run(tmp_path / "whole", experiment="e")(), Drawn.batches
    dies_before_the_checkpoint(Run(tmp_path, experiment="e"), monkeypatch)
    monkeypatch.setattr(Drawn, "batches", lambda *args, **options: [(x + 1, y) for x, y in drawn(*args, **options)])
    again = Run(tmp_path, experiment="e")()
    assert all(torch.equal(tensor, whole.model[key]) for key, tensor in again.model.items())
    losses = [{s: of["loss"] for s, of in run.results["rounds"][1]["train"].items()} for run in (again, whole)]
    assert losses[0] == losses[1]


def test_a_site_that_lost_its_key_has_a_new_one_in_the_next_round(tmp_path: Path) -> None:
    def no_key(site: str, name: str, count: int) -> None:
        if (site, name, count) == ("site-4", "mask", 0):
            (tmp_path / "state" / "run" / "site-4" / "sums.key").unlink()

    first, second = Run(tmp_path, sites=4, twist=no_key)().results["rounds"]
    ((site, reason),) = ((x["site"], x["reason"]) for x in first["left_out"])
    assert site == "site-4"
    assert "has no key of this run, and takes part again after the next agreement on keys" in reason
    assert second["site_weights"].keys() == {"site-1", "site-2", "site-3", "site-4"}


def _damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"own", b"0wn"))


def _a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "name", "why"),
    [
        (lambda path: path.write_bytes(b""), "sums.key", "it has no key of this run, and takes part again"),
        (lambda path: path.write_bytes(b'{"run": '), "sums.key", "it has no key of this run, and takes part again"),
        (_damaged, "sums.key", "it has no key of this run, and takes part again"),
        (
            _a_folder,
            "sums.key",
            "sums.key: Is a directory; move away what has this name, or give it to the site's user",
        ),
        (
            lambda path: path.unlink(),
            "sums.log",
            r"its log of sums \(sums.log\) is damaged, cut, older than sums.head or",
        ),
        (
            _a_folder,
            "sums.log",
            "sums.log: Is a directory; move away what has this name, or give it to the site's user",
        ),
        (_a_folder, "sums.head", "sums.head: Is a directory; move away"),
        (lambda path: path.write_bytes(b"\xff"), "sums.head", "is damaged, cut, older than sums.head"),
    ],
)
def test_a_file_of_sums_that_cannot_be_used_is_named(damage: Any, name: str, why: str, tmp_path: Path) -> None:
    """Damage a file of one site in the second round: the site and the file are named, the others go on."""

    def broken(site: str, task: str, count: int) -> None:
        if (site, task, count) == ("site-4", "mask", 1):
            damage(tmp_path / "state" / "run" / "site-4" / name)

    first, second = Run(tmp_path, sites=4, twist=broken)().results["rounds"]
    assert first["left_out"] == []
    ((site, reason),) = ((x["site"], x["reason"]) for x in second["left_out"])
    assert site == "site-4"
    assert re.search(why, reason), reason
    assert str(tmp_path) not in reason


def test_the_keys_of_a_run_in_one_process_go_with_it(tmp_path: Path) -> None:
    run = Run(tmp_path, experiment="e")
    with run.wire:
        run()
        assert len(list(tmp_path.rglob("sums.key"))) == 3
    assert not list(tmp_path.rglob("sums.key"))
    assert len(list(tmp_path.rglob("sums.log"))) == 3


def test_a_site_lost_between_the_two_sums_leaves_the_round_the_plain_mean(tmp_path: Path) -> None:
    run = Run(tmp_path, "fed_lwr", 5, lost("site-5", "mask", 1, first=1), num_rounds=1)()
    record = run.results["rounds"][0]
    assert record["site_weights"] == dict.fromkeys([f"site-{k}" for k in range(1, 6)], 0.2)
    assert {(x["site"], x["phase"]) for x in record["left_out"]} == {("site-5", "mask")}
    wanted = quantised_mean(run, start_model(), 0, anchor=True)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in run.model.items())


def test_too_few_sites_end_the_run_by_name(tmp_path: Path) -> None:
    with pytest.raises(RoundFailed, match=r"keys: 2 .*need 3 sites. Left out: site-3"):
        Run(tmp_path, twist=lost("site-3", "keys", 9))()
    with pytest.raises(RoundFailed, match=r"round 0, keys: 3 .* need 4 .*; fed_avg"):
        Run(tmp_path / "c", "fed_lwr", 4, twist=lost("site-3", "keys", 9))()
    with pytest.raises(RoundFailed, match=r"keys, .* need 5 sites\. Left out: site-3"):
        Run(tmp_path / "d", "fed_lwr", 5, min_sites=5, twist=lost("site-3", "keys", 9))()
    with pytest.raises(RoundFailed, match=r"round 0: .*its process died"):
        Run(tmp_path / "b", twist=lost("site-3", "mask", 9))()


def test_a_site_that_comes_late_agrees_on_keys_before_the_next_round(tmp_path: Path) -> None:
    run = Run(tmp_path, sites=4, twist=lost("site-4", "keys", 1))()
    first, second = run.results["rounds"]
    assert first["site_weights"].keys() == {"site-1", "site-2", "site-3"}
    assert second["site_weights"].keys() == {"site-1", "site-2", "site-3", "site-4"}


# ------------------------------------------------------------------------------------------------ one site's lies


def as_sent(message: Message) -> Message:
    """Return what the server reads of a message after FLARE's own encoding."""
    sent = decoded(encoded(FLModelUtils.to_shareable(encode_model(message))))
    return decode_model(FLModelUtils.from_shareable(sent))


def noise(vector: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, len(vector)) << 31).to(vector.dtype) + 5


def off(vector: torch.Tensor) -> torch.Tensor:
    """Return a vector of which one number is wrong by half of the ring."""
    vector[0] += -(2 ** (torch.iinfo(vector.dtype).bits - 1))
    return vector


def vectors(change: Any) -> Any:
    return lambda run, message: replace(message, params={k: change(v.clone()) for k, v in message.params.items()})


def report(**changes: Any) -> Any:
    return lambda run, message: replace(message, meta={**message.meta, "report": {**message.meta["report"], **changes}})


def meta(**changes: Any) -> Any:
    return lambda run, message: replace(message, meta={**message.meta, **changes})


def own_keys(change: Any) -> Any:
    return lambda run, m: replace(m, meta={**m.meta, "report": {k: change(v) for k, v in m.meta["report"].items()}})


def hellos(change: Any) -> Any:
    """Change a site's hello, and not its answer to the others' hellos."""
    return lambda run, m: report(hello=change(run, m.meta["report"]["hello"]))(run, m) if m.meta["report"] else m


def another_s(run: Run, hello: bytes) -> bytes:
    """Return a hello with the key of site 1, which was asked before."""
    shown = next(m.meta["report"]["hello"] for site, name, m in run.wire.sent if (site, name) == ("site-1", "keys"))
    return hello_of(run.rounds.sums.id, LIAR, shown)


def refuses(text: str) -> Any:
    return lambda run, message: message if message.meta["report"] else meta(status="skipped", reason=text)(run, message)


LIAR, ACCUSES = "site-2", "site 'site-2': secure sums: the certificate of site 'site-5' is none of this project now"
#: What site 2 says in place of the truth, by task; in each list first what spoils a sum, so that nobody is at fault by
#: name, then what leaves the site out by name in the exchange, so that no round is lost.
SPOILS = [
    ("mask", "noise", vectors(noise)), ("mask", "one number is wrong", vectors(off)),
    ("mask", "zeros", vectors(torch.zeros_like)), ("mask", "backwards", vectors(lambda v: v.flip(0))),
    ("mask", "buffers are wrong", lambda run, m: replace(m, params=m.params | {"buffers": noise(m.params["buffers"])})),
    ("release", "wrong key", own_keys(lambda key: b"x" * 32)), ("release", "zeros", own_keys(lambda key: bytes(32))),
    ("release", "31 bytes", own_keys(lambda key: key[:31])), ("release", "33 bytes", own_keys(lambda key: key + b"x")),
    ("release", "a text", own_keys(lambda key: "key")), ("release", "none", meta(report={})),
    ("release", "another sum's", meta(report={"norms": bytes(32)})), ("release", "no answer", lambda run, m: "it died"),
    ("release", "gone from then on", None),
]  # fmt: skip
NAMED = [
    ("keys", "of another run", hellos(lambda run, h: h.replace(run.rounds.sums.id, bytes(32)))),
    ("keys", "of another site", hellos(lambda run, h: h.replace(b"site-2", b"site-3"))),
    ("keys", "16 kB", hellos(lambda run, h: h * 90)), ("keys", "twice", hellos(lambda run, h: h + h)),
    ("keys", "key of another", hellos(another_s)), ("keys", "zero key", hellos(lambda run, h: h[:-32] + bytes(32))),
    ("keys", "low order", hellos(lambda run, h: h[:-32] + b"\1" + bytes(31))),
    ("keys", "a new key", hellos(lambda run, h: h[:-32] + bytes(range(32)))), ("keys", "none", meta(report={})),
    ("keys", "refuses all", refuses("I refuse")), ("keys", "accuses one", refuses(ACCUSES)),
    ("mask", "floating", vectors(torch.Tensor.float)), ("mask", "long", vectors(torch.Tensor.long)),
    ("mask", "short", vectors(lambda v: v[1:])), ("mask", "missing", lambda run, m: replace(m, params={})),
    ("mask", "too many", lambda run, m: replace(m, params={**m.params, "x": torch.zeros(3)})),
    ("mask", "saturated -1", report(saturated=-1)), ("mask", "saturated 1e18", report(saturated=10**18)),
    ("mask", "saturated one too many", report(saturated=40 * 6 + 4 * 40 + 1 + 2 * 40 + 1)),
    ("mask", "no answer", lambda run, m: "it died"),
    ("train", "in the clear", lambda run, m: replace(m, params={"3.bias": torch.zeros(1)})),
    ("train", "steps", meta(num_steps=10**19)), ("train", "samples", meta(num_samples=-1)),
]  # fmt: skip


def lying(folder: Path, exchange: str, lie: Any, **options: Any) -> Run:
    """Return a run of six sites, one of which gives this answer whenever it is asked the task."""
    run, answer, gone = (
        Run(folder, **{"sites": 6, "min_sites": 3, "anchor_timeout": 0.3, **options}),
        Wire._answer,
        list[str](),
    )

    def lies(wire: Wire, site: str, name: str, asked: Message) -> Any:
        if site == LIAR and lie is None and name != "check" and (gone or name == exchange):
            gone.append(name)
            return "its process died"
        found = answer(wire, site, name, asked)
        found = found if isinstance(found, str) else as_sent(found)
        return lie(run, found) if (site, name) == (LIAR, exchange) and not isinstance(found, str) else found

    run.wire._answer = lies.__get__(run.wire)  # type: ignore[method-assign]
    return run


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairflare.federation.server.sums.PAUSE", 1000.0)  # nobody is asked again for a key
    monkeypatch.setattr("os.fsync", lambda file: None)


def lost_rounds(run: Run) -> list[int]:
    return [
        r["current_round"] for r in run.results["rounds"] for w in r["warnings"] if "the round is lost" in w["text"]
    ]


SLOW = pytest.mark.long
QUICK_LIES = ("one number is wrong", "31 bytes", "key of another", "zero key", "accuses one", "saturated 1e18")


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize(
    ("task", "lie"),
    [pytest.param(t, f, id=f"{t} {n}", marks=[] if n in QUICK_LIES else [SLOW]) for t, n, f in SPOILS],
)
def test_a_lie_that_spoils_sums_is_confined_to_a_group(task: str, lie: Any, tmp_path: Path) -> None:
    """Hold two rounds at most to be lost, and each model from then on to the sum of the other group without masks."""
    run = lying(tmp_path, task, lie, num_rounds=4)()
    assert lost_rounds(run) == [0, 1]
    group, other = map(
        sorted, draw_groups(run.rounds.asking.form["run"], run.rounds.sums.kept["weights"]["params"]["sites"])
    )
    liars, rest = (group, other) if LIAR in group else (other, group)
    *lost, third, fourth = run.results["rounds"]
    for record in (third, fourth):
        assert record["accepted"] == rest
        assert {x["site"] for x in record["left_out"]} - {LIAR} == {*liars} - {LIAR}
        told = [x["reason"] for x in record["left_out"] if x["site"] != LIAR]
        assert all(f"the sum of its group, {list_names(liars)}" in reason for reason in told)
    assert {x["site"] for record in lost for x in record["left_out"]} <= {LIAR}  # nobody else is named
    start = start_model()
    for number in (2, 3):
        start = quantised_mean(run, start, number, of=rest)
    assert all(torch.equal(tensor, start[name]) for name, tensor in run.model.items())


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("sites", [6, pytest.param(9, marks=SLOW)])
def test_the_models_after_lost_rounds_are_those_of_a_run_without_the_liars_group(
    sites: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Run a second federation of the other groups' sites, which loses the same two rounds and then sums all of them.

    One group that is left has its sum bit for bit. Of two groups each sum is rounded before the server weighs it, so
    that models differ by a few steps of the ring.
    """
    run = lying(tmp_path / "a", "release", own_keys(lambda key: bytes(32)), sites=sites, num_rounds=4)()
    assert lost_rounds(run) == [0, 1]
    rest = run.results["rounds"][3]["accepted"]
    assert (len(rest), LIAR in rest) == (sites - 3, False)
    mean = SecureSums.mean

    def lost_twice(sums: SecureSums, *given: Any) -> Any:
        found = mean(sums, *given)
        if sums.record.current_round < 2:
            raise SumLost("nobody can say which")
        return found

    with monkeypatch.context() as patch:
        patch.setattr("fairflare.federation.server.sums.PATIENCE", 9)
        patch.setattr(SecureSums, "mean", lost_twice)
        alone = Run(tmp_path / "b", sites=sites, min_sites=3, num_rounds=4)
        alone.wire.names = rest
        alone()
    assert lost_rounds(alone) == [0, 1]
    assert [record["accepted"] for record in alone.results["rounds"][2:]] == [rest, rest]
    gap = max(float((tensor - run.model[name]).abs().max()) for name, tensor in alone.model.items())
    assert gap == 0.0 if sites == 6 else gap <= 2**-22, gap  # a step of float32 from 2 to 4; groups are drawn anew


@pytest.mark.usefixtures("_fast")
def test_a_site_lost_while_its_group_opens_its_sum_is_named_and_asked_again(tmp_path: Path) -> None:
    """Give wrong keys in two rounds, none in the third: its group is not called wrong, and is there in the fourth."""
    wrong = own_keys(lambda key: bytes(32))
    lies = iter([wrong, wrong, lambda run, message: "it died"])
    run = lying(tmp_path, "release", lambda run, m: next(lies, lambda _, same: same)(run, m), num_rounds=4)()
    (group,) = [part for part in run.rounds.sums.kept["parts"] if LIAR in part]
    third, fourth = run.results["rounds"][2:]
    assert {left["site"] for left in third["left_out"]} == {*group}
    reasons = [left["reason"] for left in third["left_out"] if left["site"] != LIAR]
    assert all(why.endswith(f"lacks a site. {LIAR}: it died") for why in reasons), reasons
    assert run.rounds.sums.out == {}
    assert (len(fourth["accepted"]), fourth["left_out"]) == (6, [])


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize(
    ("task", "lie"),
    [pytest.param(t, f, id=f"{t} {n}", marks=[] if n in QUICK_LIES else [SLOW]) for t, n, f in NAMED],
)
def test_a_lie_that_is_seen_leaves_out_the_liar_alone(task: str, lie: Any, tmp_path: Path) -> None:
    """Hold the run to the bits of one in which the liar is away."""
    run = lying(tmp_path / "a", task, lie, num_rounds=2)()
    away = lying(tmp_path / "b", "train", lambda *_: "away", num_rounds=2)()
    for record in run.results["rounds"]:
        assert {x["site"] for x in record["left_out"]} == {LIAR}
        assert len(record["accepted"]) == 5
    assert lost_rounds(run) == []
    assert all(torch.equal(tensor, away.model[name]) for name, tensor in run.model.items())


COMPOSED: list[Any] = [
    pytest.param("fed_lwr", {"sites": 6}, id="two sums"), pytest.param("fed_lwr", {"sites": 9}, id="of three groups"),
    pytest.param("fed_ism_plus_l", {"sites": 7}, id="weights of reports"),
    pytest.param("fed_bn", {}, id="own norms"), pytest.param("fed_avg", {"norms": True}, id="norms"),
    pytest.param("creff", {"task": "classes"}, id="gradients of classes"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize(("method", "of"), COMPOSED)
def test_groups_go_with_what_sums_go_with(method: str, of: dict[str, Any], tmp_path: Path) -> None:
    """Let one site open its mask with a wrong key in every sum of the run; the others' groups go on."""
    options = {**(RECALIBRATED if of.get("norms") else {}), "sites": of.get("sites", 6)}
    if "task" in of:
        options |= {"task": Classes(dict.fromkeys([f"site-{k}" for k in range(1, 7)], (0, 1))), **CREFF}
    run = lying(tmp_path, "release", own_keys(lambda key: bytes(32)), method=method, num_rounds=5, **options)()
    parts = run.rounds.sums.kept["parts"]
    honest = sorted(site for part in parts if LIAR not in part for site in part)
    assert lost_rounds(run) == [0, 1]
    assert [record["accepted"] for record in run.results["rounds"][2:]] == [honest] * 3
    for record in run.results["rounds"][2:]:
        used = [record["site_weights"]] if record["site_weights"] else record["layers"].values()
        assert all(of.keys() == {*honest} for of in used)
    if "norms" in of:
        assert run.results["rounds"][4]["details"]["norms"]["images"].keys() == {*honest}


@pytest.mark.long
@pytest.mark.usefixtures("_fast")
def test_groups_of_sites_whose_certificates_are_pinned(tmp_path: Path) -> None:
    pins: dict[str, str] = {}
    local = {"sites": {"site-1": {"secure_pins": pins}}}
    run = lying(tmp_path, "release", own_keys(lambda key: bytes(32)), num_rounds=4, local=local)
    provisioned(run, tmp_path / "kits")
    for site in (f"site-{k}" for k in range(1, 7)):
        run.wire._arguments(site, "")  # writes the kit
        shown = (tmp_path / "kits" / site / "client.crt").read_bytes()
        pins[site] = load_pem_x509_certificate(shown).fingerprint(SHA256()).hex()
    assert [len(record["accepted"]) for record in run().results["rounds"]] == [0, 0, 3, 3]
    assert run.results["info"]["sums"].startswith("Secure sums of 3 sites, keys signed with certificates.")


@pytest.mark.usefixtures("_fast")
def test_a_resumed_run_has_the_same_groups(tmp_path: Path, monkeypatch: Any) -> None:
    """Kill the server before the first checkpoint of a sum of groups; hold the whole to a run that is not killed."""
    options: dict[str, Any] = {"num_rounds": 4, "experiment": "e"}
    wrong = own_keys(lambda key: bytes(32))
    whole = lying(tmp_path / "whole", "release", wrong, **options)()
    save = Experiment.save
    with monkeypatch.context() as patch:
        patch.setattr(
            Experiment, "save", lambda self, number, state: 1 / 0 if number == 3 else save(self, number, state)
        )
        with pytest.raises(ZeroDivisionError):
            lying(tmp_path, "release", wrong, **options)()
    again = lying(tmp_path, "release", wrong, **options)()
    assert lost_rounds(again) == [0, 1]
    assert all(torch.equal(tensor, whole.model[name]) for name, tensor in again.model.items())
    # The repaired site is asked again in another job, with its group, and that the sum of all is opened no more.
    more = Run(tmp_path, sites=6, min_sites=3, **{**options, "num_rounds": 5})()
    assert len(more.results["rounds"][4]["accepted"]) == 6
    assert {len(q["table"]) for of in (messages_asked(more, f"site-{k}") for k in (1, 2)) for q in of} == {3}


@pytest.mark.usefixtures("_fast")
def test_with_fewer_than_six_sites_the_run_ends_after_two_lost_rounds(tmp_path: Path) -> None:
    """Hold the sentence, and what it advises."""
    lie = own_keys(lambda key: bytes(32))
    why = "5 sites make no two groups of 3 "
    with pytest.raises(RoundFailed, match=why):
        lying(tmp_path / "a", "release", lie, sites=5, num_rounds=4, experiment="a")()
    without = Run(tmp_path / "b", twist=lost(LIAR, "keys", 99), sites=5, experiment="b")()
    assert without.results["rounds"][1]["accepted"] == ["site-1", "site-3", "site-4", "site-5"]
    with pytest.raises(RoundFailed, match="nobody can say which"):  # no round at all: nothing was learnt
        lying(tmp_path / "c", "release", lie, num_rounds=2)()


@pytest.mark.usefixtures("_fast")
def test_a_site_whose_file_forbids_groups_stays_out_of_them(tmp_path: Path) -> None:
    local = {"sites": {"site-1": {"secure": "sums_of_all"}}}
    run = lying(tmp_path, "release", own_keys(lambda key: bytes(32)), num_rounds=3, local=local, experiment="e")
    (left,) = [part for part in draw_groups("e", {f"site-{k}": 8.0 + 4 * k for k in range(1, 7)}) if "site-1" in part]
    if LIAR in left:
        run()
    else:  # the other group has the liar
        with pytest.raises(RoundFailed, match=r"site-1': secure sums: its own .*=sums_of_"):
            run()
    refusals = [message.meta["reason"] for site, message in messages(run, "mask") if site == "site-1"]
    assert "its own file has secure=sums_of_all, and sums are opened in groups of sites now" in refusals[-1]


# ------------------------------------------------------------------------------------------------ refusals


def test_an_answer_with_a_model_or_a_floating_vector_is_refused_by_name(tmp_path: Path) -> None:
    def floating(site: str, name: str, count: int) -> Any:
        if site != "site-4" or name not in ("train", "mask") or count:
            return None
        meta = {**run.wire.sent[-1][2].meta, "report": {"saturated": 0}}
        params = {"params": torch.zeros(5), "buffers": torch.zeros(5)}
        return Message(params, True, rows({"dice": 0.5}, "validation"), meta)

    run = Run(tmp_path, sites=4, twist=floating)
    record = run().results["rounds"]
    ((_, first), (_, second)) = ((x["site"], x["reason"]) for r in record for x in r["left_out"])
    assert "sent its model, which stays there with secure sums" in first
    assert "field 'params' must be torch.int32" in second
    assert "take filters" in second


def test_wrong_masks_spoil_all_sums_and_nobody_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, num_rounds=1)
    answer = Wire._answer

    def other(wire: Wire, site: str, name: str, task: Message) -> Any:
        found = answer(wire, site, name, task)
        if (site, name) == ("site-2", "release"):
            found.meta["report"] = {label: bytes(32) for label in found.meta["report"]}
        return found

    run.wire._answer = other.__get__(run.wire)  # type: ignore[method-assign]
    with pytest.raises(RoundFailed, match=r"numbers of the sum 'params' .*nobody"):
        run()


def test_a_sum_of_numbers_that_a_site_does_not_keep_is_refused_by_name(tmp_path: Path) -> None:
    run = Run(tmp_path, sites=4, num_rounds=1)
    answer = Wire._answer

    def other(wire: Wire, site: str, name: str, task: Message) -> Any:
        if (site, name) == ("site-4", "mask"):
            sums = task.meta["sums"]
            asked = {**sums["questions"][0], "label": "class_gradients", "ring": [64, 40, 8.0]}
            task = replace(task, meta={**task.meta, "sums": {**sums, "questions": [asked]}})
        return answer(wire, site, name, task)

    run.wire._answer = other.__get__(run.wire)  # type: ignore[method-assign]
    (left,) = run().results["rounds"][0]["left_out"]
    assert left["site"] == "site-4"
    assert "sum 'class_gradients' of round 0: it keeps no such numbers" in left["reason"]


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        ("fed_mrl", {}, "FedMRL cannot go with it: its map compares the sites' models"),
        ("fed_ce", {}, "it compares each site's update with those of the others"),
        ("cgsv", {}, "every site gets a model of its own"),
        ("cffl", {}, "every site gets a model of its own"),
        ("scaffold", {}, "divides each site's update"),
        ("afl", {"afl_mode": "argmax"}, "its model is that of one site"),
        ("fed_avg", {"aggregate": "median"}, "aggregate='median' needs every site's model"),
        ("fed_avg", {"max_weight": 0.6}, "max_weight=0.6 would show a site's update; set it to 0.5 at most"),
        ("fed_avg", {"personalise": "finetune"}, "may send a site's own model"),
        ("fed_avg", {"unlabelled": "consistency"}, "weighs sites without a report"),
    ],
)
def test_what_needs_models_is_refused_before_the_run(method: str, settings: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="secure='sums': ") as found:
        make_plan(method, settings={**settings, "secure": "sums"}, sites=4, shown=True)
    assert reason in str(found.value)


def test_a_job_that_was_edited_by_hand_is_refused_at_its_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="secure='sums': FedCE cannot go with it"):
        Run(tmp_path, "fed_ce")()


ODD: list[Any] = [
    "gone",
    None,
    5,
    -1,
    math.nan,
    math.inf,
    "x",
    b"x",
    [],
    {},
    [5],
    ["x"],
    [{}],
    [5, "x"],
    {"x": 5},
    {"x": [0.5]},
]


def oddly(value: Any, where: str = "meta") -> Iterator[tuple[str, Any]]:
    """Yield copies of a message's content in each of which one field, at any depth, is another thing or gone."""
    fields = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, own in fields:
        for odd in ODD:
            changed = copy.copy(value)
            changed[key] = odd
            if odd == "gone":
                del changed[key]
            yield f"{where}.{key} = {odd!r}", changed
        for place, inner in oddly(own, f"{where}.{key}"):
            changed = copy.copy(value)
            changed[key] = inner
            yield place, changed


@pytest.mark.parametrize("method", ["fed_avg", "fed_lwr"])
@pytest.mark.timeout(300)
def test_odd_questions_of_a_server_are_refused_in_words(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send a site its first message of each kind with each field changed or gone, before the right message."""
    monkeypatch.setattr(memory_reuse, "_set_limits", lambda: None)  # memory is given back after each of thousands
    run, answer = Run(tmp_path, method, 5, num_rounds=1), Wire._answer
    refused, unnamed, kinds = set[str](), dict[str, str](), set[str]()

    def asked_oddly(wire: Wire, site: str, name: str, task: Message) -> Any:
        kind = f"{name} {sorted(task.meta.get('sums') or ())}"
        first = site == "site-1" and kind not in kinds
        kinds.update([kind] * first)
        for where, meta in oddly(task.meta) if first else ():
            # A site takes part in another attempt, round or run, and repeats its answer about the same model.
            other = where.endswith((".attempt = 5", "current_round = 5")) or "meta.run " in where
            if not other and not where.startswith("meta.directives"):
                reply = LocalTransport._answer(wire, site, name, replace(task, meta=meta)).meta
                if reply["status"] != "ok":
                    refused.add(f"{name} {where}")
                    if "failed with" in reply["reason"] or "site 'site-1'" not in reply["reason"]:
                        unnamed[f"{name} {where}"] = reply["reason"]
        return answer(wire, site, name, task)

    run.wire._answer = asked_oddly.__get__(run.wire)  # type: ignore[method-assign]
    assert run().results["status"] == "completed"
    assert [left["reason"] for left in run.results["rounds"][0]["left_out"]] == []
    assert not unnamed, "\n".join(f"{k}: {v}" for k, v in list(unnamed.items())[:40])
    wanted = [f"{name} meta.sums.{field} = 'gone'" for name, field in (
        ("keys", "run"), ("mask", "run"), ("mask", "questions"), ("release", "present"), ("release", "questions"),
    )]  # fmt: skip
    assert {
        *wanted,
        "train meta.seed = 'gone'",
        "keys meta.current_round = None",
        "keys meta.sums.hellos = 5",
    } <= refused
