"""Test sums under masks: keys, numbers of the ring, what masks are bound to, and which weights tell too much."""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import hashes
from hypothesis import given, settings
from hypothesis import strategies as st
from nvflare.lighter import utils as lighter
from scipy.stats import chi2

from fairflare.privacy.sums import keys as keys_module
from fairflare.privacy.sums import masks as masks_module
from fairflare.privacy.sums.exposure import Limits, check_table, exposure, soften_weights
from fairflare.privacy.sums.keys import MAGIC, Kit, Pairs, SiteKeys, SumRefused, derive_key, fields
from fairflare.privacy.sums.masks import Addition, Masks, SumAsked, SumSpoiled, digest, masks_of, own_key, pack_table
from fairflare.privacy.sums.ring import BUFFERS, TRAINED, Ring, SumLayout, kinds, same_integers

VECTOR = json.loads((Path(__file__).parent / "sums_vector.json").read_text())
SUM = VECTOR["sum"]
SITES = ("a", "b", "c")
RUN = bytes(range(32))
SAME = dict.fromkeys(SITES, np.full(64, 0.01))


def agreed(sites: Sequence[str] = SITES) -> dict[str, Pairs]:
    """Return keys for every pair of sites, made up."""
    pair = {(one, other): os.urandom(32) for one in sites for other in sites if one < other}
    keys = {s: {o: pair[min(s, o), max(s, o)] for o in sites if o != s} for s in sites}
    return {site: Pairs(site, RUN, bytes(32), keys[site], os.urandom(32), len(sites)) for site in sites}


def question(weights: Mapping[str, Sequence[float]], label: str = "params", ring: Ring = TRAINED) -> SumAsked:
    """Return a question of round 2 with a table of weights."""
    return SumAsked(2, 0, label, ring, bytes(32), {site: tuple(row) for site, row in weights.items()})


def thirds(label: str = "params", ring: Ring = TRAINED) -> SumAsked:
    """Return a question of three sites with the weights .5, .3 and .2."""
    return question({"a": (0.5,), "b": (0.3,), "c": (0.2,)}, label, ring)


def vectors(
    asked: Mapping[str, SumAsked], pairs: Mapping[str, Pairs], numbers: Mapping[str, np.ndarray]
) -> dict[str, torch.Tensor]:
    """Return what each site sends of one flat tensor."""
    found = {}
    for site, q in asked.items():
        block = q.ring.quantise(numbers[site], q.table[site][0])
        masks_of(q, pairs[site]).put_on(block)
        found[site] = torch.from_numpy(block.view(f"<i{q.ring.bits // 8}"))
    return found


def opened(
    asked: Mapping[str, SumAsked], pairs: Mapping[str, Pairs], numbers: Mapping[str, np.ndarray], **wrong: bytes
) -> torch.Tensor:
    """Return the opened sum of what sites send of one flat tensor; ``wrong``: other keys of own masks."""
    q, count = next(iter(asked.values())), len(next(iter(numbers.values())))
    total = Addition(q, SumLayout.make({"w": torch.zeros(count)}))
    for site, vector in vectors(asked, pairs, numbers).items():
        total.add(site, vector)
    return total.open_sum({site: own_key(asked[site], pairs[site]) for site in asked} | wrong)["w"]


# ------------------------------------------------------------------------------------------------ the vector


@pytest.fixture(scope="module")
def pairs_of_the_vector(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pairs]:
    """Agree on keys with the private keys of the vector."""
    run, sites, told = bytes.fromhex(VECTOR["run"]), {}, []
    folder = tmp_path_factory.mktemp("vector") / "experiment"
    for name, key in VECTOR["keys"].items():
        site = SiteKeys(name, folder / name)
        site.hello(run)
        nonce, public = (bytes.fromhex(key[what]) for what in ("nonce", "public"))
        changed = {"private": key["private"], "hello": fields(MAGIC, b"hello", run, name.encode(), nonce, public).hex()}
        site._keep(json.loads(site.file.read_text().partition(" ")[2]) | changed)
        told.append(site.hello(run))
        assert told[-1] == {"hello": bytes.fromhex(key["hello"])}
        sites[name] = site
    return {name: site.agree(run, told[::-1]) for name, site in sites.items()}


def test_keys_of_the_vector(pairs_of_the_vector: dict[str, Pairs]) -> None:
    for name, pairs in pairs_of_the_vector.items():
        assert pairs.roster.hex() == VECTOR["roster"]
        for other, key in pairs.keys.items():
            assert key.hex() == VECTOR["pairs"]["|".join(sorted((name, other)))]["key"]
        assert len(pairs.keys) == 2


def stream(key: bytes) -> str:
    """Return the first 32 bytes of the mask of a key."""
    words = np.zeros(4, np.uint64)
    Masks([key], []).put_on(words)
    return words.tobytes().hex()


