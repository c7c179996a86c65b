"""Test tensors that stay at a site: saved, loaded, not sent, and reported."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from fairflare.base.settings import build, values_of
from fairflare.core.cells import make_cells
from fairflare.exchange.messages import STATUS_OK, SiteReply, SiteTask, address, decode_task, encode_reply, encode_task
from fairflare.federation.collecting.collector import Collector, LikeReceived
from fairflare.federation.server.rounds import Stopped
from fairflare.methods.base.catalog import all_methods
from fairflare.methods.base.home import Home, OwnModel
from fairflare.methods.base.training import LocalTraining
from fairflare.methods.fed_avg import FedAvg
from fairflare.reporting.table import fairness_table
from fairflare_lab.compare.comparison import compare
from tests.federation.network import Run
from tests.tiny import metric_values, rows
from tests.unit.report_runs import read, read_all

from .own import NORM, SITES, STATISTICS, Plane, Sites, run
from .support import at_site, initial, request, same

SMALL: dict[str, Any] = {"batch_size": 8, "learning_rate": 0.05}
STAYING = {"solo": [*[f"0.{n}" for n in ("weight", "bias")], *NORM, "3.weight", "3.bias"], "fed_bn": NORM,
           "statistics": STATISTICS, "ditto": []}  # fmt: skip


def half(name: str, **more: Any) -> LocalTraining:
    if name == "statistics":
        return LocalTraining(**{**SMALL, "norm_statistics": "site", **more})
    return build(all_methods()[name].training, {**SMALL, **more})


every = pytest.mark.parametrize("name", list(STAYING))
#: Parts of the model that stay, and a model of the site's own; with one that gets its own by downloads.
both = pytest.mark.parametrize("name", ["fed_bn", "ditto"])
with_downloads = pytest.mark.parametrize("name", ["fed_bn", "ditto", "cffl"])


def of_method(name: str) -> dict[str, Any]:
    """Return a rule of the method where the plain mean is not its average."""
    return {"rule": build(all_methods()[name].rule, {})} if name == "cffl" else {}


def kept_by(name: str) -> str:
    return "own_model" if name in ("ditto", "cffl") else "parts"


def parts(sites: Sites, site: str, current_round: int) -> dict[str, torch.Tensor]:
    return sites.kept(site, "parts", current_round)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Callable[[str], tuple[Run, Sites]]:
    """Return a run of a method with its sites, which a test reads and changes nothing of."""
    return cache(lambda name: run(tmp_path_factory.mktemp(name), half(name), label=name))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Callable[[str], tuple[Run, Sites]]:
    """Return a run of four rounds that nothing interrupts, with its sites."""
    return cache(
        lambda name: run(tmp_path_factory.mktemp(name), half(name), experiment="e", num_rounds=4, **of_method(name))
    )


@every
def test_what_stays_is_not_sent_differs_and_the_rest_is_shared(done, name):
    made, sites = done(name)
    stays, model = STAYING[name], made.model()["model"]
    initial = made.net.tasks[0].params
    for site in SITES:
        for current_round in range(3):
            sent = sites.sent[site, "train", current_round].params
            assert sorted(sent) == sorted(set(model) - set(stays))
    for current_round in (0, 1, 2):
        if stays:
            first, second = (parts(sites, site, current_round) for site in SITES)
            assert sorted(first) == sorted(second) == sorted(stays)
            assert not any(torch.equal(first[n], second[n]) for n in stays if first[n].is_floating_point())
    for tensor in model:
        assert torch.equal(model[tensor], initial[tensor]) == (tensor in stays), tensor
    assert all(record["notes"] == [] for record in made.results["rounds"])
    assert made.net.warned == []
    if name == "solo":
        assert [record["site_weights"] for record in made.results["rounds"]] == [None] * 3
    assert [p["left_out"] for p in made.results["rounds"]] == [[]] * 3


@both
def test_results_table_and_model_file_say_which_model_was_measured(done, name):
    made, _ = done(name)
    assert made.results["info"]["measured"] == "personal"
    assert "Measured: each site's own model." in fairness_table(read(**made.results))
    conf = made.model()["train_conf"]
    assert (conf["measured"], conf["stays_at_sites"]) == ("personal", len(STAYING[name]))


def test_the_common_model_is_said_to_be_common(done):
    made, _ = done("fed_avg")
    assert made.results["info"]["measured"] == "common"
    assert "Measured: the common model." in fairness_table(read(**made.results))
    assert "measured" not in made.model()["train_conf"]


def test_a_site_half_that_the_server_does_not_know_speaks_for_itself(tmp_path):
    class Mine(LocalTraining):
        @property
        def home(self):
            return Home(self, lambda model: ["1.weight"])

    made, _ = run(tmp_path, Mine(**SMALL))
    assert made.results["info"]["measured"] == "personal"
    made, _ = run(tmp_path / "b", type("Plain", (LocalTraining,), {})(**SMALL))
    assert made.results["info"]["measured"] == "common"


def test_a_comparison_says_whose_models_it_compares(done):
    *runs, common = (done(name)[0].results for name in ("solo", "ditto", "fed_avg"))
    note = "Measured: each site's own model of solo, ditto"
    assert f"{note}; of the others the common model." in compare(read_all([*runs, common]))
    assert f"{note}." in compare(read_all(runs))
    assert "Measured" not in compare([read(**common)])


@every
def test_a_site_is_measured_with_its_own(done, name):
    """Check before training, and in the final test of the last model with the own parts of the last round."""
    made, sites = done(name)
    task, last = Plane(), made.net.tasks[-1].params
    for site in SITES:
        kept = kept_by(name)
        model = task.build_model()
        for current_round, shared in ((1, made.net.tasks[1].params), (3, last)):
            model.load_state_dict({**shared, **sites.kept(site, kept, current_round - 1)})
            wanted = task.evaluate(model, task.open_site(site, {}).batches("validation", batch_size=8), "cpu")
            if current_round == 3:
                found = made.results["test"][site]
            else:
                found = made.results["rounds"][current_round]["validation"][site]
            assert found == pytest.approx(wanted, abs=1e-6)
        model.load_state_dict(last)
        common = task.evaluate(model, task.open_site(site, {}).batches("validation", batch_size=8), "cpu")
        assert abs(common["loss"] - made.results["test"][site]["loss"]) > 1e-4


@both
def test_an_absent_site_goes_on_with_its_own_and_a_late_one_begins_with_the_received(tmp_path, name):
    def answer(site, task, message):
        away = (site == "site-2" and message.current_round == 1) or (site == "site-3" and message.current_round < 2)
        return "not reachable" if task == "train" and away else None

    training = half(name)
    made, sites = run(tmp_path, training, answer=answer, sites=[*SITES, "site-3"], num_rounds=4)
    kept = kept_by(name)
    assert not list((tmp_path / "state" / "site-2").glob(f"*/{kept}.000001.pt"))
    again = Sites(tmp_path / "again", training)
    for site, rounds in (("site-2", (0, 2, 3)), ("site-3", (2, 3))):
        for current_round in rounds:  # the same tasks by themselves: a round more or less must not matter
            again(site, "train", made.net.tasks[current_round])
            assert same(again.kept(site, kept, current_round), sites.kept(site, kept, current_round))
    lost = {s: v.get("state_lost") for s, v in made.results["rounds"][2]["train"].items()}
    assert lost["site-2"] is None
    assert f"no usable {kept}" in lost["site-3"]


@with_downloads
def test_a_run_that_was_stopped_goes_on_bit_for_bit(whole, tmp_path, name):
    wanted, before = whole(name)
    sites = Sites(tmp_path / "state", half(name))

    def stop(site: str, task: str, message: Any) -> Any:
        if task == "train" and message.current_round == 2:
            made[0].net.abort = True
        return sites(site, task, message)  # the site has trained the round, which the server never sees

    made: list[Any] = []
    common = {"sites": SITES, "task": Plane(), "site_half": values_of(half(name)), "experiment": "e", "num_rounds": 4}
    made.append(Run(tmp_path, stop, **common, **of_method(name)))
    with pytest.raises(Stopped):
        made[0]()
    rest = Run(tmp_path, sites, job="rest", **common, **of_method(name))()
    assert rest.results["info"]["resumed_at_round"] == 2
    assert same(rest.model()["model"], wanted.model()["model"])
    assert rest.results["test"] == wanted.results["test"]
    assert rest.results["rounds"][3]["validation"] == wanted.results["rounds"][3]["validation"]
    assert all(same(before.kept(s, kept_by(name), 3), sites.kept(s, kept_by(name), 3)) for s in SITES)


@with_downloads
def test_a_server_that_goes_back_a_round_takes_the_sites_with_it(whole, tmp_path, name):
    wanted, first = whole(name)
    failed: set[str] = set()

    def answer(site, task, message):
        if task == "train" and message.current_round == 2 and site not in failed:
            failed.add(site)
            sites[0].perform(site, task, message)  # what it keeps of this round must not be what it begins with
            return "out of luck"
        return None

    sites: list[Sites] = [Sites(tmp_path / "state", half(name))]
    back, second = run(tmp_path, half(name), answer=answer, experiment="e", num_rounds=4, **of_method(name))
    assert len(back.results["went_back"]) == 1
    assert same(back.model()["model"], wanted.model()["model"])
    assert back.results["test"] == wanted.results["test"]
    kept = kept_by(name)
    assert all(same(first.kept(s, kept, 3), second.kept(s, kept, 3)) for s in SITES)


@both
def test_one_site_with_the_bits_of_fed_avg(tmp_path, name):
    """Check that a single site gives FedAvg's bits, as no site differs from it; with Ditto the common model does."""
    settings = {"sites": ["site-1"], "num_rounds": 4}
    plain, _ = run(tmp_path / "plain", LocalTraining(**SMALL, local_epochs=2), **settings)
    own, sites = run(tmp_path / "own", half(name, local_epochs=2), **settings)
    state = {**own.model()["model"], **(parts(sites, "site-1", 3) if STAYING[name] else {})}
    assert same(state, plain.model()["model"])
    if name != "ditto":
        assert own.results["test"] == plain.results["test"]
        for mine, theirs in zip(own.results["rounds"], plain.results["rounds"], strict=True):
            assert mine["validation"] == theirs["validation"]


