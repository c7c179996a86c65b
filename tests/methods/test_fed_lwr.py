"""Test Fed-LWR: a site's scores against a CKA written here, and the weights computed from them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from fairflare.core.weighting import dissimilarity_weights
from fairflare.exchange.messages import clean_state
from fairflare.federation.plan.plan import make_plan
from fairflare.federation.site.worker import round_seed
from fairflare.methods.fed_lwr import FedLWR, LayerSimilarityReport
from fairflare.tasks.segmentation import SegmentationTask
from tests.tiny import VOLUMES

from .support import SEGMENTATION, at_site, initial, inputs, request, same

TASK = {**SEGMENTATION, "phantom_cases": 1.0}
BATCH = 5  # leaves a short last batch in both splits
ROUND = 2
Batch = dict[str, np.ndarray]  # layer -> (images, features)


# ------------------------------------------------------------------------------------------------ the reference


def features(model: torch.nn.Module, images: torch.Tensor) -> Batch:
    """Return every layer's output, flattened by image, in float64 and evaluation mode."""
    found: Batch = {}
    hooks = [
        module.register_forward_hook(
            lambda m, args, output, name=name: found.__setitem__(name, output.flatten(1).numpy().copy())
        )
        for name, module in model.named_modules()
        if list(module.parameters(recurse=False))
    ]
    with torch.no_grad():
        model.double().eval()(images.double())
    for hook in hooks:
        hook.remove()
    return found


def hsic(k: np.ndarray, l: np.ndarray, biased: bool) -> float:
    """Compute Eq. 2, or the unbiased form with its three traces."""
    n = len(k)
    if biased:
        h = np.eye(n) - 1 / n
        return float(np.trace(k @ h @ l @ h)) / (n - 1) ** 2
    k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))
    middle = k.sum() * l.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * float(np.sum(k @ l))
    return float(np.trace(k @ l) + middle) / (n * (n - 3))


def cka(pairs: Sequence[tuple[np.ndarray, np.ndarray]], biased: bool) -> float:
    """Compute delta over batches as a quotient of sums."""
    sums = np.zeros(3)
    for x, y in pairs:
        k, l = x @ x.T, y @ y.T
        sums += [hsic(k, l, biased), hsic(k, k, biased), hsic(l, l, biased)]
    return float(sums[0] / math.sqrt(sums[1] * sums[2])) if sums[1] > 0 and sums[2] > 0 else math.nan


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean((x * y).sum(1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))))


def cut(numbers: Sequence[int], least: int) -> list[list[int]]:
    """Return batches of BATCH; a batch that is too small for the estimator joins the one before it."""
    parts = [list(numbers[i : i + BATCH]) for i in range(0, len(numbers), BATCH)]
    if len(parts[-1]) < least:
        parts[-2:] = [parts[-2] + parts[-1]]
    return parts


def images_of(settings: dict, count: int, seed: int) -> list[list[int]]:
    """Return numbers of the images, batch by batch, as the settings say; whole-set estimators have one batch."""
    authors = settings.get("preset") == "authors"
    similarity = settings.get("similarity", "cka")
    estimator = settings.get("cka_estimator") or ("minibatch_unbiased" if authors else "full_biased")
    everything = list(range(count))
    if "cka_max_samples" in settings:
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        everything = sorted(drawn[: settings["cka_max_samples"]].tolist())
    if similarity == "cosine" or estimator.startswith("full"):
        return [everything]
    least = 4 if estimator.endswith("unbiased") else 2
    passes = settings.get("cka_passes") or (5 if authors else 1)
    found = []
    for number in range(passes):
        order = everything
        if passes > 1:
            drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed + number)).tolist()
            order = [i for i in drawn if i in everything]
        found += cut(order, least)
    return found


def reference(settings: dict, local: Batch, anchor: Batch, seed: int) -> dict[str, float]:
    """Return delta by layer, from the features of all images of the split."""
    found = {}
    for layer, x in local.items():
        y = anchor[layer]
        batches = images_of(settings, len(x), seed)
        if settings.get("similarity") == "cosine":
            (numbers,) = batches
            found[layer] = cosine(x[numbers], y[numbers])
        else:
            estimator = settings.get("cka_estimator") or (
                "minibatch_unbiased" if settings.get("preset") == "authors" else "full_biased"
            )
            found[layer] = cka([(x[b], y[b]) for b in batches], not estimator.endswith("unbiased"))
    return found