def test_masks_and_sum_of_the_vector(pairs_of_the_vector: dict[str, Pairs], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {name: struct.unpack("<d", bytes.fromhex(site["weight"])) for name, site in SUM["sites"].items()}
    ring = Ring(VECTOR["ring_bits"], VECTOR["fraction_bits"], VECTOR["bound"])
    q = SumAsked(VECTOR["round"], SUM["attempt"], VECTOR["label"], ring, bytes.fromhex(VECTOR["model"]), weights)
    assert q.members == SUM["members"]
    assert pack_table(q.table).hex() == SUM["weight_table"]
    assert q.context().hex() == SUM["context"]
    assert SumAsked.read("hospital-a", q.plain()) == q
    total = Addition(q, SumLayout.make({"w": torch.zeros(4)}))
    added = [0] * 4
    for name, site in SUM["sites"].items():
        update = np.array(VECTOR["updates"][name])
        whole = ring.quantise(update, weights[name][0])
        assert [f"{word:016x}" for word in whole] == site["quantised"]
        assert int((abs(update) > ring.bound).sum()) == site["saturated"]
        for other, mask in site["pair_masks"].items():
            key = derive_key(pairs_of_the_vector[name].keys[other], q.context(), b"mask")
            assert (key.hex(), 1 if name < other else -1) == (mask["key"], mask["sign"])
            assert stream(key) == mask["stream"]
        own = bytes.fromhex(site["own_mask"]["key"])
        assert stream(own) == site["own_mask"]["stream"]
        monkeypatch.setattr(masks_module, "own_key", lambda *_, own=own: own)
        masks = masks_of(q, pairs_of_the_vector[name])
        for half in (whole[:1], whole[1:]):  # a stream goes on from block to block
            masks.put_on(half)
        assert whole.tobytes().hex() == site["sent"]
        total.add(name, torch.from_numpy(whole.view("<i8")))
        added = [(a + w) % 2**64 for a, w in zip(added, struct.unpack("<4Q", bytes.fromhex(site["sent"])), strict=True)]
    assert [f"{word:016x}" for word in added] == SUM["added"]
    found = total.open_sum({name: bytes.fromhex(site["own_mask"]["key"]) for name, site in SUM["sites"].items()})["w"]
    assert found.tolist() == SUM["mean"]
    # an opening by Python's integers
    for site in SUM["sites"].values():
        words = struct.unpack("<4Q", bytes.fromhex(site["own_mask"]["stream"]))
        added = [(a - w) % 2**64 for a, w in zip(added, words, strict=True)]
    assert [f"{word:016x}" for word in added] == SUM["opened"]
    assert [(w - 2**64 * (w >= 2**63)) / 2**24 for w in added] == SUM["mean"]
    largest = float((found - torch.tensor(SUM["clear_mean"], dtype=torch.float64)).abs().max())
    assert largest == SUM["largest_error"] <= SUM["error_bound"] == 3 * 2.0**-25


# ------------------------------------------------------------------------------------------------ the ring


@pytest.mark.parametrize(
    ("ring", "found"),
    [
        (Ring.fitting(64, 8), Ring(64, 40, 8.0)), (Ring.fitting(32, 8), Ring(32, 27, 8.0)),
        (TRAINED, Ring(32, 30, 1.0)),
        (Ring.fitting(32, 5), Ring(32, 27, 5.0)), (Ring.fitting(32, 0.25), Ring(32, 32, 0.25)),
        (BUFFERS, Ring(64, 40, 2.0**20)),
    ],
)  # fmt: skip
def test_bits_of_fraction(ring: Ring, found: Ring) -> None:
    assert ring == found
    ring.limit(100)


def test_a_ring_that_could_wrap_is_refused() -> None:
    Ring(32, 29, 2.0).limit(100)
    with pytest.raises(ValueError, match="could wrap around"):
        Ring(32, 30, 2.0).limit(100)
    for odd in (
        (16, 4, 1.0),
        (32, 41, 1.0),
        (32, -1, 1.0),
        (32, 4, 0.0),
        (32, 4, math.nan),
        (True, 4, 1.0),
        (32, 4, 1),
    ):
        with pytest.raises(ValueError, match="a ring has 32 or 64 bits"):
            Ring(*odd)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_sums_are_exact_and_close_to_the_mean(data: st.DataObject) -> None:
    """Hold the opened sum to Python's integers to the bit, and to the mean of the numbers within the bound."""
    count = data.draw(st.sampled_from([3, 6, 20]))
    ring = data.draw(st.sampled_from([TRAINED, Ring.fitting(32, 8), Ring.fitting(64, 8), BUFFERS]))
    seed = data.draw(st.integers(0, 2**32))
    draws = np.random.default_rng(seed)
    sites = [f"s{k:03d}" for k in range(count)]
    shares = draws.dirichlet(np.ones(count))
    scale = data.draw(st.sampled_from([1e-6, 0.01, 1.0])) * ring.bound
    numbers = {site: draws.normal(0, scale, 7) for site in sites}
    numbers[sites[0]][:3] = data.draw(st.sampled_from([0.0, -0.0, ring.bound, -ring.bound, 5e-324, -3 * ring.bound]))
    q = question({site: (share,) for site, share in zip(sites, shares, strict=True)}, ring=ring)
    found = opened(dict.fromkeys(sites, q), agreed(sites), numbers).tolist()
    for k in range(7):
        clipped = {site: min(max(float(numbers[site][k]), -ring.bound), ring.bound) for site in sites}
        parts = [round(float(q.table[site][0]) * clipped[site] * 2.0**ring.fraction) for site in sites]
        assert found[k] == sum(parts) / 2**ring.fraction
        mean = math.fsum(q.table[site][0] * clipped[site] for site in sites)
        assert abs(found[k] - mean) <= count * 2.0 ** -(ring.fraction + 1) + 1e-15 * ring.bound


def test_which_tensors_are_summed_in_which_ring() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    net.register_buffer("ids", torch.arange(3))
    found = kinds(net.state_dict(), dict(net.named_parameters()))
    assert found.params == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert found.buffers == ["1.running_mean", "1.running_var"]
    assert (found.steps, found.fixed) == (["1.num_batches_tracked"], ["ids"])
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net(torch.zeros(1, 1, 4, 4))
    same_integers("a", before, net.state_dict())
    net.ids += 1
    with pytest.raises(SumRefused, match=r"'a': .*changes the torch.int64 .*'ids'"):
        same_integers("a", before, net.state_dict())


def test_layers_have_weights_of_their_own() -> None:
    like = {"z": torch.zeros(2, 2), "a": torch.zeros(3), "m": torch.zeros(())}
    layout = SumLayout.make(like, {"z": "first", "a": "second", "m": "first"})
    assert layout.layers == ("first", "second")
    assert list(layout.shapes.items()) == [("a", (3,)), ("m", ()), ("z", (2, 2))]
    assert (layout.columns, layout.numbers) == ({"a": 1, "m": 0, "z": 0}, 8)


# ------------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize("ring", [TRAINED, Ring.fitting(64, 8)])
def test_a_masked_vector_looks_like_chance(ring: Ring) -> None:
    """Hold the bytes of a vector to a uniform distribution, and the vector to no correlation with the numbers."""
    draws, count = np.random.default_rng(0), 20_000
    numbers = {site: draws.normal(0, 0.01, count) for site in SITES}
    q = thirds(ring=ring)
    pairs = {site: replace(p, keys=dict.fromkeys(p.keys, bytes(32)), own=bytes(32)) for site, p in agreed().items()}
    for site, vector in vectors(dict.fromkeys(SITES, q), pairs, numbers).items():
        of_bytes = np.bincount(vector.numpy().view(np.uint8), minlength=256)
        expected = of_bytes.sum() / 256
        assert ((of_bytes - expected) ** 2 / expected).sum() < chi2.ppf(1 - 1e-6, 255)
        assert abs(np.corrcoef(vector.numpy().astype(float), numbers[site])[0, 1]) < 4 / math.sqrt(count)


@pytest.mark.parametrize(
    "other",
    [
        {"model": b"\x01" + bytes(31)}, {"round": 3}, {"attempt": 1}, {"label": "anchor"},
        {"ring": replace(TRAINED, bound=1.0 + 2**-52)}, {"ring": replace(TRAINED, fraction=29)},
        {"table": {"a": (0.5,), "b": (0.3 - 1e-16,), "c": (0.2,)}},
        {"slices": '[["v", 0, [null]]]'},
    ],
)  # fmt: skip
def test_sites_that_were_told_different_questions_cancel_nothing(other: dict[str, Any]) -> None:
    asked = dict.fromkeys(SITES, thirds()) | {"b": replace(thirds(), **other)}
    with pytest.raises(SumSpoiled, match=r"of 64 .* 'params' .*round 2.*\[-1, 1\]"):
        opened(asked, agreed(), SAME)


def test_another_roster_or_another_own_mask_cancels_nothing() -> None:
    pairs, other, asked = agreed(), agreed(), dict.fromkeys(SITES, thirds())
    with pytest.raises(SumSpoiled, match="nobody can say which"):
        opened(asked, {**pairs, "b": replace(pairs["b"], keys=other["b"].keys)}, SAME)
    with pytest.raises(SumSpoiled):
        opened(asked, pairs, SAME, b=bytes(32))
    assert float((opened(asked, pairs, SAME) - 0.01).abs().max()) < 3 * 2.0**-31


def test_the_server_names_a_site_with_a_wrong_vector() -> None:
    total = Addition(thirds(), SumLayout.make({"w": torch.zeros(4)}))
    with pytest.raises(ValueError, match=r"'params' must .*torch.float32 .*filters"):
        total.add("a", torch.zeros(4))
    for odd in (torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int32), [0] * 4, None):
        with pytest.raises(ValueError, match=r"site 'a': field 'params'"):
            total.add("a", odd)
    total.add("a", torch.zeros(4, dtype=torch.int32))
    for site in ("a", "d"):
        with pytest.raises(ValueError, match=rf"'{site}': field 'params' is not expected"):
            total.add(site, torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"no vector from \['b', 'c'\]"):
        total.open_sum(dict.fromkeys(SITES, bytes(32)))
    for site in "bc":
        total.add(site, torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize("block", [1, 2])
def test_one_number_outside_refuses_the_sum(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the largest number that a sum can have apart from the next one, also in a block before the last."""
    monkeypatch.setattr("fairflare.privacy.sums.masks.BLOCK", block)
    q, key = question(dict.fromkeys(SITES, (1 / 3,)), ring=Ring(32, 4, 1.0)), bytes(32)
    for number, good in ((17, True), (-17, True), (18, False), (-18, False), (-(2**31), False)):
        total = Addition(q, SumLayout.make({"w": torch.zeros(2)}))
        numbers = np.array([number, 0], np.int32).view(np.uint32)
        Masks([key] * 3, []).put_on(numbers)
        for site, part in zip(SITES, (numbers, numbers - numbers, numbers - numbers), strict=True):
            total.add(site, torch.from_numpy(part.view(np.int32)))
        if good:
            assert total.open_sum(dict.fromkeys(SITES, key))["w"].tolist() == [number / 16, 0]
        else:
            with pytest.raises(SumSpoiled, match=r"^1 of 2 numbers"):
                total.open_sum(dict.fromkeys(SITES, key))


def test_a_digest_tells_models_apart() -> None:
    one = {"w": torch.zeros(2, 3), "n": torch.tensor(3)}
    others = [
        one, {"w": torch.zeros(3, 2), "n": torch.tensor(3)}, {"w": torch.zeros(2, 3).double(), "n": torch.tensor(3)},
        {"v": torch.zeros(2, 3), "n": torch.tensor(3)}, {"w": torch.zeros(2, 3) - 0.0, "n": torch.tensor(4)},
        {"w": -torch.zeros(2, 3), "n": torch.tensor(3)},
    ]  # fmt: skip
    assert len({digest(model) for model in others}) == len(others)
    assert digest(dict(reversed(one.items()))) == digest(one)


# ------------------------------------------------------------------------------------------------ what a server can ask


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2**33), st.floats(), st.text(max_size=3), st.binary(max_size=33),
    st.lists(st.floats(), max_size=3), st.dictionaries(st.text(max_size=2), st.lists(st.floats(), max_size=2)),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*thirds().plain(), "all", "gone"]), ODD, st.sampled_from(list(thirds().plain())))
def test_odd_questions_are_refused_by_name(name: str, odd: Any, gone: str) -> None:
    plain = thirds().plain()
    changed = odd if name == "all" else {k: v for k, v in {**plain, name: odd}.items() if name != "gone" or k != gone}
    try:
        found = SumAsked.read("a", changed)
    except SumRefused as refused:
        told = str(refused)
    else:
        told = ""
        assert found.plain() == {**changed, "ring": list(changed["ring"])}
        assert len(found.context()) == 32
    assert told == "" or told.startswith("site 'a': secure sums: the server's question cannot be read (")
    assert len(told) < 400


def pairs_of(sites: Sequence[str], first: int = 0) -> Pairs:
    """Return the keys of the first site with the others."""
    return Pairs(sites[0], RUN, bytes(32), dict.fromkeys(sites[1:], bytes(32)), bytes(32), first or len(sites))


def table(*rows: Sequence[float]) -> dict[str, tuple[float, ...]]:
    """Return a table of weights from the rows of sites a, b, c, ..."""
    return {chr(97 + k): tuple(row) for k, row in enumerate(rows)}


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        (table([1.0], [0.0], [0.0]), r"weight 1 in a .*0.5 \(secure_max_weight\)"),
        (table([0.98], [0.01], [0.01]), r"a site has the weight 0.98 in a layer"),
        (table([0.3], [0.3], [0.3]), r"sum up to 1 \+- 0.1, not to 1"),
        (table([0.5, 0.3], [0.3, 0.3], [0.2, 0.3]), r"sum up to 1 \+- 0.1"),
        (table([0.4, 0.6], [0.3, 0.2], [0.3, 0.2]), "the weight 0.6 in a layer"),
        (table([0.5], [0.6], [-0.1]), "a weight is below 0 or not finite"),
        (table([0.5], [0.5], [math.nan]), "a weight is below 0 or not finite"),
        (table([0.5], [0.5]), "has 2 members and needs 3; wait"),
        (table([0.5], [0.5], [0.0]), "a layer .* fewer than 3 sites, so"),
        (table([0.4, 0.5], [0.3, 0.5], [0.3, -0.0]), "a layer .* fewer than 3 sites"),
        (table([math.inf], [0.0], [0.0]), "a weight is below 0 or not finite"),
        (table([0.0], [0.0], [0.0]), r"sum up to 1 \+- 1, not to 1"),
        (table([0.4], [0.3], [0.2], [0.1]), r"\['d'\] have no key in this run"),
        ({"b": (0.5,), "c": (0.5,)}, r"it is no member of \['b', 'c'\]"),
    ],
)
def test_tables_that_tell_too_much_are_refused_by_name(weights: dict[str, tuple[float, ...]], why: str) -> None:
    with pytest.raises(SumRefused, match=rf"'a': .*sum 'params' of round 2: .*{why}"):
        check_table("a", question(weights), Limits(), pairs_of("abc"))


@pytest.mark.parametrize(
    ("own", "more"),
    [
        ({"a": 0.5, "b": 0.5}, {}),  # each could subtract its own
        ({"a": 0.5, "b": 0.5, "c": 0.0}, {}),
        ({"a": 0.6, "b": 0.2, "c": 0.2}, {}),  # above secure_max_weight
        ({"a": 0.4, "b": 0.3, "c": 0.2}, {}),  # not to 1
        ({"a": 0.5, "b": 0.49, "c": 0.01}, {"limits": Limits(max_exposure=0.7)}),
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, {"opened": [table([0.2], [0.2], [0.2], [0.2], [0.2])]}),  # a second sum
        ({"a": 1 / 2, "b": 1 / 6, "c": 1 / 6, "d": 1 / 6}, {"opened": [table([0.2], [0.2], [0.2], [0.2], [0.2])]}),
    ],
)
def test_slices_that_tell_too_much_are_refused(own: dict[str, float], more: dict[str, Any]) -> None:
    asked = question(table([0.2], [0.2], [0.2], [0.2], [0.2]))
    asked = replace(asked, slices=json.dumps([["w", 1, [None, own, {}]]]))
    with pytest.raises(SumRefused, match=r"a slice's weights .*; leave it out"):
        check_table("a", asked, **{"limits": Limits(), "pairs": pairs_of("abcde"), **more})
    even = replace(asked, slices=json.dumps([["w", 1, [None, dict.fromkeys("abcd", 0.25), {}]]]))
    check_table("a", even, Limits(), pairs_of("abcde"), more.get("opened", ()))


@pytest.mark.parametrize(
    "slices", ["x", '[["w", 2, [null]]]', '[["w", 1, [{"z": 0.5}]]]', '[["w", 1, [{"a": -0.5}]]]', '[["w", 1]]', b"[]"]
)
def test_slices_that_cannot_be_read_are_refused(slices: Any) -> None:
    with pytest.raises(SumRefused, match="the server's question cannot be read"):
        SumAsked.read("a", {**thirds().plain(), "slices": slices})


def test_a_table_may_be_off_by_rounding_alone() -> None:
    for off in (5e-10, -5e-10):
        check_table("a", question(table([0.5], [0.3], [0.2 + off])), Limits(), pairs_of("abc"))
    with pytest.raises(SumRefused, match="not to 1"):
        check_table("a", question(table([0.5], [0.3], [0.2 + 2e-9])), Limits(), pairs_of("abc"))


def test_two_sums_of_one_vector() -> None:
    even, apart = table([1 / 4], [1 / 4], [1 / 4], [1 / 4]), table([1 / 2], [1 / 6], [1 / 6], [1 / 6])
    with pytest.raises(SumRefused, match=r"numbers to 1.0000, .* allows 0.95"):
        check_table("a", question(apart), Limits(), pairs_of("abcd"), [even])
    check_table("a", question(apart), Limits(), pairs_of("abcd"))
    check_table("a", question(table([0.4], [0.3], [0.2], [0.1])), Limits(), pairs_of("abcd"), [even])
    check_table("a", question(even), Limits(), pairs_of("abcd"), [even])
    with pytest.raises(SumRefused, match=r"is not of \['a', 'b', 'c', 'd'\]"):
        check_table("a", question(even), Limits(), pairs_of("abcde"), [table(*[[0.2]] * 5)])
    with pytest.raises(SumRefused, match="it has 3 members and needs 4"):
        check_table("a", question(table(*[[1 / 3]] * 3), "anchor"), Limits(), pairs_of("abc"))


@pytest.mark.parametrize("more", [2e-17, 1e-13, 8.5e-13, 1e-9])
def test_the_difference_of_two_sums_shows_a_site_however_small_it_is(more: float) -> None:
    even = table(*[[1 / 6]] * 6)
    nearly = even | {"b": (1 / 6 + more,)}
    assert nearly != even
    with pytest.raises(SumRefused, match=r"would show a site's numbers to 1.0000"):
        check_table("a", question(nearly), Limits(), pairs_of("abcdef"), [even])
    found, which = soften_weights(nearly, [even], 0.95)
    assert (found, which) == (even, [0])


def test_a_finer_ring_than_the_vectors_is_refused() -> None:
    thirds = table(*[[1 / 3]] * 3)
    with pytest.raises(SumRefused, match=r"Ring\(bits=64.*same version"):
        check_table("a", question(thirds, "params", BUFFERS), Limits(), pairs_of("abc"))
    with pytest.raises(SumRefused, match=r"integers of Ring\(bits=32"):
        check_table("a", question(thirds, "buffers", TRAINED), Limits(), pairs_of("abc"))


def test_two_thirds_of_the_first_roster_take_part() -> None:
    five = question(table(*[[1 / 5]] * 5))
    check_table("a", five, Limits(), pairs_of("abcde", first=7))
    with pytest.raises(SumRefused, match="5 of 8 sites, needed are two thirds"):
        check_table("a", five, Limits(), pairs_of("abcde", first=8))


def test_numbers_by_class_are_of_three_sites_or_of_none() -> None:
    third, half = 1 / 3, 0.5
    rows = [[1 / 4, third, 0.0], [1 / 4, third, 0.0], [1 / 4, third, 0.0], [1 / 4, 0.0, 0.0]]
    check_table("d", question(table(*rows), "class_gradients", BUFFERS), Limits(), pairs_of("dabc"))
    for few in ([half, half, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]):
        odd = table(*([*row[:2], weight] for row, weight in zip(rows, few, strict=True)))
        with pytest.raises(SumRefused, match=r"a class .*than 3 sites; leave"):
            check_table("a", question(odd, "class_gradients", BUFFERS), Limits(), pairs_of("abcd"))
    with pytest.raises(SumRefused, match=r"sum up to 1 \+- 1, not to 1"):  # no part of an update is left out
        check_table("a", question(table(*rows), "params"), Limits(), pairs_of("abcd"))


def test_a_hundred_sites_are_the_most() -> None:
    names = [f"s{k}" for k in range(101)]
    with pytest.raises(SumRefused, match="it has 101 members, at most 100"):
        check_table("s0", question(dict.fromkeys(names, (1 / 101,))), Limits(), pairs_of(names))


@pytest.mark.parametrize(
    ("rows", "most"),
    [
        ([[1 / 3] * 3], 1 / math.sqrt(3)), ([[1 / 6] * 6], 1 / math.sqrt(6)), ([[0.5, 0.3, 0.2]], 0.811),
        ([[0.5] + [0.1] * 5], 0.913), ([[1 / 4] * 4, [0.4, 0.3, 0.2, 0.1]], 0.837),
        ([[1 / 4] * 4, [0.5] + [1 / 6] * 3], 1), ([[0.5, 0.3, 0.1, 0.05, 0.03, 0.02]], 0.841),
        ([[1 / 3] * 3] * 2, 1 / math.sqrt(3)),
    ],
)  # fmt: skip
def test_exposure(rows: list[list[float]], most: float) -> None:
    """Hold it to the specification's figures, and to a search for the combination that shows most of a site."""
    tables = [table(*([w] for w in row)) for row in rows]
    found = exposure(tables)
    assert found.shape == (1, len(rows[0]))
    assert float(found.max()) == pytest.approx(most, abs=6e-4)
    matrix = np.array(rows)
    for site in range(len(rows[0])):  # the row combination nearest to a site's unit vector, by least squares
        unit = np.eye(len(rows[0]))[site]
        left = unit - matrix.T @ np.linalg.lstsq(matrix.T, unit, rcond=1e-10)[0]
        assert float(found[0, site]) == pytest.approx(math.sqrt(1 - left @ left), abs=1e-9)


def test_a_layer_that_would_expose_a_site_gets_equal_weights() -> None:
    opened = [table(*[[1 / 4]] * 4)]
    asked = table([1 / 2, 0.4], [1 / 6, 0.3], [1 / 6, 0.2], [1 / 6, 0.1])
    found, which = soften_weights(asked, opened, 0.95)
    assert (found, which) == (table([1 / 4, 0.4], [1 / 4, 0.3], [1 / 4, 0.2], [1 / 4, 0.1]), [0])
    check_table("a", question(found), Limits(), pairs_of("abcd"), opened)
    assert soften_weights(found, opened, 0.95) == (found, [])
    of_two = table([1 / 2, 0.4], [1 / 2, 0.3], [0.0, 0.3])  # each of two sites would know the other's update
    assert soften_weights(of_two, [], 0.95) == (table([1 / 3, 0.4], [1 / 3, 0.3], [1 / 3, 0.3]), [0])


# ------------------------------------------------------------------------------------------------ keys


@functools.cache
def key_pair(name: str) -> Any:
    """Return an RSA key, one a name."""
    return lighter.generate_keys()


def certificate(name: str, root: str = "project", days: tuple[float, float] = (-1, 1), key: str = "") -> bytes:
    """Return a certificate as FLARE's provisioning makes it, valid from and to days from now."""
    now = datetime.datetime.now(datetime.timezone.utc)
    start, end = (now + datetime.timedelta(days=day) for day in days)
    made = lighter.generate_cert(
        lighter.Identity(name), lighter.Identity(root), key_pair(f"root {root}")[0],
        key_pair(key or (f"root {name}" if name == root else name))[1], ca=name == root,
        not_valid_before=start, not_valid_after=end,
    )  # fmt: skip
    return lighter.serialize_cert(made)


def kit(name: str, **changes: Any) -> Kit:
    """Return the kit of a site."""
    key = lighter.serialize_pri_key(key_pair(name)[0])
    return Kit(**{"certificate": certificate(name), "key": key, "root": certificate("project"), **changes})


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """Return the folder of an experiment: keys look for old ones beside it, not at those of other tests."""
    return tmp_path / "experiment"


def keys_in(tmp_path: Path, kits: Mapping[str, Kit | None]) -> dict[str, SiteKeys]:
    """Return three sites' keys, each in a folder of its own."""
    return {site: SiteKeys(site, tmp_path / site, kits.get(site)) for site in SITES}


def test_signed_sites_agree_and_keep_the_key_to_themselves(tmp_path: Path) -> None:
    sites = keys_in(tmp_path, {site: kit(site) for site in SITES})
    told = [site.hello(RUN) for site in sites.values()]
    assert sites["a"].hello(RUN)["hello"] == told[0]["hello"]
    assert sites["a"].file.stat().st_mode & 0o777 == 0o600
    pairs = {name: site.agree(RUN, told) for name, site in sites.items()}
    assert pairs["a"].keys["b"] == pairs["b"].keys["a"] != pairs["a"].keys["c"]
    assert pairs["a"].first == 3
    assert SiteKeys("a", tmp_path / "a", kit("a")).pairs(RUN) == pairs["a"]  # in another process
    for secret in (pairs["a"].keys["b"].hex(), key_pair("a")[0].private_numbers().d):
        assert str(secret) not in repr(pairs["a"]) + repr(kit("a"))
    sites["a"].forget()
    assert not sites["a"].file.exists()
    with pytest.raises(SumRefused, match=r"'a': .*no key of this run, and takes part"):
        sites["a"].pairs(RUN)


def test_the_first_roster_is_kept_when_sites_agree_again(tmp_path: Path) -> None:
    sites = keys_in(tmp_path, {}) | {"d": SiteKeys("d", tmp_path / "d")}
    told = [site.hello(RUN) for site in sites.values()]
    assert sites["a"].agree(RUN, told).first == 4
    assert sites["a"].agree(RUN, told[:3]).first == 4
    other = bytes(32)
    told = [site.hello(other) for site in sites.values()]
    with pytest.raises(SumRefused, match="the server must ask for keys first"):
        sites["a"].pairs(other)
    assert sites["a"].agree(other, told[:3]).first == 3


def test_a_key_is_gone_after_a_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, other = (SiteKeys("a", tmp_path / experiment / "a") for experiment in ("one", "other"))
    first, _ = site.hello(RUN), other.hello(RUN)
    now = keys_module.time.time()
    monkeypatch.setattr(keys_module.time, "time", lambda: now + 7 * 24 * 3600 - 60)
    assert site.hello(RUN) == first
    monkeypatch.setattr(keys_module.time, "time", lambda: now + 7 * 24 * 3600 + 60)
    with pytest.raises(SumRefused, match="takes part again after the next"):
        site.agree(RUN, [first])
    assert not list(tmp_path.rglob("*.key"))  # that of a run whose end never came is gone, too
    assert site.hello(RUN) != first


def test_a_key_in_use_is_not_gone_after_a_week(tmp_path: Path) -> None:
    sites = keys_in(tmp_path, {})
    told = [site.hello(RUN) for site in sites.values()]
    pairs, file = sites["a"].agree(RUN, told), sites["a"].file
    for _ in range(3):
        old = keys_module.time.time() - 6 * 24 * 3600
        os.utime(file, (old, old))
        assert sites["a"].pairs(RUN) == pairs
        assert file.stat().st_mtime > old + 24 * 3600


def test_a_run_is_32_bytes(tmp_path: Path) -> None:
    for odd in (b"", bytes(31), "x" * 32, None):
        with pytest.raises(SumRefused, match=r"field 'run' must be 32 bytes, got"):
            SiteKeys("a", tmp_path).hello(odd)  # type: ignore[arg-type]


def changed_hello(hello: bytes, **changes: bytes) -> dict[str, bytes]:
    """Return a hello of which some parts are others."""
    parts = {"magic": MAGIC, "what": b"hello", "run": RUN, "name": hello[68:-72]}
    assert fields(*parts.values(), hello[-68:-36], hello[-32:]) == hello
    return {"hello": fields(*(parts | {"nonce": hello[-68:-36], "public": hello[-32:]} | changes).values())}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: [t[1], t[2]], "has not its own hello"),
        (lambda t: [changed_hello(t[0]["hello"], nonce=bytes(32)), *t[1:]], "has not its own hello, or a changed one"),
        (lambda t: t[:2], "'hellos' has 2 sites; .*at least 3"),
        (lambda t: [*t[:2], t[1]], "has the site 'b' twice"),
        (lambda t: [*t[:2], changed_hello(t[1]["hello"], name=b"d")], "the sites 'b' and 'd' have one key"),
        (
            lambda t: [*t[:2], changed_hello(t[2]["hello"], run=bytes(32))],
            "hello of site .* of another run",
        ),
        (
            lambda t: [*t[:2], changed_hello(t[2]["hello"], magic=b"x")],
            "hello of site .* of another run",
        ),
        (
            lambda t: [*t[:2], changed_hello(t[2]["hello"], what=b"x")],
            "hello of site .* of another run",
        ),
        (
            lambda t: [*t[:2], changed_hello(t[2]["hello"], public=bytes(31))],
            "hello of site .* of another run",
        ),
        (lambda t: [*t[:2], changed_hello(t[2]["hello"], public=bytes(32))], "public key of site 'c' is none"),
        (lambda t: [*t[:2], {"hello": t[2]["hello"][:-1]}], "is of another run or version"),
        (lambda t: [*t[:2], {"hello": t[2]["hello"] + b"\x01"}], "is of another run or version"),
        (lambda t: [*t[:2], {}], "a hello cannot be read"),
        (lambda t: [*t[:2], None], "a hello cannot be read"),
        (lambda t: [*t[:2], changed_hello(t[2]["hello"], name=b"\xff")], "a hello cannot be read"),
    ],
)
def test_hellos_that_a_site_refuses(tmp_path: Path, change: Any, why: str) -> None:
    sites = keys_in(tmp_path, {})
    told = [site.hello(RUN) for site in sites.values()]
    with pytest.raises(SumRefused, match=f"site 'a': secure sums: .*{why}"):
        sites["a"].agree(RUN, change(told))
    with pytest.raises(SumRefused, match="ask for keys first"):
        sites["a"].pairs(RUN)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"certificate": lambda: certificate("c", root="other")},
            "certificate of site 'c' is none",
        ),
        ({"certificate": lambda: b"none"}, "certificate of site 'c' is none"),
        (
            {"certificate": lambda: certificate("c", days=(-2, -1))},
            "certificate of site 'c' is none",
        ),
        ({"certificate": lambda: certificate("c", days=(1, 2))}, "certificate of site 'c' is none"),
        (
            {"certificate": lambda: certificate("c", days=(30, 31))},
            r"certificate of site 'c' .*20\d\d-.*clock",
        ),
        ({"certificate": lambda: certificate("d", key="c")}, r"certificate .*'c' shows is for \['d'\]"),
        ({"certificate": lambda: certificate("c", key="b")}, "signature of site 'c'"),
    ],
)
def test_certificates_that_a_site_refuses(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    kits = {site: kit(site) for site in SITES}
    kits["c"] = kit("c", **{name: make() for name, make in changes.items()})
    sites = keys_in(tmp_path, kits)
    told = [site.hello(RUN) for site in sites.values()]
    with pytest.raises(SumRefused, match=f"site 'a': secure sums: the {why}"):
        sites["a"].agree(RUN, told)


def test_signatures_pins_and_an_old_root(tmp_path: Path) -> None:
    kits = {site: kit(site) for site in SITES}
    told = {site: keys.hello(RUN) for site, keys in keys_in(tmp_path, kits).items()}
    for without in ("signature", "certificate"):
        left = {key: value for key, value in told["c"].items() if key != without}
        with pytest.raises(SumRefused, match=f"the {without} of site 'c' is no"):  # unsigned among signed: no way down
            SiteKeys("a", tmp_path / "a", kits["a"]).agree(RUN, [told["a"], told["b"], left])
    found = {s: lighter.load_crt_bytes(kits[s].certificate).fingerprint(hashes.SHA256()).hex() for s in SITES[1:]}
    pinned = replace(kits["a"], pins={"b": found["b"].upper(), "c": found["c"]})
    assert SiteKeys("a", tmp_path / "a", pinned).agree(RUN, list(told.values())).first == 3
    for pins, why in (
        ({**found, "b": "ab" * 32}, f"'b' is {found['b']}, pinned is abab"),
        ({"b": found["b"]}, "'c' is"),
    ):
        with pytest.raises(SumRefused, match=rf"the certificate of site {why}"):
            SiteKeys("a", tmp_path / "a", replace(kits["a"], pins=pins)).agree(RUN, list(told.values()))
    old = replace(kits["a"], root=certificate("project", days=(-3, -2)))
    with pytest.raises(SumRefused, match="is none of this project now"):
        SiteKeys("a", tmp_path / "a", old).agree(RUN, list(told.values()))
    assert VECTOR["magic"].encode() == MAGIC