def test_a_tensor_that_should_have_stayed_is_not_used_and_said(done, tmp_path):
    quiet, _ = done("fed_bn")

    def loud(site, task, message):
        if (site, task) != ("site-2", "train"):
            return None
        reply = sites.perform(site, task, message)
        for tensor in NORM:
            reply.params[tensor] = torch.full((7, 7), torch.nan)  # not even looked at
        return reply

    sites = Sites(tmp_path / "loud" / "state", half("fed_bn"))
    made, _ = run(tmp_path / "loud", half("fed_bn"), answer=loud)
    assert same(made.model()["model"], quiet.model()["model"])
    for record in made.results["rounds"]:
        (note,) = record["notes"]
        assert note.startswith(f"site 'site-2': {len(NORM)} tensors (")
        assert "keeps at the sites; not used" in note


@both
def test_the_best_model_is_not_tested_without_what_the_sites_had_then(tmp_path, name):
    def answer(site, task, message):
        reply = sites.perform(site, task, message)
        if task == "train" and message.current_round == 1:  # received: the model of round 0
            reply.metrics = rows({**metric_values(reply.metrics), "accuracy": 1.0}, "validation")
        if task == "validate":
            reply.metrics = [
                {**row, "value": 0.25} if row["metric"].endswith("accuracy") else row for row in reply.metrics
            ]
        return reply

    sites = Sites(tmp_path / "state", half(name))
    made, _ = run(tmp_path, half(name), answer=answer)
    best = made.results["best"]
    assert (best["round"], best["is_last"]) == (0, False)
    assert made.results["test_best"] is None is made.results["fairness_best"]
    assert [asked for asked, _ in made.net.asked].count("validate") == 1
    assert "It was not tested: what the sites had of their own then is not kept." in fairness_table(
        read(**made.results)
    )