# ------------------------------------------------------------------------------------------------ the scores

SETTINGS = {
    "paper": {},
    "authors": {"preset": "authors"},
    "full_unbiased": {"cka_estimator": "full_unbiased"},
    "minibatch_biased": {"cka_estimator": "minibatch_biased"},
    "minibatch_unbiased": {"cka_estimator": "minibatch_unbiased"},
    "validation": {"cka_split": "val"},
    "two passes": {"cka_estimator": "minibatch_biased", "cka_passes": 2},
    "fewer images": {"cka_max_samples": 13},
    "fewer images, unbiased": {"cka_max_samples": 13, "cka_estimator": "full_unbiased"},
    "fewer images in batches": {"cka_max_samples": 13, "cka_estimator": "minibatch_unbiased"},
    "fewer images, two passes": {"cka_max_samples": 13, "cka_estimator": "minibatch_unbiased", "cka_passes": 2},
    "authors, one pass": {"preset": "authors", "cka_passes": 1},
    "authors, training images": {"preset": "authors", "cka_split": "train"},
    "authors, whole": {"preset": "authors", "cka_estimator": "full_biased"},
    "authors, biased": {"preset": "authors", "cka_estimator": "minibatch_biased"},
    "cosine": {"similarity": "cosine"},
    "cosine, fewer images": {"similarity": "cosine", "cka_max_samples": 13},
    "cosine, authors": {"similarity": "cosine", "preset": "authors"},
}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return ``compared(settings)`` -> a site's report, with models that differ; ``compared.features(split)``."""
    folder = tmp_path_factory.mktemp("site")
    task = SegmentationTask(**TASK)
    state = initial(task)
    locals_ = []
    for name in ("site-1", "site-2"):
        training = LayerSimilarityReport(batch_size=4, learning_rate=3e-3)
        trained = at_site(folder / name, training, task=task, name=name)
        reply = trained.perform(request("train", state, ROUND))
        assert reply.status == "ok", reply.reason
        locals_.append(trained.state.store().load_at("local_model", ROUND))
    local, other = locals_
    anchor = {n: (t + other[n]) / 2 if t.is_floating_point() else t for n, t in local.items()}
    data = task.open_site("site-1", {})
    assert data.num_samples("training") % BATCH == 3  # fewer than the unbiased estimator needs
    assert data.num_samples("validation") % BATCH == 2

    class Compared:
        def __call__(self, settings: dict) -> dict[str, tuple[float, float]]:
            training = LayerSimilarityReport(cka_batch_size=BATCH, **settings)
            reply = at_site(folder / "site-1", training, task=task).perform(request("anchor", anchor, ROUND))
            assert reply.status == "ok", reply.reason
            assert set(reply.report) == {"layers", "cka", "dissimilarity"}
            found = zip(*(reply.report[k] for k in ("layers", "cka", "dissimilarity")), strict=True)
            return {layer: (delta, distance) for layer, delta, distance in found}

        @staticmethod
        @cache
        def features(split: str) -> tuple[Batch, Batch]:
            ((images, _),) = data.batches(split, batch_size=1000)
            found = []
            for weights in (local, anchor):
                model = task.build_model()
                model.load_state_dict(weights)
                found.append(features(model, images))
            return found[0], found[1]

        def expected(self, settings: dict) -> dict[str, float]:
            preset = "val" if settings.get("preset") == "authors" else "train"
            split = {"train": "training", "val": "validation"}[settings.get("cka_split") or preset]
            return reference(settings, *self.features(split), round_seed(0, "site-1", ROUND))

    return Compared()


@pytest.mark.many
@pytest.mark.parametrize("name", SETTINGS)
def test_reported_scores_are_those_of_the_reference(compared, name):
    reported = compared(SETTINGS[name])
    expected = compared.expected(SETTINGS[name])
    assert list(reported) == list(expected)
    assert len(reported) == 41
    for layer, delta in expected.items():
        assert reported[layer][0] == pytest.approx(delta, abs=2e-5), layer
        assert reported[layer][1] == pytest.approx(1 - delta, rel=3e-4, abs=1e-7), layer


