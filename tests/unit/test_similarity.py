"""Test layer similarity: the spec's numbers, properties, and the streamed CKA against a plain one in float64."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.networks.nets import BasicUNet, SwinUNETR
from torch import Tensor, nn

from fairflare.core.features import joint_pass
from fairflare.core.similarity import (
    ESTIMATORS,
    center,
    hsic_of_centered,
    layerwise,
    layerwise_cka,
    layerwise_cosine,
    linear_cka,
    parameter_layers,
    products,
)
from fairflare.core.similarity import store as stored
from fairflare.methods.fed_lwr import LayerSimilarityReport

FULL = ("biased", "unbiased")


# --- references, slow and plain ---------------------------------------------------------------------------


def gram(x: Any) -> Tensor:
    features = torch.as_tensor(x, dtype=torch.float64)
    return features @ features.T


def hsic(k: Tensor, l: Tensor, estimator: str) -> float:
    return hsic_of_centered(center(k, estimator), center(l, estimator), estimator)


def reference_hsic(k: np.ndarray, l: np.ndarray, estimator: str) -> float:
    n = len(k)
    if estimator == "biased":
        h = np.eye(n) - np.ones((n, n)) / n
        return float((h @ k @ h).ravel() @ (h @ l @ h).ravel()) / (n - 1) ** 2
    k, l = k - np.diag(np.diag(k)), l - np.diag(np.diag(l))
    one = np.ones(n)
    trace = np.trace(k @ l)
    sums = (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2))
    mixed = 2 / (n - 2) * (one @ k @ l @ one)
    return float(trace + sums - mixed) / (n * (n - 3))


def reference_cka(x: np.ndarray, y: np.ndarray, estimator: str) -> float:
    k, l = x @ x.T, y @ y.T
    norms = reference_hsic(k, k, estimator) * reference_hsic(l, l, estimator)
    return reference_hsic(k, l, estimator) / math.sqrt(norms)


def reference_sums(batches: Iterable[tuple[np.ndarray, np.ndarray]], estimator: str) -> float:
    """Compute the quotient of sums of each batch's HSIC."""
    sums = np.zeros(3)
    for u, v in batches:
        k, l = u @ u.T, v @ v.T
        sums += [reference_hsic(*pair, estimator) for pair in ((k, l), (k, k), (l, l))]
    return float(sums[0] / math.sqrt(sums[1] * sums[2]))


def features(model: nn.Module, images: Tensor) -> dict[str, np.ndarray]:
    """Return the output of every layer, (n, features) in float64, from each image by itself."""
    found: dict[str, np.ndarray] = {}
    rows: dict[str, list[np.ndarray]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor):
                found[name] = output.detach().flatten().double().numpy().copy()

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in parameter_layers(model).items()]
    model.eval()
    for image in images:
        found.clear()
        with torch.no_grad():
            model(image[None])
        for name, row in found.items():
            rows.setdefault(name, []).append(row)
    for handle in handles:
        handle.remove()
    return {name: np.stack(entries) for name, entries in rows.items()}


def reference_dissimilarity(u: np.ndarray, v: np.ndarray, estimator: str) -> float:
    """Compute 1 - CKA as half the squared distance of the normalized centered Gram matrices."""
    k, l = (center(gram(f - f.mean(0)), estimator) for f in (u, v))
    return 0.5 * float((k / k.norm() - l / l.norm()).square().sum())


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread, as the models are small, and waiting threads are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- models and images ------------------------------------------------------------------------------------


def smooth_images(n: int, size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(n, 1, size // 8, size // 8, generator=generator)
    noise = torch.randn(n, 1, size, size, generator=generator)
    return nn.functional.interpolate(coarse, size=size, mode="bilinear") + 0.1 * noise


def unet(seed: int, images: Tensor) -> nn.Module:
    """Return a small U-Net with random weights and batch-norm statistics of the images."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BasicUNet(
            spatial_dims=2, in_channels=1, out_channels=1, features=(8, 8, 16, 16, 16, 8), norm="batch", bias=False
        )
        model.train()
        with torch.no_grad():
            for _ in range(20):
                model(images)
    return model


def perturbed(model: nn.Module, size: float, seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in [*other.parameters(), *other.buffers()]:
            if tensor.is_floating_point():
                tensor.mul_(1 + size * torch.randn(tensor.shape, generator=generator))
    return other


@pytest.fixture(scope="module")
def images() -> Tensor:
    return smooth_images(18, 64)


@pytest.fixture(scope="module")
def pairs(images: Tensor) -> dict[str, tuple[nn.Module, nn.Module]]:
    model = unet(0, images)
    return {"near": (model, perturbed(model, 0.005)), "far": (model, unet(1, images))}


def mlp(*, seed: int = 0, bias: bool = True) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7, bias=bias), nn.ReLU(inplace=True), nn.Linear(7, 3, bias=bias))


@pytest.fixture
def vectors() -> Tensor:
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return every store made in the test, with its most bytes in memory as `peak`."""
    made: list[Any] = []

    class Watched(stored.Store):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.peak = self.spilled = 0
            made.append(self)

        def keep(self, values: Tensor) -> Callable[[], Tensor]:
            before = self.bytes_in_memory, self.bytes_in_file
            kept = super().keep(values)
            taken = self.bytes_in_memory - before[0], self.bytes_in_file - before[1]
            assert sorted(taken) == [0, kept().nbytes]
            self.peak = max(self.peak, self.bytes_in_memory)
            self.spilled = max(self.spilled, self.bytes_in_file)
            return kept

    monkeypatch.setattr(layerwise, "Store", Watched)
    return made


# --- two matrices: the numbers of the spec ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "values", "delta"),
    [("biased", (1.6375, 2.225, 1.69), 0.844448), ("unbiased", (11 / 15, 1.6, 19 / 30), 0.728493)],
)
def test_five_samples_by_hand(estimator: str, values: tuple[float, ...], delta: float) -> None:
    u = np.array([[1, 0], [2, 1], [0, 1], [1, 3], [2, 2]])
    v = np.array([[0, 1], [1, 1], [1, 0], [3, 1], [1, 2]])
    k, l = gram(u), gram(v)
    assert [hsic(k, l, estimator), hsic(k, k, estimator), hsic(l, l, estimator)] == pytest.approx(values)
    assert linear_cka(u, v, estimator) == pytest.approx(delta, abs=1e-6)


class Columns(nn.Module):
    """Pass on some columns of the input; it is a layer because it has a parameter."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.columns = slice(first, last)
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.columns] + 0.0


BATCHES = (
    torch.tensor([[1.0, 0, 0, 1], [2, 1, 1, 1], [0, 1, 1, 0], [1, 3, 3, 1]]),  # A beside B
    torch.tensor([[0.0, 0, 0, 0], [1, 0, 2, 0], [0, 2, 0, 1], [2, 2, 1, 1]]),  # C beside D
)


@pytest.mark.parametrize(("estimator", "delta"), [("minibatch_unbiased", 0.742307), ("minibatch_biased", 0.778202)])
def test_sums_over_batches_by_hand(estimator: str, delta: float) -> None:
    models = nn.Sequential(Columns(0, 2)), nn.Sequential(Columns(2, 4))
    result = layerwise_cka(*models, BATCHES, estimator=estimator)
    assert result["0"].delta == pytest.approx(delta, abs=1e-6)
    assert result["0"].dissimilarity == pytest.approx(1 - delta, abs=1e-6)


# --- two matrices: properties -----------------------------------------------------------------------------


@st.composite
def matrices(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, p, q = draw(st.integers(4, 12)), draw(st.integers(2, 9)), draw(st.integers(2, 9))
    x, y = rng.normal(size=(n, p)), rng.normal(size=(n, q))
    if draw(st.booleans()):  # alike, as models are
        y = x @ rng.normal(size=(p, q)) + 0.1 * y
    return x, y, rng


@pytest.mark.parametrize("estimator", FULL)
@given(case=matrices())
@settings(max_examples=60, deadline=None)
def test_equals_the_formula(estimator: str, case: tuple[np.ndarray, np.ndarray, np.random.Generator]) -> None:
    x, y, _ = case
    x, y = x - x.mean(0), y - y.mean(0)  # the formula as written loses digits otherwise
    expected = reference_cka(x, y, estimator)
    assert linear_cka(x, y, estimator) == pytest.approx(expected, abs=1e-10)
    k, l = x @ x.T, y @ y.T
    got = hsic(torch.from_numpy(k), torch.from_numpy(l), estimator)
    assert got == pytest.approx(reference_hsic(k, l, estimator), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("estimator", FULL)
@given(case=matrices(), scale=st.floats(1e-3, 1e3), shift=st.floats(-100, 100))
@settings(max_examples=60, deadline=None)
def test_invariances(
    estimator: str, case: tuple[np.ndarray, np.ndarray, np.random.Generator], scale: float, shift: float
) -> None:
    x, y, rng = case
    before = x.copy(), y.copy()
    delta = linear_cka(x, y, estimator)
    rotation, _ = np.linalg.qr(rng.normal(size=(x.shape[1], x.shape[1])))
    order = rng.permutation(len(x))
    assert (0 if estimator == "biased" else -1) <= delta <= 1
    assert linear_cka(y, x, estimator) == pytest.approx(delta, abs=1e-10)
    assert linear_cka(x @ rotation, y, estimator) == pytest.approx(delta, abs=1e-10)
    assert linear_cka(scale * x, -y / scale, estimator) == pytest.approx(delta, abs=1e-10)
    assert linear_cka(x + shift, y, estimator) == pytest.approx(delta, abs=1e-9)
    assert linear_cka(x[order], y[order], estimator) == pytest.approx(delta, abs=1e-10)
    assert linear_cka(x, 3 * x @ rotation + 5, estimator) == pytest.approx(1, abs=1e-10)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(y, before[1])


def test_degenerate_matrices() -> None:
    x = np.arange(10.0).reshape(5, 2)
    constant = np.full((5, 3), 0.1)
    assert linear_cka(constant, np.zeros((5, 2))) == 1
    assert math.isnan(linear_cka(constant, x))
    assert math.isnan(linear_cka(x[:1], x[:1]))
    assert math.isnan(linear_cka(x * np.inf, x))
    assert linear_cka(x[:2], x[:2] * 3) == pytest.approx(1)
    assert linear_cka(x * 1e200, x) == pytest.approx(1)
    with pytest.raises(ValueError, match=r"^number of samples \(unbiased\).* got 3$"):
        linear_cka(x[:3], x[:3], "unbiased")
    with pytest.raises(ValueError, match="same number of rows, got 5 and 4"):
        linear_cka(x, x[:4])
    with pytest.raises(ValueError, match=r"^estimator.* got 'exact'$"):
        linear_cka(x, x, "exact")
    with pytest.raises(ValueError, match="y must be a matrix"):
        linear_cka(x, x[0])


def test_scores_belong_to_their_own_layer(vectors: Tensor) -> None:
    """Check calls in another order than the state dict, with a pooling between."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.third = nn.Linear(4, 2)
            self.second = nn.Linear(3, 4)
            self.pool = nn.AvgPool1d(2)
            self.first = nn.Linear(5, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.pool(self.first(x)[:, None])[:, 0]).relu())

    torch.manual_seed(0)
    a, b = Backwards(), Backwards()
    u, v = features(a, vectors), features(b, vectors)
    result = layerwise_cka(a, b, vectors.split(5))
    assert list(result) == ["third", "second", "first"]
    for name, value in result.items():
        assert value.delta == pytest.approx(reference_cka(u[name], v[name], "biased"), rel=1e-5)
    assert len({round(value.delta, 3) for value in result.values()}) == 3


