"""FedAvg and Fed-LWR in plain PyTorch, to be read in one sitting: three hospitals, two rounds, one table.

Each site trains the same small network on its own images and sends the change of its weights. The server averages the
models and sends the average back. FedAvg weighs a site by its number of images. Fed-LWR (Yan et al., MICCAI 2024) asks
again, in each round: how much do your features differ from those of the average model? Sites that differ more weigh
more, layer by layer, so that the average serves them too.

Only the images come from FairFlare: drawn, not patients'. A test of the suite compares the two models of this file with
those of the package, to the bit. Lines that are there for that alone have a comment.

    python nano.py
"""

import copy
import hashlib
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairflare_lab.phantoms.classes import PhantomPlan, class_site

SITES = ("site-1", "site-2", "site-3")
ROUNDS = 2
SEED = 0
#: The settings of the package have the same names.
LEARNING_RATE, LOCAL_EPOCHS, BATCH_SIZE = 0.003, 10, 8

State = dict[str, Tensor]  # a model's tensors by their names
Split = tuple[Tensor, Tensor]  # images (n, 3, height, width) with values in [0, 1], and their classes (n,)
Differences = dict[str, float]  # by layer
Ask = Callable[[str, State], Differences]  # asks a site how much its model differs from another one
Method = Callable[[dict[str, State], dict[str, int], Ask], State]  # the sites' models to the next one


# ------------------------------------------------------------------------------------------------ what is learned


def build_network() -> nn.Sequential:
    """Build a small network that tells five kinds of spots apart; the seed decides its first weights."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 5),
    )


def load_images(index: int) -> dict[str, Split]:
    """Draw the images of one site, by split; the sites' cameras differ, and the last site's images have noise."""
    plan = PhantomPlan(phantom="fundus", num_sites=len(SITES), num_samples=150, image_size=32, partition="two_pool")
    site = class_site(plan, index)

    def split(name: str) -> Split:
        images = torch.tensor(site.images[name]).permute(0, 3, 1, 2).contiguous()
        return images.float() / 255, torch.tensor(site.labels[name])

    return {name: split(name) for name in ("training", "test")}


# ------------------------------------------------------------------------------------------------ at a site


def train(model: nn.Module, data: Split, seed: int) -> State:
    """Train the received model on a site's images, in place, and return the change of its weights."""
    images, classes = data
    received = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)  # a new one in each round
    for epoch in range(LOCAL_EPOCHS):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed + epoch))
        for batch in order.split(BATCH_SIZE):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), classes[batch])
            loss.backward()
            optimizer.step()
    return {name: tensor - received[name] for name, tensor in model.state_dict().items()}


@torch.no_grad()
def features_by_layer(model: nn.Sequential, images: Tensor) -> dict[str, Tensor]:
    """Return what each layer with weights makes of a site's images, (images, features) by the layer's name."""
    features = {}
    images = images.to(memory_format=torch.channels_last)  # for the bits
    for name, layer in model.named_children():
        images = torch.cat([layer(images[:1]), layer(images[1:])])  # for the bits: the first image alone
        if list(layer.parameters()):
            features[name] = images.flatten(1)
    return features


def differences_by_layer(local: nn.Sequential, average: nn.Sequential, images: Tensor) -> Differences:
    """Return how much the two models' features of a site's images differ in each layer, 0 (not at all) to 1."""
    of_local, of_average = features_by_layer(local, images), features_by_layer(average, images)
    return {layer: dissimilarity(of_local[layer], of_average[layer]) for layer in of_local}


def dissimilarity(a: Tensor, b: Tensor) -> float:
    r"""Return 1 - CKA of two models' features of the same images, (images, features) each.

    .. math:: CKA = \frac{\langle K, L \rangle}{|K| |L|}, \quad K_{ij} = u_i \cdot u_j, \quad L_{ij} = v_i \cdot v_j

    K says how alike each image is to each other one in the eyes of the first model, L in the eyes of the second (Eq.
    2); u and v are the features without their mean. CKA is the cosine of the two.
    """
    u, v = a - a[:1], b - b[:1]
    ratios = [float(x[-1].double().norm() / y[-1].double().norm()) for x, y in ((u, v), (a, b))]
    scale = min(ratios, key=lambda ratio: abs(math.log(ratio)))  # CKA does not depend on it, its last bits do
    k, l = products(u, u), scale**2 * products(v, v)
    some_k, some_l = products(u[-8:], u[-8:]), scale**2 * products(v[-8:], v[-8:])
    if (some_k - some_l).norm() > 0.05 * some_k.norm():
        k, l = k.double(), l.double()
    else:  # K - L, from the difference w of the features: between models that are near it keeps more digits
        w = torch.sub(u, v, alpha=scale)
        half = products(w, torch.sub(u, w, alpha=0.5)).double()
        k, l = k.double(), k.double() - (half + half.T)
    k, l = centred(k), centred(l)
    return 1 - float((k * l).sum() / (k.norm() * l.norm()))