@both
def test_the_mean_of_the_last_models_is_of_each_with_the_parts_of_its_round(tmp_path, name):
    made, sites = run(tmp_path, half(name), test_last=2)
    kept = kept_by(name)
    task = Plane()
    tested = [m for (n, _), m in zip(made.net.asked, made.net.tasks, strict=True) if n == "validate"]
    assert [message.current_round for message in tested] == [2, 3]
    for site in SITES:
        found = []
        for message in tested:
            model = task.build_model()
            model.load_state_dict({**message.params, **sites.kept(site, kept, message.current_round - 1)})
            found.append(task.evaluate(model, task.open_site(site, {}).batches("test", batch_size=8), "cpu")["loss"])
        assert made.results["last_rounds"]["test"][site]["loss"] == pytest.approx(sum(found) / 2, abs=1e-6)


@with_downloads
def test_the_final_test_waits_for_the_site_s_folder_and_says_what_is_damaged(tmp_path, name, monkeypatch):
    made, sites = run(tmp_path, half(name), **of_method(name))
    kept = kept_by(name)
    request = decode_task("validate", address(made.net.tasks[-1], "site-1"), "site-1")
    worker = sites.worker("site-1")
    opened = []
    real = worker.state.open_store
    monkeypatch.setattr(worker.state, "open_store", lambda request: opened.append(request.name) or real(request))
    assert worker.perform(request).stats.get("state_lost") is None
    assert opened == ["validate"]
    (path,) = (tmp_path / "state" / "site-1").glob(f"*/{kept}.000002.pt")
    path.write_bytes(path.read_bytes()[:-30])
    assert f"{kept} of round 2 is damaged; that of round 1 is taken" in worker.perform(request).stats["state_lost"]
    if name == "cffl":
        return  # what comes is not a whole model
    plain = Sites(tmp_path / "plain", LocalTraining(**SMALL)).worker("site-1")
    monkeypatch.setattr(plain.state, "open_store", lambda request: pytest.fail("nothing is kept, nothing is locked"))
    assert plain.perform(request).status == "ok"