@pytest.mark.parametrize("settings", [{}, {"similarity": "cosine"}, {"preset": "authors"}, {"cka_max_samples": 5}])
def test_anchor_equal_to_the_local_model_is_fully_similar(tmp_path, settings):
    here = at_site(tmp_path, LayerSimilarityReport(batch_size=4, **settings))
    here.perform(request("train", initial(), 0))
    reply = here.perform(request("anchor", here.state.store().load_at("local_model", 0), 0))
    assert max(abs(d) for d in reply.report["dissimilarity"] if math.isfinite(d)) < 1e-6
    assert sum(math.isfinite(d) for d in reply.report["dissimilarity"]) > 30


def test_the_report_changes_neither_model(tmp_path):
    here = at_site(tmp_path, LayerSimilarityReport(preset="authors"))
    here.perform(request("train", initial(), 0))
    kept, anchor = here.state.store().load_at("local_model", 0), initial(seed=1)
    assert here.perform(request("anchor", anchor, 0)).status == "ok"
    assert same(here.state.store().load_at("local_model", 0), kept)
    assert same(clean_state(here.network.model.state_dict()), anchor)


# ------------------------------------------------------------------------------------------------ the weights

LAYERS = ["down.0", "down.1", "down.2.conv", "up.0", "up.1", "head"]
SITES = ["a", "b", "c"]