def products(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner product of each image's features in x with each one's in y, without their means."""
    return (x - x.mean(0)) @ (y - y.mean(0)).T


def centred(matrix: Tensor) -> Tensor:
    """Subtract the mean of each row and of each column of a symmetric matrix."""
    rows = matrix.mean(1)
    return matrix - rows[:, None] - rows[None, :] + rows.mean()


# ------------------------------------------------------------------------------------------------ at the server


def average_models(states: dict[str, State], weights: dict[str, dict[str, float]]) -> State:
    """Average the sites' models tensor by tensor; ``weights``: by layer, then by site, with a sum of 1 (Eq. 6)."""
    average = {}
    for name, like in states[SITES[0]].items():
        total = torch.zeros_like(like, dtype=torch.float64)
        for site in SITES:
            total += weights[layer_of(name)][site] * states[site][name].double()
        average[name] = total.float()
    return average


def layer_of(tensor: str) -> str:
    """Return the name of the layer that a tensor belongs to: ``"2"`` of ``"2.weight"``."""
    return tensor.rpartition(".")[0]


def shares(values: dict[str, float]) -> dict[str, float]:
    """Scale the sites' values to a sum of 1."""
    total = math.fsum(values.values())
    return {site: value / total for site, value in values.items()}


def fed_avg(states: dict[str, State], num_images: dict[str, int], ask: Ask) -> State:
    """FedAvg: a site's weight is its share of all images (McMahan et al., AISTATS 2017)."""
    weights = shares({site: float(count) for site, count in num_images.items()})
    return average_models(states, {layer_of(name): weights for name in states[SITES[0]]})


def fed_lwr(states: dict[str, State], num_images: dict[str, int], ask: Ask) -> State:
    """Fed-LWR: a site's weight in a layer is its share of how much the sites' features differ there (Eq. 5)."""
    layers = dict.fromkeys(map(layer_of, states[SITES[0]]))
    equal = dict.fromkeys(SITES, 1 / len(SITES))
    anchor = average_models(states, dict.fromkeys(layers, equal))  # the plain average (Eq. 1)
    differences = {site: ask(site, anchor) for site in SITES}
    return average_models(states, {layer: shares({s: differences[s][layer] for s in SITES}) for layer in layers})


# ------------------------------------------------------------------------------------------------ a run


def seed_of(site: str, current_round: int) -> int:
    """Return the seed of a site's training in a round, the same on every machine."""
    digest = hashlib.sha256(f"{SEED}/{site}/{current_round}".encode()).digest()
    return int.from_bytes(digest[:7], "big") % 2**31


def load_weights(state: State) -> nn.Sequential:
    """Return a network with the given weights."""
    network = build_network()
    network.load_state_dict(state)
    return network


def answer(local: dict[str, nn.Sequential], data: dict[str, dict[str, Split]], site: str, anchor: State) -> Differences:
    """Let a site compare its model of the round with another model, on its own training images."""
    return differences_by_layer(local[site], load_weights(anchor), data[site]["training"][0])


def run(method: Method, data: dict[str, dict[str, Split]]) -> State:
    """Run a method (:func:`fed_avg` or :func:`fed_lwr`) for all rounds, and return the last model's weights."""
    torch.set_num_threads(1)  # for the bits: sums of several threads differ in the last ones
    num_images = {site: len(data[site]["training"][0]) for site in SITES}
    state = build_network().state_dict()
    for current_round in range(ROUNDS):
        local = {site: load_weights(state) for site in SITES}
        changes = {site: train(local[site], data[site]["training"], seed_of(site, current_round)) for site in SITES}
        states = {site: {name: state[name] + changes[site][name] for name in state} for site in SITES}

        ask = partial(answer, local, data)
        state = method(states, num_images, ask)
    return state


@torch.no_grad()
def accuracy(state: State, data: Split) -> float:
    """Return the share of images that a model tells right."""
    images, classes = data
    return float((load_weights(state)(images).argmax(1) == classes).float().mean())


def main() -> None:
    """Print both methods' accuracy on each site's own test images; the worst site is what fairness is about."""
    data = {site: load_images(index) for index, site in enumerate(SITES)}
    print("method ", *SITES, "worst", sep="  ")
    for method in (fed_avg, fed_lwr):
        state = run(method, data)
        figures = [accuracy(state, data[site]["test"]) for site in SITES]
        print(f"{method.__name__:7}", *(f"{figure:6.3f}" for figure in figures), f"{min(figures):5.3f}", sep="  ")


if __name__ == "__main__":
    main()