def test_parts_of_another_network_are_not_used(tmp_path):
    _, sites = run(tmp_path, half("fed_bn"))
    (run_folder,) = [p for p in (tmp_path / "state" / "site-1").iterdir() if p.is_dir()]
    torch.save({"1.weight": torch.zeros(3)}, run_folder / "parts.000002.pt")
    message = Sites(tmp_path / "state", half("fed_bn"))
    request = decode_task("validate", message_of(sites), "site-1")
    reply = message.worker("site-1").perform(request)
    assert reply.status == "ok"
    assert "do not fit the network" in reply.stats["state_lost"]


def message_of(sites: Sites) -> Any:
    torch.manual_seed(0)
    state = sites.task.build_model().state_dict()
    (run_folder,) = [p for p in (sites.folder / "site-1").iterdir() if p.is_dir()]
    return encode_task(SiteTask("validate", state, 3, 3, 0, run=run_folder.name))


@pytest.mark.parametrize("norm", ["layer", "none"])
def test_statistics_without_a_batch_norm_are_average_and_the_log_says_so(tmp_path, norm):
    made, _ = run(tmp_path / "site", half("statistics"), task=Plane(norm))
    plain, _ = run(tmp_path / "average", LocalTraining(**SMALL), task=Plane(norm))
    (line,) = made.results["info"]["in_vain"]
    assert line.startswith("norm_statistics='site' would do nothing: ")
    assert line in made.net.warned
    assert made.results["info"]["measured"] == "common"
    assert same(made.model()["model"], plain.model()["model"])


def test_the_log_says_what_stays(done):
    made, _ = done("fed_bn")
    told = "at the sites stay 5 tensors ('1.weight', '1.bias', '1.running_mean' and 2 more) of 9; "
    assert f"{told}every site is measured with its own" in made.net.said


def test_fed_lwr_compares_the_averaged_model_under_the_site_s_own_statistics(tmp_path) -> None:
    """Check the anchor with this site's own weights: only the statistics that came along differ."""
    training = build(all_methods()["fed_lwr"].training, {"norm_statistics": "site", "batch_size": 4})
    worker = at_site(tmp_path, training)
    state = initial()
    trained = worker.perform(request("train", state))
    assert trained.status == "ok", trained.reason
    anchor = {name: tensor + trained.update.get(name, 0) for name, tensor in state.items()}
    reply = worker.perform(request("anchor", anchor))
    assert reply.status == "ok", reply.reason
    assert max(reply.report["dissimilarity"]) < 1e-4
    plain = at_site(tmp_path / "plain", build(type(training), {"batch_size": 4}))
    plain.perform(request("train", state))
    assert max(plain.perform(request("anchor", anchor)).report["dissimilarity"]) > 1e-4


def test_what_stays_is_exactly_as_it_was_in_the_common_model(tmp_path) -> None:
    """Check equal bits, as sums of thirds would change the last bits of numbers in float64."""
    g = torch.Generator().manual_seed(0)
    received = {"bn.weight": torch.randn(500, generator=g).double().sin(), "weight": torch.ones(500).double()}
    collector = Collector(FedAvg(weighting="uniform"), tmp_path)
    collector.begin(0, 1, shape=LikeReceived(received, {"bn.weight"}), received=received, sites=["a", "b", "c"])
    for number, site in enumerate(("a", "b", "c")):
        update = {"weight": torch.full((500,), 0.1 * number).double()}
        message = encode_reply(
            SiteReply(STATUS_OK, update=update, metrics=make_cells({"dice": 0.5}, "validation"), num_steps=1), 0
        )
        collector.keep(collector.read_training(site, message))
    state, weighing = collector.aggregate()
    assert torch.equal(state["bn.weight"], received["bn.weight"])
    assert not torch.equal(received["bn.weight"] / 3 * 3, received["bn.weight"])
    torch.testing.assert_close(state["weight"], torch.full((500,), 1.1).double())
    assert weighing.sites == pytest.approx(dict.fromkeys("abc", 1 / 3))


def test_a_home_that_does_not_say_what_is_handed_in_is_refused() -> None:
    with pytest.raises(TypeError, match=r"abstract.*'?hand_in'?.*'?take'?"):
        OwnModel(LocalTraining())  # type: ignore[abstract]