# --- CKA over a data set, against the reference -----------------------------------------------------------


@pytest.mark.many
@pytest.mark.parametrize(("pair", "double"), [("near", False), ("far", True)], ids=["near, single", "far, double"])
def test_layerwise_cka_is_exact(
    pair: str,
    double: bool,
    pairs: dict[str, tuple[nn.Module, nn.Module]],
    images: Tensor,
    tmp_path: Path,
    stores: list[Any],
) -> None:
    """Check single precision, in which the forward pass rounds a little differently in other batches."""
    dtype = torch.float64 if double else torch.float32
    a, b = (copy.deepcopy(model).to(dtype) for model in pairs[pair])
    images = images.to(dtype)
    u, v = features(a, images), features(b, images)
    for estimator in FULL:
        expected = {name: reference_dissimilarity(u[name], v[name], estimator) for name in u}
        median = sorted(expected.values())[len(expected) // 2]
        assert (1e-6 < median < 1e-3) if pair == "near" else median > 1e-2
        for size, memory in ((1, 2**30), (7, 0), (18, 2**20)):
            result = layerwise_cka(a, b, images.split(size), estimator=estimator, memory=memory, scratch=tmp_path)
            assert list(result) == list(parameter_layers(a))
            assert stores[-1].peak <= memory
            assert (stores[-1].spilled > 0) == (memory < 2**30)
            for name, value in result.items():
                assert value.dissimilarity == pytest.approx(expected[name], rel=1e-4), (name, size)
                assert value.delta == pytest.approx(1 - expected[name], abs=1e-4)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pair", ["near", "far"])
def test_both_forms_of_the_rows_hold_what_is_promised(
    pair: str, pairs: dict[str, tuple[nn.Module, nn.Module]], images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check both forms, which are chosen by time: where float32 is not enough, products are computed again."""
    a, b = pairs[pair]
    u, v = features(a, images), features(b, images)
    expected = {name: reference_dissimilarity(u[name], v[name], "biased") for name in u}
    found = {}
    for far in (0.0, layerwise.FAR, math.inf):
        monkeypatch.setattr(layerwise, "FAR", far)
        found[far] = layerwise_cka(a, b, images.split(7))
        for name, value in found[far].items():
            assert value.dissimilarity == pytest.approx(expected[name], rel=1e-4), (name, far)
    always, chosen, never = found.values()
    assert always != never
    assert chosen != (never if pair == "far" else always)


class Flat(nn.Module):
    """Flatten with ``view``, as most networks do, which knows one layout of the features."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.conv, self.head = how, nn.Conv2d(2, 3, 3), nn.Linear(108, 2)
        self.contiguous = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        self.contiguous = x.is_contiguous()
        return self.head(getattr(x, self.how)(len(x), -1))


class Alone(nn.Module):
    """Define networks of one layout, or that need whole batches, as in a site's own code."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.conv = how, nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, track_running_stats=how != "batch")

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        if self.how == "channel by channel":
            return x.view(len(x) * 4, 1, *x.shape[2:]).mean((1, 2, 3)).view(len(x), 4)
        if self.how == "says no" and not x.is_contiguous():
            raise ValueError("contiguous images, please")
        return x.mean((2, 3)) if self.how != "batch" else self.norm(x.mean((2, 3), keepdim=True))


@pytest.mark.parametrize("how", ["channel by channel", "says no", "batch"])
@pytest.mark.parametrize("function", [layerwise_cka, layerwise_cosine])
def test_networks_that_one_image_says_little_of(function: Callable[..., Any], how: str) -> None:
    x, networks = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0)), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        networks.append(Alone(how))
    found = function(*networks, x.split(4))
    assert all(math.isfinite(value.delta) for value in found.values())


def test_a_look_at_the_layout_draws_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a network that draws numbers where it should not: its figures are those of the passes alone."""

    class Noisy(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand(1)

    x, found = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0)), []
    for looks in (True, False):
        if not looks:
            monkeypatch.setattr(joint_pass, "_takes_channels_last", lambda model, image: True)
        torch.manual_seed(0)
        layerwise_cka(Noisy(3, 4, 3), Noisy(3, 4, 3), x.split(4))
        found.append(torch.get_rng_state())
    assert torch.equal(*found)


def test_a_network_with_one_layout_is_compared_in_it() -> None:
    x, networks = torch.randn(9, 2, 8, 8, generator=torch.Generator().manual_seed(0)), {}
    for how in ("view", "reshape"):
        a, b = Flat(how), Flat(how)
        b.load_state_dict({name: tensor.flip(0) for name, tensor in a.state_dict().items()})
        networks[how] = layerwise_cka(a, b, x.split(4))
        assert a.contiguous == (how == "view"), "channels last, where it can be"
    for name, value in networks["view"].items():
        assert networks["reshape"][name].dissimilarity == pytest.approx(value.dissimilarity, rel=1e-4)


def test_equal_and_scaled_models(pairs: dict[str, tuple[nn.Module, nn.Module]], images: Tensor) -> None:
    a, _ = pairs["near"]
    for other in (a, copy.deepcopy(a)):
        assert set(layerwise_cka(a, other, images.split(7)).values()) == {(1.0, 0.0)}
    linear = nn.Sequential(nn.Flatten(), nn.Linear(4096, 30))
    scaled = copy.deepcopy(linear)
    with torch.no_grad():
        scaled[1].weight.mul_(1000)
        scaled[1].bias.add_(7)
    assert layerwise_cka(linear, scaled, images.split(7))["1"].dissimilarity < 1e-9


def wide(seed: int) -> nn.Sequential:
    """Return layers of 32768 features, so that rows are stored in 16 bits."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1))
        model.train()
        with torch.no_grad():
            for _ in range(50):
                model(smooth_images(8, 64))
    return model.double().eval()


HARD = {
    "plain": lambda x: x,
    "offset": lambda x: x + 1000,
    "two images 200 times as large": lambda x: torch.cat([x[:20], 200 * x[20:22], x[22:]]),
    "first image blank": lambda x: torch.cat([0 * x[:1], x[1:]]),
    "first 20 images blank": lambda x: torch.cat([0 * x[:20], x[20:]]),
    "first image blank, offset": lambda x: torch.cat([0 * x[:1], x[1:] + 1000]),
    "first 20 images blank, offset": lambda x: torch.cat([0 * x[:20], x[20:] + 1000]),
    "growing": lambda x: x * torch.logspace(-4, 4, len(x), dtype=x.dtype)[:, None, None, None],
    "huge": lambda x: 1e12 * x,
}


@pytest.mark.many
@pytest.mark.parametrize("estimator", FULL)
@pytest.mark.parametrize("case", HARD)
def test_hard_images(case: str, estimator: str, stores: list[Any]) -> None:
    """Check that nothing overflows and 1 - delta keeps its digits, for any first images."""
    a = wide(0)
    x = HARD[case](smooth_images(40, 64).double())
    for b in (perturbed(a, 0.01), wide(1)):
        u, v = features(a, x), features(b, x)
        result = layerwise_cka(a, b, x.split(6), estimator=estimator, memory=2**22)
        for name, value in result.items():
            expected = reference_dissimilarity(u[name], v[name], estimator)
            assert value.dissimilarity == pytest.approx(expected, rel=1e-4), name
        assert stores[-1].spilled > 0


@pytest.mark.parametrize("estimator", FULL)
@pytest.mark.parametrize("piece", [1, 3, 40])
@pytest.mark.parametrize("n", [4, 8, 20])
@pytest.mark.parametrize("times", [1e2, 1e3, 1e4])
def test_a_first_image_far_larger_than_the_others(times: float, n: int, piece: int, estimator: str) -> None:
    """Check that it costs no digits: features are those of float32, sums NumPy's in float64."""
    drawn = np.random.default_rng(n)
    u = drawn.normal(size=(n, 30)).astype(np.float32)
    v = u + 0.05 * drawn.normal(size=u.shape).astype(np.float32)
    u[0] *= times
    v[0] *= times
    with closing(stored.Store(2**20)) as store:
        rows = layerwise._Rows("layer", store)
        alignment = layerwise.Alignment(estimator)
        for part in np.split(np.arange(n), [1, *range(1 + piece, n, piece)]):
            rows.add(torch.from_numpy(u[part]), torch.from_numpy(v[part]))
        (pair,) = rows.grams().values()
        alignment.add(*pair)
        found = alignment.similarity().dissimilarity
    expected = 1 - reference_cka(u.astype(np.float64), v.astype(np.float64), estimator)
    assert found == pytest.approx(expected, rel=1e-4)


def shapes(n: int, size: int) -> Tensor:
    """Draw an ellipse with a spot on black, as in medical images with mostly equal pixels."""
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    images = torch.zeros(n, 1, size, size)
    for image in images[:, 0]:
        p, q, radius, grey, spot = torch.rand(5, generator=generator).tolist()
        away = (x - 0.4 * p + 0.2) ** 2 + (y - 0.4 * q + 0.2) ** 2
        image[away < (0.4 + 0.3 * radius) ** 2] = 0.5 + 0.5 * grey
        image[away < (0.1 + 0.1 * radius) ** 2] = spot
    return images


@pytest.mark.many
@pytest.mark.parametrize("n", [3, 18, 40])
@pytest.mark.parametrize("amount", [0.5, 0.1])
def test_images_of_a_few_grey_values(n: int, amount: float) -> None:
    """Check that the same rounding at thousands of pixels, which does not average out, is avoided."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        a = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU(), nn.Conv2d(16, 16, 3))
        x = shapes(n, 64)
        with torch.no_grad():
            for _ in range(20):
                a.train()(x)
        a.eval()
        b = copy.deepcopy(a)
        with torch.no_grad():
            for tensor in b.parameters():
                tensor.mul_(1 + amount * torch.randn_like(tensor))
    u, v = (features(copy.deepcopy(model).double(), x.double()) for model in (a, b))
    for name, value in layerwise_cka(a, b, x.split(8)).items():
        assert value.dissimilarity == pytest.approx(reference_dissimilarity(u[name], v[name], "biased"), rel=5e-5), name


@pytest.mark.parametrize("size", [1e30, 1e37, 1e40, 1e200, math.inf, math.nan])
def test_very_large_features(size: float, vectors: Tensor) -> None:
    """Check models in float64: a value as long as float32 holds the features, then NaN."""
    a, b = mlp(seed=0).double(), mlp(seed=1).double()
    with torch.no_grad():
        for model in (a, b):
            model[2].weight.mul_(size)
            model[2].bias.mul_(size)
    found = layerwise_cka(a, b, vectors.double().split(4))
    plain = layerwise_cka(mlp(seed=0).double(), mlp(seed=1).double(), vectors.double().split(4))
    assert found["0"] == plain["0"]
    if size < 1e38:
        assert found["2"].dissimilarity == pytest.approx(plain["2"].dissimilarity, rel=1e-5)
    else:
        assert math.isnan(found["2"].delta)


@pytest.mark.parametrize("memory", [0, 2**30])
@pytest.mark.parametrize("width", [0, 1, 7, 10, 23])
def test_rows_are_read_back_as_they_came(
    width: int, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerwise, "BLOCK", 5)
    a, b = torch.randn(2, 9, width, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-4, 5)[:, None]
    u = a - a[:1]
    with closing(stored.Store(memory, tmp_path)) as store:
        rows = {name: layerwise._Rows(name, store) for name in ("other", "layer")}
        for _ in range(2):  # the second time where the first was
            for start, stop in ((0, 4), (4, 5), (5, 9)):
                rows["other"].add(a[start:stop] + 1, b[start:stop])
                rows["layer"].add(a[start:stop], b[start:stop])
            assert rows["layer"].far == (width > 0), "the two are nothing like each other"
            given = torch.stack([u, b - b[:1]])
            assert store.bytes_in_file + store.bytes_in_memory == 2 * given.nbytes
            assert (store.bytes_in_file > 0) == (memory == 0 and width > 0)
            found = [torch.cat([block() for block in blocks], dim=2) for blocks in rows["layer"].pieces if blocks]
            assert torch.equal(torch.cat(found, dim=1), given) if width else not found
            store.clear()
            for row in rows.values():
                row.clear()


@pytest.mark.parametrize("factor", [1e-25, 1e-9, 1e9, 1e25])
def test_models_of_different_size(factor: float, vectors: Tensor) -> None:
    a, b = mlp(seed=0), mlp(seed=1)
    expected = layerwise_cka(a, b, vectors.split(4))
    with torch.no_grad():
        b[2].weight.mul_(factor)
        b[2].bias.mul_(factor)
    for result in (layerwise_cka(a, b, vectors.split(4)), layerwise_cka(b, a, vectors.split(4))):
        for name in ("0", "2"):
            assert result[name].dissimilarity == pytest.approx(expected[name].dissimilarity, rel=1e-5)


def test_the_form_of_the_rows_is_chosen_before_any_are_kept(tmp_path: Path) -> None:
    """Check a later batch of a minibatch estimator, whose first row may not be the first image's."""
    a, b = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(0))
    b[:7] = b[0]  # so that nothing is known of b's scale in the first batch, nor with the first row of the second one
    with closing(stored.Store(2**20, tmp_path)) as store:
        rows = layerwise._Rows("layer", store)
        for start, stop in ((0, 6), (6, 7), (7, 12)):
            if start == 6:
                rows.clear()
            rows.add(a[start:stop], b[start:stop])
        k, e = rows.grams()["layer"]
    x, y = (values - values.mean(0) for values in (a[6:].double(), b[6:].double()))
    assert torch.allclose(k, x @ x.T, rtol=1e-5, atol=1e-6)
    assert torch.allclose(k - e, (rows.scale or 1.0) ** 2 * y @ y.T, rtol=1e-4, atol=1e-5)