def scored(seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return reports about the anchor with random 1 - delta."""
    rng = np.random.default_rng(seed)
    found = {}
    for name in SITES:
        values = {layer: float(v) for layer, v in zip(LAYERS, rng.uniform(0.05, 0.9, len(LAYERS)), strict=True)}
        found[name] = {"cka": {k: 1 - v for k, v in values.items()}, "dissimilarity": values}
    return found


def weighed(rule: FedLWR, anchor: dict, current_round: int = 0) -> dict[str, dict[str, float]]:
    found = rule.weigh(inputs({s: {} for s in SITES}, anchor=anchor, layers=LAYERS, current_round=current_round))
    assert found.sites is None
    return found.layers


def shares(values: dict[str, float]) -> dict[str, float]:
    return {name: v / sum(values.values()) for name, v in values.items()}


def test_a_score_that_is_no_number_is_the_mean_of_the_sites_others():
    anchor = scored(0)
    anchor["b"]["dissimilarity"]["up.0"] = math.nan
    found = weighed(FedLWR(), anchor)
    for layer in LAYERS:
        means = {}
        for name in SITES:
            values = anchor[name]["dissimilarity"]
            known = [v for v in values.values() if not math.isnan(v)]
            means[name] = sum(known) / len(known) if math.isnan(values[layer]) else values[layer]
        assert found[layer] == pytest.approx(shares(means), rel=1e-12), layer


@pytest.mark.parametrize(
    ("name", "layer"), [("down", "down.2.conv"), ("down.2", "down.2.conv"), ("up.0", "up.0"), ("head", "head")]
)
def test_one_layer_weighs_the_whole_model(name, layer):
    anchor = scored(1)
    found = weighed(FedLWR(only_layer=name), anchor)
    expected = shares({s: anchor[s]["dissimilarity"][layer] for s in SITES})
    assert all(found[x] == pytest.approx(expected, rel=1e-12) for x in LAYERS)


def test_nobody_reports_about_the_anchor(caplog):
    """Check section 5 of the spec: equal weights, and no failed job."""
    rule = FedLWR()
    with caplog.at_level(logging.WARNING):
        found = weighed(rule, {}, current_round=3)
    assert all(found[layer] == pytest.approx(dict.fromkeys(SITES, 1 / 3), rel=1e-12) for layer in LAYERS)
    assert "Fed-LWR, round 3: no site reported about the anchor; equal weights" in caplog.text
    assert rule.state_dict() == {"last_scores": {}}
    caplog.clear()
    # Once there were scores they count, also in a restarted server.
    anchor = scored(2)
    known = weighed(rule, anchor)
    again = FedLWR()
    again.load_state_dict(rule.state_dict())
    with caplog.at_level(logging.WARNING):
        assert weighed(again, {}) == known
    assert caplog.text == ""
    for layer in LAYERS:
        assert known[layer] == pytest.approx(shares({s: anchor[s]["dissimilarity"][layer] for s in SITES}), rel=1e-12)


def test_one_silent_site_has_its_last_scores_or_the_others_mean():
    anchor = scored(3)
    rule = FedLWR()
    two = {s: anchor[s] for s in ("a", "b")}
    first = weighed(rule, two)
    for layer in LAYERS:
        a, b = (anchor[s]["dissimilarity"][layer] for s in ("a", "b"))
        assert first[layer] == pytest.approx(shares({"a": a, "b": b, "c": (a + b) / 2}), rel=1e-12)
    weighed(rule, anchor)
    later = weighed(rule, {s: scored(4)[s] for s in ("a", "b")})
    for layer in LAYERS:
        expected = {s: scored(4)[s]["dissimilarity"][layer] for s in ("a", "b")}
        expected["c"] = anchor["c"]["dissimilarity"][layer]
        assert later[layer] == pytest.approx(shares(expected), rel=1e-12)


# ------------------------------------------------------------------------------------------------ steadied


def test_presets_of_paper_and_authors_are_not_steadied():
    """Check that the weights are exactly Eq. 5's."""
    anchor = scored(5)
    reported = {s: anchor[s]["dissimilarity"] for s in SITES}
    for preset, low, high in (("paper", 0.0, 1.0), ("authors", 1e-4, 0.99)):
        expected = dissimilarity_weights(reported, clip_min=low, clip_max=high)
        rule = FedLWR(preset=preset)
        assert all(rule.asks_about_anchor(number) for number in range(3))
        for number in range(3):
            assert weighed(rule, anchor, number) == expected
        assert rule.state_dict() == {"last_scores": reported}


def test_weights_are_mixed_with_uniform_ones():
    # Equal images, 1 - delta = 0.1, 0.2, 0.5: weights .125, .25, .625; mixed 0.4: 0.6 * w + 0.4 / 3.
    anchor = {
        s: {"cka": {}, "dissimilarity": dict.fromkeys(LAYERS, d)} for s, d in zip(SITES, (0.1, 0.2, 0.5), strict=True)
    }
    expected = {"a": 0.075 + 0.4 / 3, "b": 0.15 + 0.4 / 3, "c": 0.375 + 0.4 / 3}
    found = weighed(FedLWR(mix=0.4), anchor)
    assert all(found[layer] == pytest.approx(expected, rel=1e-12) for layer in LAYERS)
    found = weighed(FedLWR(mix=1.0), scored(6))
    assert all(found[layer] == pytest.approx(dict.fromkeys(SITES, 1 / 3), rel=1e-12) for layer in LAYERS)


def test_the_record_has_what_was_reported_or_filled_in():
    rule, first = FedLWR(), scored(7)
    weighed(rule, first)
    two = {s: scored(8)[s] for s in ("a", "b")}
    found = rule.weigh(inputs({s: {} for s in SITES}, anchor=two, layers=LAYERS, current_round=1))
    for layer in LAYERS:
        for s in SITES:
            record = found.record[layer][s]
            assert record["dissimilarity"] == {**first, **two}[s]["dissimilarity"][layer]
            assert math.isnan(record["cka"]) == (s == "c" or math.isnan(two[s]["cka"][layer]))
            assert record["weight"] == found.layers[layer][s]


def test_a_warm_up_is_plain_averaging():
    rule = FedLWR(warmup_rounds=2)
    assert [rule.asks_about_anchor(number) for number in range(4)] == [False, False, True, True]
    found = rule.weigh(inputs({s: {} for s in SITES}, layers=LAYERS, current_round=1))
    assert found.sites == dict.fromkeys(SITES, 1 / 3)
    assert found.layers is None
    assert found.values == {"warmup": 1.0}
    anchor = scored(10)
    assert weighed(rule, anchor, 2) == weighed(FedLWR(), anchor)


def test_a_warm_up_that_leaves_no_round_is_refused():
    with pytest.raises(ValueError, match=r"warmup_rounds=10 .*'stable'.* the 3 round"):
        make_plan("fed_lwr", settings={"preset": "stable"})
    plan = make_plan("fed_lwr", settings={"preset": "stable"}, num_rounds=11)
    assert (plan.rule.setting("mix"), plan.training.preset) == (0.75, "stable")


def test_a_layer_that_the_network_has_not_is_refused_before_the_run():
    with pytest.raises(ValueError, match="'fed_lwr_last_layer': only_layer='down_9'"):
        make_plan("fed_lwr_last_layer", settings={"only_layer": "down_9"})


TINY = VOLUMES