def test_small_features_beside_much_smaller_ones() -> None:
    """Check features whose squares vanish in float32."""
    x, networks = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(0)), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        networks.append(nn.Sequential(nn.Conv2d(3, 5, 3, bias=False)))
    expected = layerwise_cka(*networks, x.split(7))["0"].dissimilarity
    for network, factor in zip(networks, (1e-5, 1e-22), strict=True):
        network[0].weight.data.mul_(factor)
    for result in (layerwise_cka(*networks, x.split(7)), layerwise_cka(*networks[::-1], x.split(7))):
        assert result["0"].dissimilarity == pytest.approx(expected, rel=1e-5)


class Gate(nn.Module):
    """Pass on only values above a threshold; it is a layer because it has a parameter."""

    def __init__(self, factor: float, threshold: float) -> None:
        super().__init__()
        self.factor, self.threshold = nn.Parameter(torch.tensor(factor)), threshold

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * torch.relu(x - self.threshold)


def of_batches(u: np.ndarray, v: np.ndarray, size: int) -> float:
    """Compute 1 - delta by the quotient of sums of biased HSIC."""
    return 1 - reference_sums(((u[k : k + size], v[k : k + size]) for k in range(0, len(u), size)), "biased")


@pytest.mark.parametrize("images", [1, 4, 16], ids="pieces of {}".format)
@pytest.mark.parametrize("silent", ["model_a", "model_b"])
@pytest.mark.parametrize("bright", ["last", "first"])
def test_a_model_that_is_silent_for_some_images(
    silent: str, bright: str, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that its scale is unknown while it is silent; a batch that it is silent for counts, too."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(8, 6), 2 + torch.rand(8, 6)])
    x = x if bright == "last" else x.flip(0)
    models = [Gate(1.0, 1.0), Gate(50.0, 0.0)][:: 1 if silent == "model_a" else -1]
    u, v = (model(x).detach().double().numpy() for model in models)
    monkeypatch.setattr(joint_pass, "HELD_BYTES", images * 4 * u[0].size)
    whole = layerwise_cka(*models, x.split(4))[""].dissimilarity
    assert whole == pytest.approx(of_batches(u, v, 16), rel=1e-5)
    parts = layerwise_cka(*models, x.split(8), estimator="minibatch_biased")[""].dissimilarity
    assert parts == pytest.approx(of_batches(u, v, 8), rel=1e-5)


@pytest.mark.parametrize("little", [1e-2, 1e-4])
def test_first_images_that_move_one_model_much_more(little: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that such images do not determine how large the features of all images are."""
    torch.manual_seed(0)
    x = torch.randn(30, 50)
    x[:, 0] = 0
    x[1], x[2] = x[0], x[0]
    x[1, 0], x[2, 0] = 1.0, 0.5
    a, b = nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False)
    with torch.no_grad():
        b.weight.copy_(a.weight + 0.01 * torch.randn(50, 50) / 7)
        b.weight[:, 0] = a.weight[:, 0]
        a.weight[:, 0] *= little
    u, v = (model(x.double()).detach().numpy() for model in (a.double(), b.double()))
    monkeypatch.setattr(joint_pass, "HELD_BYTES", 2 * 4 * 50)  # pieces of two
    found = layerwise_cka(a.float(), b.float(), x.split(5))[""].dissimilarity
    assert found == pytest.approx(reference_dissimilarity(u, v, "biased"), rel=1e-4)


def test_a_layer_with_one_number_for_an_image(vectors: Tensor) -> None:
    class Score(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze(1)

    torch.manual_seed(0)
    a, b = Score(5, 1), Score(5, 1)
    u, v = (model(vectors).detach().double().numpy()[:, None] for model in (a, b))
    assert layerwise_cka(a, b, vectors.split(4))[""].dissimilarity == pytest.approx(of_batches(u, v, 12), rel=1e-5)
    cosines = np.sign(u * v)
    assert layerwise_cosine(a, b, vectors.split(4))[""].delta == pytest.approx(float(cosines.mean()), abs=1e-6)


@pytest.mark.parametrize("memory", [0, 300])
def test_features_are_float32_whatever_torch_makes_by_itself(memory: int, vectors: Tensor) -> None:
    models = mlp(seed=0), mlp(seed=1)
    expected = layerwise_cka(*models, vectors.split(4))
    torch.set_default_dtype(torch.float64)
    try:
        assert layerwise_cka(*models, vectors.split(4), memory=memory) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_layer_without_features(vectors: Tensor) -> None:
    assert layerwise_cka(Columns(0, 0), Columns(0, 0), [vectors])[""] == (1.0, 0.0)


# --- mini-batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("estimator", "sizes"), [("unbiased", [5, 7]), ("biased", [5, 5, 2])])
def test_small_batches_join_the_one_before(estimator: str, sizes: list[int], vectors: Tensor) -> None:
    a, b = mlp(seed=0), mlp(seed=1)
    u, v = features(a, vectors), features(b, vectors)
    result = layerwise_cka(a, b, vectors.split([5, 5, 2]), estimator=f"minibatch_{estimator}")
    for name, value in result.items():
        parts = np.split(np.arange(12), np.cumsum(sizes)[:-1])
        assert value.delta == pytest.approx(
            reference_sums(((u[name][p], v[name][p]) for p in parts), estimator), rel=1e-4
        )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_few_images(estimator: str, vectors: Tensor) -> None:
    a, b = mlp(seed=0), mlp(seed=1)
    for batches in ([], [vectors[:0]]):
        with pytest.raises(ValueError, match="the batches hold no image"):
            layerwise_cka(a, b, batches, estimator=estimator)
    result = layerwise_cka(a, b, [vectors[:1]], estimator=estimator)
    assert list(result) == ["0", "2"]
    assert all(math.isnan(value) for pair in result.values() for value in pair)
    for n in (2, 3):
        result = layerwise_cka(a, b, vectors[:n].split(1), estimator=estimator)
        whole = layerwise_cka(a, b, [vectors[:n]])
        for name, value in result.items():
            assert value.delta == pytest.approx(whole[name].delta, rel=1e-6)


# --- layers without a score -------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self, *, dead: bool = False, broken: bool = False) -> None:
        super().__init__()
        self.twice = nn.Linear(5, 5)
        self.unreached = nn.Linear(5, 5)
        self.dead = nn.Linear(5, 4)
        self.out = nn.Linear(5, 2)
        with torch.no_grad():
            if dead:
                self.dead.weight.zero_()
            if broken:
                self.out.weight.fill_(math.inf)

    def forward(self, x: Tensor) -> Tensor:
        y = self.twice(self.twice(x).tanh())
        return self.out(y) + self.dead(y).sum()


def odd(seed: int, **kwargs: bool) -> Odd:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Odd(**kwargs)


def test_a_layer_called_twice_counts_with_its_last_call(vectors: Tensor) -> None:
    a, b = odd(0), odd(1)
    u, v = features(a, vectors), features(b, vectors)
    result = layerwise_cka(a, b, vectors.split(5))
    assert result["twice"].dissimilarity == pytest.approx(
        reference_dissimilarity(u["twice"], v["twice"], "biased"), rel=1e-5
    )


def test_unreached_dead_and_broken_layers(vectors: Tensor) -> None:
    result = layerwise_cka(odd(0, dead=True), odd(1, dead=True), vectors.split(5))
    assert math.isnan(result["unreached"].delta)
    assert result["dead"] == (1.0, 0.0)
    assert 0 < result["out"].delta < 1
    for flags in ((True, False), (False, True)):
        result = layerwise_cka(odd(0, dead=flags[0]), odd(1, dead=flags[1]), vectors.split(5))
        assert math.isnan(result["dead"].delta)
        assert math.isnan(result["dead"].dissimilarity)
    result = layerwise_cka(odd(0), odd(1, broken=True), vectors.split(5))
    assert math.isnan(result["out"].delta)
    assert 0 < result["dead"].delta < 1


def test_not_finite_images_late_in_the_data(vectors: Tensor) -> None:
    vectors[9, 0] = math.nan
    assert all(math.isnan(value.delta) for value in layerwise_cka(odd(0), odd(1), vectors.split(5)).values())


class Transposed(nn.Module):
    """Define layer "0" with images second, "1" without a tensor, and "2", called once more by one model."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.calls = calls
        self.layers = nn.ModuleList([Swap(5, 5), Named(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None] * torch.ones(3, 1)
        x = self.layers[1](self.layers[0](x).swapaxes(0, 1))["x"]
        for _ in range(self.calls):
            x = self.layers[2](x)
        return self.layers[3](x)


class Swap(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).swapaxes(0, 1)


class Named(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"x": super().forward(x)}


@pytest.mark.parametrize("function", [layerwise_cka, layerwise_cosine])
def test_layers_that_cannot_be_compared(function: Any, vectors: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    a, b = Transposed(), Transposed(calls=2)
    for sizes in ([5, 5, 2], [3, 3, 3, 3]):  # as many images as positions: the first alone shows it
        caplog.clear()
        for models in ((a, b), (b, a)):
            result = function(*models, vectors.split(sizes))
            missing = [name for name, value in result.items() if all(map(math.isnan, value))]
            assert missing == ["layers.1", "layers.2"]
            assert -1 <= result["layers.3"].delta <= 1
        assert len(caplog.records) == 2  # one for each call
        for part in ("'layers.1': its output holds no tensor", "1 times in model_a"):
            assert part in caplog.messages[0]
    only = "'layers.1': its output holds no tensor"
    with pytest.raises(ValueError, match=only):
        function(a, b, [vectors], layers=["layers.1"])
    with pytest.raises(ValueError, match="layer 'unreached': called for 0 of 12"):
        function(odd(0), odd(1), [vectors], layers=["unreached"])


def test_a_transformer_with_positions_first(vectors: Tensor) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=False)
            self.out = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, :, None].expand(-1, -1, 8).swapaxes(0, 1)  # (positions, images, 8)
            return self.out(self.encoder(x).mean(0))

    torch.manual_seed(0)
    a, b = Words(), Words()
    result = layerwise_cka(a, b, vectors.split(5))
    u, v = features(a, vectors), features(b, vectors)
    missing = [name for name, value in result.items() if math.isnan(value.dissimilarity)]
    assert missing == ["encoder.self_attn.out_proj"]  # never called
    for name in set(result) - set(missing):
        expected = reference_dissimilarity(u[name], v[name], "biased")
        assert result[name].dissimilarity == pytest.approx(expected, rel=1e-4, abs=1e-13), name


@pytest.mark.parametrize("n", [2, 5])
def test_positions_first_beside_a_norm_that_looks_at_the_batch(n: int) -> None:
    """Check a batch of as many images as positions, whose shape is ambiguous."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(n, track_running_stats=False)
            self.words = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)[:, :, None] * torch.tensor([1.0, 2.0, -1.0])
            return self.words(y.swapaxes(0, 1)).tanh().sum((0, 2))

    torch.manual_seed(0)
    x, a, b = torch.randn(5, n), Words().eval(), Words().eval()
    found = layerwise_cka(a, b, [x])["words"].dissimilarity
    u, v = ((m.words.weight @ (torch.tensor([1.0, 2.0, -1.0])[:, None] * m.norm(x).flatten()[None])) for m in (a, b))
    u, v = (f.detach().reshape(4, 5, n).permute(1, 2, 0).flatten(1).double().numpy() for f in (u, v))
    assert found == pytest.approx(reference_dissimilarity(u, v, "biased"), rel=1e-4)


class Rows(nn.Module):
    """Return features as a batch of rows, image by image or position by position; and a layer without images."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.together = together
        self.rows = nn.Linear(1, 4)
        self.fixed = nn.Linear(1, 1)
        self.out = nn.Linear(5 * 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        if self.together:
            y = self.rows(x.reshape(-1, 1)).reshape(n, -1)
        else:
            y = self.rows(x.T.reshape(-1, 1)).reshape(5, n, 4).swapaxes(0, 1).reshape(n, -1)
        return self.out(y) + self.fixed(torch.ones(3, 1)).sum()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("function", [layerwise_cka, layerwise_cosine])
def test_several_rows_of_an_image_are_its_features(
    function: Any, together: bool, vectors: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that both orders are the same network."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(Rows(together))
    result = function(*models, vectors.split(5))
    assert [name for name, value in result.items() if math.isnan(value.delta)] == ["fixed"]
    assert "'fixed': the 1 images are no dimension of its output, which has shape (3, 1)" in caplog.text
    if function is layerwise_cka:
        u, v = (features(model, vectors) for model in models)
        assert result["rows"].dissimilarity == pytest.approx(
            reference_dissimilarity(u["rows"], v["rows"], "biased"), rel=1e-4
        )


def test_a_swin_transformer() -> None:
    """Check attention on windows; an image's features are those of all its windows."""
    pytest.importorskip("einops")
    torch.manual_seed(0)
    net = SwinUNETR(in_channels=1, out_channels=1, feature_size=12, spatial_dims=2, depths=(1, 1, 1, 1))
    other, images = perturbed(net, 0.01), smooth_images(5, 64)
    result = layerwise_cka(net, other, images.split(2))
    assert not [name for name, value in result.items() if math.isnan(value.dissimilarity)]
    u, v = features(net, images), features(other, images)
    for name in ("swinViT.layers1.0.blocks.0.attn.qkv", "swinViT.layers2.0.blocks.0.attn", "out.conv.conv"):
        expected = reference_dissimilarity(u[name], v[name], "biased")
        assert result[name].dissimilarity == pytest.approx(expected, rel=1e-3), name


@pytest.mark.parametrize("setting", ["full_biased", "full_unbiased", "minibatch_biased", "minibatch_unbiased"])
def test_a_site_reports_the_estimator_that_is_set(setting: str, vectors: Tensor) -> None:
    kind, _, formula = setting.partition("_")
    a, b = mlp(seed=0), mlp(seed=1)
    data = SimpleNamespace(
        batches=lambda split, batch_size, shuffle_seed=None: ((x, None) for x in vectors.split(batch_size)),
        num_samples=lambda split: len(vectors),
    )
    run: Any = SimpleNamespace(data=data, device="cpu", seed=0, scratch=None, sent=None)
    site = LayerSimilarityReport(cka_estimator=setting, cka_batch_size=6, cka_passes=1)
    report = site.report_anchor(run, a, b)
    u, v = features(a, vectors), features(b, vectors)
    for name, delta in zip(report["layers"], report["cka"], strict=True):
        parts = np.split(np.arange(12), 1 if kind == "full" else 2)
        assert delta == pytest.approx(reference_sums(((u[name][p], v[name][p]) for p in parts), formula), rel=1e-5)


# --- batch norms that are known from the layer in front ---------------------------------------------------


def rescaled(model: nn.Module, change: float) -> nn.Module:
    """Return convolution 0 with scales for its channels, which norm 1 takes back, and changed weights."""
    other = perturbed(model, 0.0)
    factors = torch.tensor([0.1, 10.0, -3.0, 1.0, 0.3, 7.0, 1.0, -0.2], dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        weight = other[0].weight
        weight.mul_(1 + change * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        for tensor in (weight, other[0].bias, other[1].running_mean):
            tensor.mul_(factors.view(-1, *[1] * (tensor.ndim - 1)))
        other[1].running_var.add_(other[1].eps).mul_(factors.square()).sub_(other[1].eps)
        other[1].weight.mul_(factors.sign())
    return other


def without_channels(model: nn.Module) -> nn.Module:
    other = perturbed(model, 0.05)
    with torch.no_grad():
        other[1].weight[:3] = 0
    return other


def without_factors(model: nn.Module) -> nn.Module:
    other = perturbed(model, 0.05)
    other[1].weight = other[1].bias = None
    return other


NORMS = {
    "near": (lambda a: a, lambda a: perturbed(a, 0.02)),
    "far": (lambda a: a, lambda a: wide(1)),
    "silent channels": (without_channels, lambda a: perturbed(a, 0.05)),
    "no factors": (without_factors, without_factors),
    "scales of channels": (lambda a: a, lambda a: rescaled(a, 0.3)),
    "scales of channels, near": (lambda a: a, lambda a: rescaled(a, 0.03)),
}


@pytest.mark.many
@pytest.mark.parametrize(("block", "by"), [(500, "torch"), (500, "oneDNN"), (8000, "oneDNN"), (10**6, "torch")])
@pytest.mark.parametrize("case", NORMS)
def test_a_norm_is_known_from_the_layer_in_front(
    case: str, block: int, by: str, stores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check parts of channels, some channels and all at a time; nothing of the norm is stored."""
    monkeypatch.setattr(layerwise, "BLOCK", block)
    monkeypatch.setattr(products, "STRIP", 3)
    monkeypatch.setattr(products, "LARGE", 1)
    if by == "torch":
        monkeypatch.setattr(products, "_onednn", lambda: None)
    elif products._onednn() is None:
        pytest.skip("this PyTorch has no products of oneDNN")
    a, b = (change(wide(0)) for change in NORMS[case])
    x = smooth_images(18, 64).double()
    u, v = features(a, x), features(b, x)
    for estimator in FULL:
        found = layerwise_cka(a, b, x.split(7), estimator=estimator)
        for name, value in found.items():
            expected = reference_dissimilarity(u[name], v[name], estimator)
            assert value.dissimilarity == pytest.approx(expected, rel=1e-4, abs=1e-13), name
    assert stores[-1].peak == 2 * 8 * 18 * 2**15
    sums = layerwise_cka(a, b, x.split(9), estimator="minibatch_biased")
    for name, value in sums.items():
        assert value.dissimilarity == pytest.approx(of_batches(u[name], v[name], 9), rel=1e-4, abs=1e-13), name


def test_a_norm_has_the_same_bits_whichever_layers_are_asked_for(stores: list[Any]) -> None:
    """Check also a frozen layer before it that does not travel, and is not asked for."""
    a, b = (change(wide(0)) for change in NORMS[next(iter(NORMS))])
    x = smooth_images(18, 64).double()
    among = layerwise_cka(a, b, x.split(7))
    (norms,) = [[name for name, module in a.named_modules() if isinstance(module, nn.BatchNorm2d)]]
    assert norms
    for name in norms:
        assert layerwise_cka(a, b, x.split(7), layers=[name]) == {name: among[name]}
        assert stores[-1].peak <= stores[0].peak


def test_norms_without_a_change() -> None:
    a, x = wide(0), smooth_images(6, 64).double()
    dead = copy.deepcopy(a)
    with torch.no_grad():
        dead[1].weight.zero_()
    assert layerwise_cka(dead, dead, x.split(4))["1"] == (1.0, 0.0)
    for pair in ((a, dead), (dead, a)):
        found = layerwise_cka(*pair, x.split(4))
        assert math.isnan(found["1"].delta)
        assert found["0"] == (1.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "difference", "terms", "enough"),
    [
        ([1.0, 1, 1, 1], 1.0, 100.0, True),
        ([1.0, 1, 1, 1], 1.0, 200.0, False),  # 200 roundings of 2**-23 are more than 2e-5
        ([1.0, 1, 1, 1], 0.0, 0.0, True),
        ([1.0, 0.1, 0.1, 0.1], 1.0, 1.0, False),  # one image is nearly all
        ([1e-30, 1e-30, 1e-30, 1e-30], 1e-30, 1e-30, False),
        ([math.nan, 1, 1, 1], 1.0, 1.0, False),
    ],
)
def test_when_float32_is_enough(rows: list[float], difference: float, terms: float, enough: bool) -> None:
    k, e = torch.diag(torch.tensor(rows).double()), torch.zeros(4, 4).double()
    e[0, 1] = difference
    assert layerwise._precise(k, e, torch.tensor(terms).double()) is enough


def test_a_difference_that_only_scales_is_none() -> None:
    """Check that CKA does not change by scale, only by the part across it."""
    k = torch.eye(4).double()
    e = 0.5 * k
    e[0, 1] = 1e-3
    assert not layerwise._precise(k, e, torch.tensor(1.0).double())
    assert layerwise._precise(k, e, torch.tensor(0.1).double())


class Between(nn.Module):
    """Define a convolution, another module, and a norm of its output."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.norm.running_mean += torch.arange(4.0)
        if what == "hook":
            self.norm.register_forward_hook(lambda module, args, output: output.sin())
        if what == "late hook":
            self.norm.register_forward_hook(lambda module, args, output: output.sin() if self.late else output)
        if what == "hook in front":
            self.norm.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
        if what == "variance below 0":
            self.norm.running_var[0] = -1
        if what == "own forward":
            self.norm.forward = lambda x: x.sin()  # type: ignore[method-assign]

    def train(self, mode: bool = True) -> Between:
        super().train(mode)
        self.norm.train(mode or self.what == "training")
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode() if self.what == "inference" else nullcontext():
            y = self.conv(x)
            if self.what == "inference":
                y.relu_()
        self.late = bool(x.mean() > 0)
        if self.what == "data" or (self.what == "late data" and self.late):
            y.data.relu_()
        if self.what == "in place":
            y.relu_()
        if self.what == "twice":
            self.norm(self.conv(x + 1))
            return self.norm(y) + self.norm(2 * y)
        if self.what == "behind":
            return self.norm(y) + self.conv(x * x)
        if self.what == "late" and x.mean() > 0:
            y = y * 2
        return self.norm(y * 1 if self.what == "other tensor" else y)


@pytest.mark.parametrize(
    "what",
    ["nothing", "in place", "twice", "behind", "other tensor", "small", "inference", "data", "hook", "hook in front",
     "own forward"],
)  # fmt: skip
def test_a_norm_of_something_else_is_kept(what: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 1, *((9, 9) if what == "small" else (12, 12)))
    a, b = Between(what).eval(), Between(what).eval()
    with joint_pass.JointPass(a, b, None, layerwise.LEAST_PIXELS) as joint:
        joint.run(x[:1], lambda name, a, b: None)
        assert joint.scaled == ({"norm": "conv"} if what == "nothing" else {})
    u, v = features(a.double(), x.double()), features(b.double(), x.double())
    for name, value in layerwise_cka(a.float(), b.float(), x.split(5)).items():
        expected = reference_dissimilarity(u[name], v[name], "biased")
        assert value.dissimilarity == pytest.approx(expected, rel=1e-4), name


def test_what_only_later_images_meet_is_seen() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 1, 12, 12)
    x = torch.cat([x[:1] - 10, x[1:] + 10])
    written = layerwise_cka(Between("late data"), Between("late data"), x.split(4))
    assert math.isnan(written["norm"].delta)
    a, b = Between("late hook").eval(), Between("late hook").eval()
    found = layerwise_cka(a, b, x.split(4))["norm"].dissimilarity
    u, v = features(a.double(), x.double())["norm"], features(b.double(), x.double())["norm"]
    assert found == pytest.approx(reference_dissimilarity(u, v, "biased"), rel=1e-4)


def test_a_norm_that_looks_at_the_batch_sees_those_that_came() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 1, 12, 12) + torch.arange(12.0)[:, None, None, None]
    a, b = Between("training").eval(), Between("training").eval()
    found = layerwise_cka(a, b, x.split(4))["norm"].dissimilarity
    u, v = (
        torch.cat([m.norm(m.conv(s)).detach().flatten(1) for s in x.double().split(4)]).numpy()
        for m in (a.double(), b.double())
    )
    assert found == pytest.approx(reference_dissimilarity(u, v, "biased"), rel=1e-4)


def test_a_norm_without_a_root_has_no_features() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 1, 12, 12)
    a, b = Between("variance below 0").eval(), Between("variance below 0").eval()
    found = layerwise_cka(a, b, x.split(5))
    assert math.isnan(found["norm"].delta)
    assert 0 < found["conv"].delta < 1


def test_half_precision_is_rounded_behind_the_norm() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 1, 12, 12).bfloat16()
    a = Between("nothing").bfloat16().eval()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.conv.weight += 0.002 * torch.randn(4, 1, 3, 3)
    found = layerwise_cka(a, b, x.split(5))["norm"].dissimilarity
    u, v = (m.norm(m.conv(x)).detach().flatten(1).double().numpy() for m in (a, b))
    assert found == pytest.approx(1 - reference_cka(u, v, "biased"), rel=1e-4)


def test_a_norm_whose_input_becomes_another(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    a, b = Between("late"), Between("late")
    x = torch.randn(12, 1, 12, 12)
    x = torch.cat([x[:1] - 10, x[1:] + 10])
    found = layerwise_cka(a, b, x.split(4))
    assert math.isnan(found["norm"].delta)
    assert found["conv"].delta < 1
    assert "layer 'norm': its input is not what layer 'conv' gave, as it was at first" in caplog.text


# --- several passes ---------------------------------------------------------------------------------------


class Counted:
    """Count how often a site's data are gone through."""

    def __init__(self, images: Tensor) -> None:
        self.images, self.passes = images, 0

    def num_samples(self, split: str) -> int:
        return len(self.images)

    def batches(self, split: str, batch_size: int, shuffle_seed: int | None = None) -> Iterator[tuple[Tensor, None]]:
        self.passes += 1
        order = torch.arange(len(self.images))
        if shuffle_seed is not None:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(shuffle_seed))
        yield from ((self.images[part], None) for part in order.split(batch_size))


def passes_report(models: tuple[nn.Module, nn.Module], data: Counted, **given: Any) -> dict[str, float]:
    """Return a site's 1 - delta from three passes in batches of 5."""
    run: Any = SimpleNamespace(
        site="north", data=data, device="cpu", seed=7, scratch=None, sent=None
    )  # fmt: skip
    half = LayerSimilarityReport(preset="authors", **{"cka_batch_size": 5, "cka_passes": 3, **given})
    report = half.report_anchor(run, *models)
    return dict(zip(report["layers"], report["dissimilarity"], strict=True))


def passes_reference(models: tuple[nn.Module, nn.Module], images: Tensor, batches: list[list[int]]) -> dict[str, float]:
    u, v = (features(model, images) for model in models)
    return {n: 1 - reference_sums(((u[n][rows], v[n][rows]) for rows in batches), "unbiased") for n in u}


def three_passes(images: int) -> list[list[int]]:
    """Return batches of 5, of which the last may have up to 8."""
    cut = []
    for seed in (7, 8, 9):
        order = torch.randperm(images, generator=torch.Generator().manual_seed(seed)).tolist()
        starts = range(0, max(images - 3, 1), 5)
        cut += [order[start : start + 5 if start != starts[-1] else None] for start in starts]
    return cut


def test_every_pass_reads_the_images(vectors: Tensor) -> None:
    models, data = (mlp(seed=0), mlp(seed=1)), Counted(vectors)
    assert sorted(map(len, three_passes(12))) == [5, 5, 5, 7, 7, 7]
    expected = passes_reference(models, vectors, three_passes(12))
    assert passes_report(models, data) == pytest.approx(expected, rel=1e-5)
    assert data.passes == 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_batch_of_a_pass_is_too_small(size: int, vectors: Tensor) -> None:
    """Check batches of four at least, for any request, and that no batch holds an image twice."""
    models = mlp(seed=0), mlp(seed=1)
    seeds = [torch.Generator().manual_seed(seed) for seed in (7, 8, 9)]
    batches = [part.tolist() for seed in seeds for part in torch.randperm(12, generator=seed).split(4)]
    found = passes_report(models, Counted(vectors), cka_batch_size=size)
    assert found == pytest.approx(passes_reference(models, vectors, batches), rel=1e-5)


class OneByOne(Counted):
    """Return images one by one, as a bundle's validation may, whatever is asked for."""

    def batches(self, split: str, batch_size: int, shuffle_seed: int | None = None) -> Iterator[tuple[Tensor, None]]:
        yield from super().batches(split, 1, shuffle_seed)


def test_batches_are_those_of_the_setting(vectors: Tensor) -> None:
    models = mlp(seed=0), mlp(seed=1)
    expected = passes_reference(models, vectors, three_passes(12))
    assert passes_report(models, OneByOne(vectors)) == pytest.approx(expected, rel=1e-5)


class InOrder(Counted):
    """Number the images in order."""

    def order(self, split: str, shuffle_seed: int) -> list[int] | None:
        return torch.randperm(len(self.images), generator=torch.Generator().manual_seed(shuffle_seed)).tolist()


def test_a_choice_of_many_images_is_shuffled_for_each_pass(
    vectors: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models, data = (mlp(seed=0), mlp(seed=1)), InOrder(vectors)
    chosen = set(torch.randperm(12, generator=torch.Generator().manual_seed(0))[:9].tolist())
    batches = []
    for order in ([i for i in data.order("", seed) or [] if i in chosen] for seed in (7, 8, 9)):
        batches += [order[:5], order[5:]]
    expected = passes_reference(models, vectors, batches)
    assert passes_report(models, data, cka_max_samples=9) == pytest.approx(expected, rel=1e-5)
    assert data.passes == 3
    assert not caplog.text
    monkeypatch.setattr(data, "order", lambda split, seed: None)  # then nobody knows which are the chosen ones
    rows = sorted(chosen)
    expected = passes_reference(models, vectors, [rows[:5], rows[5:]])
    assert passes_report(models, data, cka_max_samples=9) == pytest.approx(expected, rel=1e-5)
    assert data.passes == 4
    assert "site north: one pass in place of cka_passes=3" in caplog.text


def test_features_that_depend_on_the_batch_are_made_for_each_pass() -> None:
    torch.manual_seed(0)
    convs = [nn.Conv2d(1, 3, 3) for _ in range(2)]
    models = tuple(nn.Sequential(conv, nn.BatchNorm2d(3, track_running_stats=False)).eval() for conv in convs)
    data = Counted(torch.randn(10, 1, 6, 6))
    report = passes_report(models, data)  # type: ignore[arg-type]
    assert data.passes == 3
    for name, wanted in (("0", convs), ("1", models)):
        with torch.no_grad():
            made = [
                [model(data.images[rows]).flatten(1).double().numpy() for model in wanted] for rows in three_passes(10)
            ]
        assert report[name] == pytest.approx(1 - reference_sums(made, "unbiased"), rel=1e-4)  # type: ignore[arg-type]


def test_three_images_in_several_passes_are_three_images(vectors: Tensor) -> None:
    """Check that three images do not count as fifteen, of which the unbiased estimator would find many alike."""
    models = mlp(seed=0), mlp(seed=1)
    u, v = (features(model, vectors[:3]) for model in models)
    report = passes_report(models, Counted(vectors[:3]), cka_passes=5)
    for name, value in report.items():
        assert value == pytest.approx(reference_dissimilarity(u[name], v[name], "biased"), rel=1e-5)


# --- nothing is left behind -------------------------------------------------------------------------------


def state_of(model: nn.Module) -> list[Any]:
    modes = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return [modes, [t.clone() for t in model.state_dict().values()]]


def assert_same(before: list[Any], after: list[Any]) -> None:
    assert before[0] == after[0]
    assert all(torch.equal(x, y) for x, y in zip(before[1], after[1], strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_models_and_scratch_folder_as_before(fails: bool, images: Tensor, tmp_path: Path) -> None:
    a, b = unet(0, images[:2]), unet(1, images[:2])
    a.train()
    a.conv_0.eval()
    b.eval()
    before = [state_of(m) for m in (a, b)]
    gradients = torch.is_grad_enabled()

    def batches() -> Iterator[Tensor]:
        yield from images[:6].split(2)
        if fails:
            raise RuntimeError("lost the disk")

    for call in (
        lambda: layerwise_cka(a, b, batches(), memory=0, scratch=tmp_path),
        lambda: layerwise_cosine(a, b, batches()),
    ):
        if fails:
            with pytest.raises(RuntimeError, match="lost the disk"):
                call()
        else:
            assert all(-1 <= value.delta <= 1 for value in call().values())
        assert torch.is_grad_enabled() == gradients
        for model, state in zip((a, b), before, strict=True):
            assert_same(state, state_of(model))
    assert not list(tmp_path.iterdir())


def test_full_scratch_folder(
    pairs: dict[str, tuple[nn.Module, nn.Module]], images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [state_of(m) for m in pairs["near"]]
    monkeypatch.setattr(stored.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**5))
    for told in ({}, {"expected": len(images)}):
        read: list[Tensor] = []
        batches = (read.append(image) or image for image in images.split(1))
        with pytest.raises(OSError, match=r"bytes needed, 100000 available") as caught:
            layerwise_cka(*pairs["near"], batches, memory=2**18, scratch=tmp_path, **told)
        assert str(tmp_path) in str(caught.value)
        assert len(read) == (1 if told else len(images))
        for model, state in zip(pairs["near"], before, strict=True):
            assert_same(state, state_of(model))
    layerwise_cka(*pairs["near"], images.split(6), memory=2**30, scratch=tmp_path)  # needs no scratch


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_scratch_disk_that_fills_up_is_named_at_once(tmp_path: Path) -> None:
    """Write so little that it would stay in the file's buffer until the values are read."""
    with closing(stored.Store(0, tmp_path)) as store:
        with Path("/dev/full").open("wb") as full, pytest.raises(OSError, match=r"too small .*: 12 bytes needed"):  # noqa: PT012
            store._file = full
            try:
                store.keep(torch.ones(3))
            finally:
                full.raw.close()
        store._file = None


class Watching(nn.Linear):
    """Record the allowed precision while the model runs."""

    seen: list[tuple[Any, ...]]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(precision())
        return super().forward(x)


def precision() -> tuple[Any, ...]:
    backends = torch.backends
    return torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32, torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("function", [layerwise_cka, layerwise_cosine])
def test_features_are_compared_in_full_precision(function: Any, vectors: Tensor) -> None:
    Watching.seen = []
    a, b = Watching(5, 5), Watching(5, 5)
    expected = function(a, b, [vectors])
    before = precision()
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = True
    try:
        allowed = precision()
        assert allowed == ("medium", True, False)
        with torch.autocast("cpu"):
            assert function(a, b, [vectors]) == expected
        assert precision() == allowed
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
    assert set(Watching.seen) == {("highest", False, False)}


@pytest.mark.long
@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="switches of torch 2.9")
def test_full_precision_with_the_newer_switches() -> None:
    """Check the newer switches in a process of their own, as reading the older ones besides would raise."""
    code = """if True:
        import torch
        from torch import nn
        from fairflare.core.similarity import layerwise_cka
        backends, seen = torch.backends, []
        parts = backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul, backends.mkldnn.matmul
        for part, value in zip(parts, ("tf32", "ieee", "tf32", "bf16")):
            part.fp32_precision = value
        before = [part.fp32_precision for part in parts]
        class Watching(nn.Linear):
            def forward(self, x):
                seen.extend(part.fp32_precision for part in parts)
                return super().forward(x)
        layerwise_cka(Watching(5, 5), Watching(5, 5), [torch.randn(6, 5)])
        assert set(seen) == {"ieee"}, seen
        assert before == [part.fp32_precision for part in parts] == ["tf32", "ieee", "tf32", "bf16"]
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- errors -----------------------------------------------------------------------------------------------


class Fold(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(0)


@pytest.mark.parametrize("function", [layerwise_cka, layerwise_cosine])
def test_errors_name_the_layer(function: Callable[..., Any], vectors: Tensor) -> None:
    a = mlp()
    wide = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4))
    with pytest.raises(ValueError, match=r"layer '2': .* model_a .*\(1, 3\)"):
        function(a, wide, [vectors])
    with pytest.raises(ValueError, match="layer '3' is not in model_b"):
        function(nn.Sequential(*a, nn.Linear(3, 3)), a, [vectors])
    with pytest.raises(ValueError, match="layer '3' is not in model_a"):
        function(a, nn.Sequential(*a, nn.Linear(3, 3)), [vectors])
    with pytest.raises(ValueError, match="layer 'nowhere' is not in model_a"):
        function(a, a, [vectors], layers=["0", "nowhere"])
    with pytest.raises(ValueError, match=r"layer '0': the 1 images .*\(7,\)"):
        function(nn.Sequential(Fold(5, 7)), nn.Sequential(Fold(5, 7)), [vectors])
    with pytest.raises(TypeError, match="tensors of images, got tuple"):
        function(a, a, [(vectors, vectors)])


def test_other_errors(vectors: Tensor, images: Tensor) -> None:
    a = mlp()
    with pytest.raises(ValueError, match=r"estimator must be one of .*, got 'best'"):
        layerwise_cka(a, a, [vectors], estimator="best")
    with pytest.raises(ValueError, match="memory must be finite and >= 0, got -1"):
        layerwise_cka(a, a, [vectors], memory=-1)
    conv = nn.Sequential(nn.Conv2d(1, 2, 3))
    with pytest.raises(ValueError, match=r"layer '0': .*the same size"):
        layerwise_cka(conv, conv, [images[:3], images[:3, :, :40]])


def test_chosen_layers_only(pairs: dict[str, tuple[nn.Module, nn.Module]], images: Tensor) -> None:
    whole = layerwise_cka(*pairs["far"], images.split(9))
    names = ["final_conv", "down_1.convs.conv_0.adn.N"]
    some = layerwise_cka(*pairs["far"], images.split(9), layers=iter(names))
    assert list(some) == names
    for name in names:
        assert some[name].dissimilarity == pytest.approx(whole[name].dissimilarity, rel=1e-4)


# --- cosine -----------------------------------------------------------------------------------------------


def test_cosine_equals_the_formula(pairs: dict[str, tuple[nn.Module, nn.Module]], images: Tensor) -> None:
    a, b = pairs["near"]
    u, v = features(a, images), features(b, images)
    result = layerwise_cosine(a, b, images.split(7))
    assert list(result) == list(u)
    for name, value in result.items():
        x, y = u[name], v[name]
        cosines = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
        assert value.delta == pytest.approx(cosines.mean(), abs=1e-9)
        units = x / np.linalg.norm(x, axis=1, keepdims=True) - y / np.linalg.norm(y, axis=1, keepdims=True)
        assert value.dissimilarity == pytest.approx(0.5 * (units**2).sum(1).mean(), rel=1e-3)


def test_cosine_of_odd_layers(vectors: Tensor) -> None:
    a, b = odd(0, dead=True), odd(1, dead=True)
    for model in (a, b):
        nn.init.zeros_(model.dead.bias)
    result = layerwise_cosine(a, b, vectors.split(5))
    assert result["dead"] == (1.0, 0.0)
    assert math.isnan(result["unreached"].delta)
    assert layerwise_cosine(a, odd(1), vectors.split(5))["dead"].delta == pytest.approx(0, abs=1e-6)
    assert math.isnan(layerwise_cosine(a, odd(1, broken=True), vectors.split(5))["out"].delta)
    assert all(math.isnan(value.delta) for value in layerwise_cosine(a, b, []).values())
