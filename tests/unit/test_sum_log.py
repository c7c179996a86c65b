"""Test which sums a site takes part in: its own mask is opened once for each, and its log outlives every crash."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairflare.core.states import layerwise_average
from fairflare.privacy.sums.exposure import Limits, draw_groups, exposure
from fairflare.privacy.sums.journal import SumLog
from fairflare.privacy.sums.keys import Pairs, SiteKeys, SumRefused
from fairflare.privacy.sums.masks import Addition, SumAsked, SumSpoiled
from fairflare.privacy.sums.ring import BUFFERS, SUMS, TRAINED, SumLayout

SITES = ("a", "b", "c", "d")
LIKE = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
EVEN, APART = [1 / 4] * 4, [0.4, 0.3, 0.2, 0.1]


class Network:
    """Hold sites with their keys, logs and updates, and a server that asks them."""

    def __init__(self, root: Path, sites: Sequence[str] = SITES) -> None:
        self.root, self.sites = root / "experiment", sites  # keys look for old ones beside it, not at other tests'
        draws = torch.Generator().manual_seed(0)
        self.updates = {s: {n: torch.randn(t.shape, generator=draws) / 8 for n, t in LIKE.items()} for s in sites}
        self.logs = {site: SumLog(site, self.root / site, "e") for site in sites}
        self.start(b"\x01" * 32)

    def start(self, run: bytes) -> None:
        """Begin a run: new keys for all."""
        keys = {site: SiteKeys(site, self.root / site) for site in self.sites}
        told = [key.hello(run) for key in keys.values()]
        self.pairs: dict[str, Pairs] = {site: key.agree(run, told) for site, key in keys.items()}

    def sends(self, question: SumAsked, site: str) -> torch.Tensor:
        """Return what a site sends, asked by a message."""
        read = SumAsked.read(site, question.plain())
        return self.logs[site].mask_update(read, self.pairs[site], SumLayout.make(LIKE), self.updates[site])[0]

    def opens(self, question: SumAsked, site: str, present: Sequence[str] = ()) -> bytes:
        """Return the key of a site's own mask."""
        return self.logs[site].release(question, self.pairs[site], present or question.members)

    def sum_of(self, question: SumAsked) -> Mapping[str, torch.Tensor]:
        """Return an opened sum."""
        total = Addition(question, SumLayout.make(LIKE))
        for site in question.members:
            total.add(site, self.sends(question, site))
        return total.open_sum({site: self.opens(question, site) for site in question.members})

    def mean(self, question: SumAsked, name: str) -> torch.Tensor:
        """Return the weighted mean of the updates in the clear."""
        return sum(question.table[s][0] * self.updates[s][name].double() for s in question.members)  # type: ignore


@pytest.fixture
def net(tmp_path: Path) -> Network:
    """Return four sites."""
    return Network(tmp_path)


def ask(weights: Sequence[float] = APART, label: str = "params", **changes: Any) -> SumAsked:
    """Return a question of sites a, b, c, ... with one weight each."""
    table = {chr(97 + k): (weight,) for k, weight in enumerate(weights)}
    return SumAsked(**{**vars(SumAsked(0, 0, "params", TRAINED, bytes(32), table)), "label": label, **changes})


def lines(net: Network, site: str = "a") -> list[dict[str, Any]]:
    """Return the lines of a site's log."""
    return [json.loads(line) for line in (net.root / site / "sums.log").read_text().splitlines()]


def test_a_round_of_two_sums(net: Network) -> None:
    """Hold anchor and weighted sum to the mean in the clear, and the log to what was asked."""
    for question in (ask(EVEN, "anchor"), ask()):
        opened = net.sum_of(question)
        assert {name: tensor.shape for name, tensor in opened.items()} == {"b": (3,), "w": (2, 3)}
        for name, tensor in opened.items():
            assert float((tensor - net.mean(question, name)).abs().max()) <= 4 * 2.0**-31
    sent, released, *_ = lines(net)
    assert [line["what"] for line in lines(net)] == ["sent", "released"] * 2
    assert {name: sent[name] for name in ("experiment", "round", "label", "attempt", "members", "table")} == {
        "experiment": "e", "round": 0, "label": "anchor", "attempt": 0, "members": list("abcd"),
        "table": {site: [0.25] for site in "abcd"},
    }  # fmt: skip
    assert (sent["context"], sent["model"]) == (ask(EVEN, "anchor").context().hex(), bytes(32).hex())
    assert (released["run"], released["context"]) == (("01" * 32), sent["context"])
    assert (net.root / "a" / "sums.log").stat().st_mode & 0o777 == 0o600


def test_a_slice_is_summed_with_the_weights_of_its_owners(net: Network) -> None:
    """Expect (.4 * .1 + .3 * .2 + .2 * .4) / .9 = .2 of the column that d lacks, and none of what nobody may add."""
    for site, value in zip(SITES, (0.1, 0.2, 0.4, 0.9), strict=True):
        net.updates[site]["w"][:, 1] = value
    own = {"a": 4 / 9, "b": 3 / 9, "c": 2 / 9}
    question = ask(slices=json.dumps([["w", 1, [None, own, {}]]]))
    opened = net.sum_of(question)
    torch.testing.assert_close(opened["w"][:, 0], net.mean(question, "w")[:, 0], atol=2e-9, rtol=0)
    torch.testing.assert_close(opened["w"][:, 1], torch.full((2,), 0.2, dtype=torch.float64), atol=5e-8, rtol=0)
    assert opened["w"][:, 2].tolist() == [0, 0]
    torch.testing.assert_close(opened["b"], net.mean(question, "b"), atol=2e-9, rtol=0)


@pytest.mark.parametrize("slices", [[["w", 1, [None, {}]]], [["v", 0, [{}]]], [["b", 1, [{}]]]])
def test_slices_of_another_model_are_refused(net: Network, slices: Any) -> None:
    with pytest.raises(SumRefused, match=r"'slices' has \d of '[wvb]', .*use one"):
        net.sends(ask(slices=json.dumps(slices)), "a")


def test_weights_by_layer_are_those_of_the_average(net: Network) -> None:
    owner = {"w": "first", "b": "last"}
    layout = SumLayout.make(LIKE, owner)
    table = {site: (x, y) for site, x, y in zip(SITES, EVEN, APART, strict=True)}
    question = replace(ask(), table=table)
    total = Addition(question, layout)
    for site in SITES:
        total.add(site, net.logs[site].mask_update(question, net.pairs[site], layout, net.updates[site])[0])
    opened = total.open_sum({site: net.opens(question, site) for site in SITES})
    by_layer = {layer: {s: table[s][k] for s in SITES} for k, layer in enumerate(layout.layers)}
    for name, tensor in layerwise_average(net.updates, by_layer, owner, updates=True).items():
        assert torch.allclose(opened[name].float(), tensor, atol=1e-7, rtol=0)
    with pytest.raises(SumRefused, match=r"site 'a': .*has 1 layers, its model 2"):
        net.logs["a"].mask_update(ask(round=1, model=b"\x01" * 32), net.pairs["a"], layout, net.updates["a"])


def test_clipped_numbers_are_counted(net: Network) -> None:
    net.updates["a"]["w"] = torch.tensor([[1.0, -1.0, 0.0], [1.1, -7.0, 0.5]])
    sent = net.logs["a"].mask_update(ask(), net.pairs["a"], SumLayout.make(LIKE), net.updates["a"])
    assert (sent[1], sent[0].dtype, sent[0].shape) == (2, torch.int32, (9,))


def test_large_tensors_go_by_blocks(net: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = net.sends(ask(), "a")
    monkeypatch.setattr("fairflare.privacy.sums.ring.BLOCK", 2)
    assert torch.equal(net.sends(ask(), "a"), whole)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (torch.tensor([[0, 0, 0], [0, 0, torch.nan]]), "tensor 'w' is not finite; lower"),
        (torch.tensor([[0, 0, 0], [0, 0, -torch.inf]]), "tensor 'w' is not finite; lower"),
        (torch.zeros(3, 2), r"'w' is \(3, 2\), not \(2, 3\); use one"),
    ],
)
def test_an_update_that_cannot_be_summed_stays(net: Network, odd: torch.Tensor, why: str) -> None:
    net.updates["a"]["w"] = odd
    with pytest.raises(SumRefused, match=why):
        net.sends(ask(), "a")
    assert not (net.root / "a" / "sums.log").exists()


def test_the_same_question_gets_the_same_bits(net: Network) -> None:
    """Hold a second answer to the first one, also of a new process, and refuse another vector under the same masks."""
    first = net.sends(ask(), "a")
    net.logs["a"], net.pairs["a"] = SumLog("a", net.root / "a", "e"), SiteKeys("a", net.root / "a").pairs(b"\x01" * 32)
    assert torch.equal(net.sends(ask(), "a"), first)
    assert len(lines(net)) == 1
    net.updates["a"]["w"][0, 0] += 1e-6
    with pytest.raises(SumRefused, match="its numbers are others than before; bring"):
        net.sends(ask(), "a")


def test_a_site_lost_before_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the new attempt to the mean of those who are left, and the old one closed though the late vector came."""
    monkeypatch.setitem(LIKE, "b", torch.zeros(60))  # of few numbers, wrong masks leave all small every now and then
    net = Network(tmp_path)
    old, new = ask(), ask([0.4, 0.35, 0.25], attempt=1)
    late = [net.sends(old, site) for site in SITES]
    opened = net.sum_of(new)
    assert float((opened["w"] - net.mean(new, "w")).abs().max()) <= 3 * 2.0**-31
    for site in "abc":
        with pytest.raises(SumRefused, match=r"attempt 1 is open already"):
            net.opens(old, site)
    total = Addition(old, SumLayout.make(LIKE))
    for site, vector in zip(SITES, late, strict=True):
        total.add(site, vector)
    with pytest.raises(SumSpoiled):  # the own masks of the new attempt are others
        total.open_sum({site: net.opens(new, site) for site in "abc"} | {"d": net.opens(old, "d")})


def test_two_open_sums_would_give_a_site_away(net: Network) -> None:
    """Hold the second attempt closed once the first is open: together they give the lost site's numbers."""
    old, new = ask(), ask([4 / 9, 3 / 9, 2 / 9], attempt=1)
    opened = net.sum_of(old)
    lost = (opened["w"] - 0.9 * net.mean(new, "w")) / 0.1
    assert torch.allclose(lost.float(), net.updates["d"]["w"], atol=1e-6)
    for site in "abc":
        with pytest.raises(SumRefused, match="attempt 0 is open already; ask"):
            net.sends(new, site)
    assert torch.equal(net.sum_of(old)["w"], opened["w"])  # asked again, as after a lost reply


def test_attempts_only_grow(net: Network) -> None:
    net.sends(ask(attempt=2), "a")
    for attempt in (1, 2):
        with pytest.raises(SumRefused, match="attempt 2 was asked for already; ask"):
            net.sends(ask(EVEN, attempt=attempt), "a")
    net.sends(ask(EVEN, attempt=3), "a")
    with pytest.raises(SumRefused, match="attempt 3 was asked for already"):
        net.opens(ask(attempt=2), "a")  # a newer one is on its way


def test_an_earlier_round_is_over(net: Network) -> None:
    net.sends(ask(), "a")
    net.sends(ask(round=1, model=b"\x01" * 32), "a")
    for refused in (net.sends, net.opens):
        with pytest.raises(SumRefused, match="'params' of round 0: round 1 has begun"):
            refused(ask(), "a")


def test_a_release_needs_all_members_and_a_vector(net: Network) -> None:
    with pytest.raises(SumRefused, match="no numbers for this question; ask"):
        net.opens(ask(), "a")
    net.sends(ask(), "a")
    for present in ("abc", "abcde", "abbd"):
        with pytest.raises(SumRefused, match=r"present are .*\['a', 'b', 'c', 'd'\]"):
            net.opens(ask(), "a", present)
    assert [line["what"] for line in lines(net)] == ["sent"]
    net.opens(ask(), "a")
    with pytest.raises(SumRefused, match="sent no numbers for this question"):
        net.opens(ask(EVEN, "anchor"), "a")


def test_exposure_counts_at_the_release_too(net: Network) -> None:
    """Ask for two vectors before either mask is open: only one of them opens."""
    anchor, params = ask(EVEN, "anchor"), ask([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    net.sends(anchor, "a")
    net.sends(params, "a")
    net.opens(params, "a")
    with pytest.raises(SumRefused, match=r"would show a site's numbers to 1.0000"):
        net.opens(anchor, "a")
    with pytest.raises(SumRefused, match=r"would show a site's numbers to 1.0000"):
        net.sends(anchor, "a")


def test_the_second_sum_has_the_members_of_the_first(tmp_path: Path) -> None:
    net = Network(tmp_path, "abcde")
    net.sum_of(ask([0.2] * 5, "anchor"))
    with pytest.raises(SumRefused, match=r"is not of \['a', 'b', 'c', 'd'\]"):
        net.sends(ask(), "a")
    net.sends(ask(label="buffers", ring=BUFFERS), "a")  # of other numbers
    net.sends(ask(round=1, model=b"\x01" * 32), "a")


def test_a_resumed_round(tmp_path: Path) -> None:
    """Let a new run ask again for what was opened, with the same members and weights; nothing else of that model."""
    net = Network(tmp_path, "abc")
    first = net.sum_of(ask([0.4, 0.3, 0.3]))
    net.start(b"\x02" * 32)
    with pytest.raises(SumRefused, match="other members or weights in round 0"):
        net.sends(ask([0.3, 0.4, 0.3]), "a")
    again = net.sum_of(ask([0.4, 0.3, 0.3]))
    assert torch.equal(again["w"], first["w"])
    net.start(b"\x03" * 32)
    net.updates["a"]["b"][0] += 1e-3  # trained anew, with another result
    with pytest.raises(SumRefused, match="its numbers are others than before"):
        net.sends(ask([0.4, 0.3, 0.3]), "a")
    other = SumLog("a", net.root / "a", "another experiment")
    other.mask_update(ask([0.3, 0.4, 0.3]), net.pairs["a"], SumLayout.make(LIKE), net.updates["a"])
    net.sum_of(ask([0.3, 0.4, 0.3], round=1, model=b"\x01" * 32))  # a newer model


def test_a_resumed_round_that_was_not_open_is_free(net: Network) -> None:
    net.sends(ask(), "a")
    net.start(b"\x02" * 32)
    net.updates["a"]["b"][0] += 1e-3
    net.sends(ask(EVEN), "a")


def test_the_limits_are_the_sites_own(net: Network) -> None:
    net.logs["a"] = SumLog("a", net.root / "a", "e", Limits(max_weight=0.35))
    with pytest.raises(SumRefused, match=r"weight 0.4 .*0.35 \(secure_max_weight\)"):
        net.sends(ask(), "a")
    net.logs["a"] = SumLog("a", net.root / "a", "e", Limits(max_exposure=0.7))
    with pytest.raises(SumRefused, match=r"0.7303, .* 0.7 \(secure_max_exposure\)"):
        net.sends(ask(), "a")


@pytest.mark.parametrize("when", ["before the line", "after the line"])
def test_killed_while_it_sends(net: Network, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Hold what a site answers after a crash, before and after its line is on disk, to one vector and one line."""
    real = SumLog._append

    def killed(self: SumLog, record: Mapping[str, Any]) -> None:
        if when == "after the line":
            real(self, record)
        raise KeyboardInterrupt

    for does, count in ((net.sends, 1), (net.opens, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(SumLog, "_append", killed)
            with pytest.raises(KeyboardInterrupt):
                does(ask(), "a")
        first = does(ask(), "a")
        assert str(does(ask(), "a")) == str(first)
        assert len(lines(net)) == count


def test_a_line_that_a_crash_has_cut_is_left_out(net: Network) -> None:
    net.sends(ask(), "a")
    log = net.root / "a" / "sums.log"
    log.write_bytes((whole := log.read_bytes()) + b'{"what": "rele')
    net.sends(ask(), "a")
    assert log.read_bytes() == whole
    net.opens(ask(), "a")
    assert [line["what"] for line in lines(net)] == ["sent", "released"]


@pytest.mark.parametrize("damage", [b"x\n", b"[1]\n", b"{}\n", b'{"what": "sent"}\n', b"\xff\n"])
def test_a_damaged_log_is_refused(net: Network, damage: bytes) -> None:
    (net.root / "a" / "sums.log").write_bytes(damage)
    with pytest.raises(SumRefused, match=r"site 'a': .*\(sums.log\) is damaged"):
        net.sends(ask(), "a")


def test_a_log_that_is_gone_or_older_is_refused(net: Network) -> None:
    """Take the log away, cut it, and put an older copy back, between two questions: no sum is opened twice."""
    first, log = ask(), net.root / "a" / "sums.log"
    net.sends(first, "a")
    older = log.read_bytes()
    net.opens(first, "a")
    whole, second = log.read_bytes(), ask(EVEN, attempt=1)
    for content in (None, b"", older, whole[:-20], whole.replace(b"0.4", b"0.5")):
        log.unlink()
        if content is not None:
            log.write_bytes(content)
        for does in (net.sends, net.opens):
            with pytest.raises(SumRefused, match=r"site 'a': .*damaged, .*sums.head or gone"):
                does(second, "a")
        log.write_bytes(whole)
        assert torch.equal(net.sends(first, "a"), net.sends(first, "a"))
    (net.root / "a" / "sums.head").write_text("nonsense")
    with pytest.raises(SumRefused, match="is damaged, cut"):
        net.sends(first, "a")


def test_norms_are_summed_once_for_each_model_of_a_round(net: Network) -> None:
    """Open norms of two models in a round; not of the same one with other members, numbers or in a later round."""
    first, second = (ask(EVEN, "norms", ring=BUFFERS, model=bytes([number]) * 32) for number in (1, 2))
    for question in (first, replace(second, attempt=1)):
        found = net.sum_of(question)["w"]
        torch.testing.assert_close(found, net.mean(question, "w"), atol=1e-11, rtol=0)
    fewer = [1 / 3] * 3
    with pytest.raises(SumRefused, match="attempt 0 is open already"):
        net.sends(ask(fewer, "norms", ring=BUFFERS, model=first.model, attempt=2), "a")
    with pytest.raises(SumRefused, match=r"the same model .* weights in round 0"):
        net.sends(ask(fewer, "norms", ring=BUFFERS, model=first.model, round=1), "a")
    net.updates["a"] = {name: tensor + 1 for name, tensor in LIKE.items()}
    with pytest.raises(SumRefused, match="its numbers are others than before"):
        net.sends(replace(first, round=1), "a")
    # Everything else is summed once in a round, whatever the model is.
    net.sum_of(ask(EVEN, "class_gradients", ring=BUFFERS))
    with pytest.raises(SumRefused, match="attempt 0 is open already"):
        net.sends(ask(fewer, "class_gradients", ring=BUFFERS, attempt=1, model=bytes([3]) * 32), "a")


# ------------------------------------------------------------------------------------------------ groups of sites

SIX = "abcdef"
PARTS = draw_groups("e", dict.fromkeys(SIX, 1 / 6))
OTHER = [dict.fromkeys(part, 1 / 3) for part in ("abd", "cef") if dict.fromkeys(part, 1 / 3) not in PARTS]


def dealt(net: Network, parts: Sequence[Mapping[str, float]]) -> None:
    """Let the server ask for sums of these groups from now on."""
    net.logs = {site: SumLog(site, net.root / site, "e", parts=parts) for site in net.sites}


def of_group(site: str, parts: Sequence[Mapping[str, float]] = PARTS, **changes: Any) -> SumAsked:
    """Return the question for the sum of a site's group."""
    part = next(part for part in parts if site in part)
    return replace(ask(), table={name: (weight,) for name, weight in part.items()}, **{"round": 1, **changes})


@pytest.mark.parametrize("seed", range(20))
def test_a_groups_weights_are_those_of_its_sites_alone_to_the_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = {f"site-{k}": int(rng.integers(20, 4000)) for k in range(6 + seed % 5)}
    for part in draw_groups("e", {site: count / sum(counts.values()) for site, count in counts.items()}):
        assert part == {site: counts[site] / sum(counts[one] for one in part) for site in part}


def test_the_draw_is_that_of_the_names() -> None:
    """Hold the draw to one made by hand: sorted by SHA-256 of length-prefixed texts, dealt like cards."""

    def order(turn: bytes) -> list[str]:
        texts = {s: (b"fairflare-sum-1", b"group", b"e", turn, s.encode()) for s in "abcdefgh"}
        joined = {s: b"".join(struct.pack("<I", len(x)) + x for x in of) for s, of in texts.items()}
        return sorted(joined, key=lambda s: hashlib.sha256(joined[s]).hexdigest())

    even = dict.fromkeys("hgfedcba", 1 / 8)
    first = order(b"0")
    assert [*map(sorted, draw_groups("e", even))] == sorted([sorted(first[::2]), sorted(first[1::2])])
    assert all(weight == 1 / 4 for part in draw_groups("e", even) for weight in part.values())
    many = [dict.fromkeys(map(str, range(n)), 1.0) for n in (3, 5, 6, 8, 11)]
    assert [sorted(map(len, draw_groups("e", of))) for of in many] == [[], [], [3, 3], [4, 4], [3, 4, 4]]
    assert draw_groups("e", many[4]) != draw_groups("f", many[4])
    # Two large sites: a group of both has a site with at most half of the weight, the first turn in which they are one.
    large = even | {first[0]: 0.5, first[1]: 0.5}
    (turn, *_) = (k for k in range(99) if (of := order(b"%d" % k)).index(first[0]) % 2 == of.index(first[1]) % 2)
    assert [*map(sorted, draw_groups("e", large))] == sorted([sorted(order(b"%d" % turn)[k::2]) for k in (0, 1)])
    assert draw_groups("e", even | {"a": 5.0}) == []  # no group in which a has but half of the weight


def test_the_sum_of_a_group_after_a_lost_round(tmp_path: Path) -> None:
    net = Network(tmp_path, SIX)
    net.sum_of(ask([1 / 6] * 6))
    net.start(b"\x02" * 32)
    dealt(net, PARTS)
    for part in PARTS:
        question, site = of_group(min(part)), min(part)
        opened = net.sum_of(question)
        assert float((opened["w"] - net.mean(question, "w")).abs().max()) <= 3 * 2.0**-31
        assert lines(net, site)[-1]["what"] == "released"
        assert net.opens(question, site, SIX)  # sites of other groups may be there too
    net.sum_of(of_group("a", round=2, model=b"\x05" * 32))  # and in the rounds to come


@pytest.mark.parametrize(
    ("parts", "question", "why"),
    [
        (PARTS[::-1], of_group("a"), "drawn from the members of a sum"),
        (PARTS, of_group("a", round=0), "members of a sum .*in an earlier round"),
        (PARTS, of_group("a", model=b"\x07" * 32), "drawn from the members of a sum"),
        (OTHER, of_group("a", OTHER), "drawn from the members of a sum"),
        ([dict.fromkeys("abcdef", 1 / 6)], replace(ask([1 / 6] * 6), round=1), "not drawn from"),
        (PARTS, replace(of_group("a"), table=dict.fromkeys("abf", (1 / 3,))), r"its members are .*, its group is \["),
        (PARTS, replace(of_group("a"), table=dict.fromkeys(of_group("a").table, (0.4,))), "not those of its group"),
        (PARTS, replace(of_group("a"), label="class_gradients", ring=BUFFERS), "by class are not summed in groups"),
    ],
)
def test_groups_that_a_lying_server_asks_for(parts: Any, question: SumAsked, why: str, tmp_path: Path) -> None:
    net = Network(tmp_path, SIX)
    net.sum_of(ask([1 / 6] * 6))
    dealt(net, parts)
    with pytest.raises(SumRefused, match=why):
        net.sends(question, "a")


def test_groups_of_people_are_summed_over_all_sites_alone(tmp_path: Path) -> None:
    """Take sums of six sites and, as if sites had been dealt, of five: the sixth's numbers; hold the second closed."""
    net = Network(tmp_path, SIX)
    opened = net.sum_of(ask([1 / 6] * 6, "groups", ring=SUMS))
    fewer = ask([1 / 5] * 5, "groups", ring=SUMS, round=1, model=b"\x05" * 32)
    difference = 6 * opened["w"] - 5 * net.mean(fewer, "w")
    assert torch.allclose(difference.float(), net.updates["f"]["w"], atol=1e-5)
    for parts in (PARTS, [dict.fromkeys(SIX, 1.0)], [dict.fromkeys("abcde", 1.0)]):
        dealt(net, parts)
        with pytest.raises(SumRefused, match="numbers by group are not summed"):
            net.sends(fewer, "a")


def test_sums_of_two_partitions_would_give_single_sites_away(tmp_path: Path) -> None:
    """Take sums of {a, b, c} and, a round later, of {a, b, c, d}: d's update; hold all sites to their first groups.

    Updates of neighbouring rounds are nearly equal: here they differ by a tenth of their size.
    """
    seven, draws = "abcdefg", torch.Generator().manual_seed(1)
    net = Network(tmp_path, seven)
    net.sum_of(ask([1 / 7] * 7))
    first = draw_groups("e", dict.fromkeys(seven, 1 / 7))
    small, large = sorted(map(list, first), key=len)
    dealt(net, first)
    opened = {part: net.sum_of(of_group(part[0], first)) for part in (tuple(small), tuple(large))}
    later = {site: of["w"].double() + torch.randn(2, 3, generator=draws) / 80 for site, of in net.updates.items()}
    victim, joined = large[0], sorted([*small, large[0]])
    difference = sum(later[site] for site in joined) - 3 * opened[tuple(small)]["w"]
    pair = torch.stack([difference.flatten(), later[victim].flatten()])
    assert float(torch.corrcoef(pair)[0, 1]) > 0.95
    rows = [dict.fromkeys(small, (1 / 3,)), dict.fromkeys(joined, (1 / 4,))]
    assert float(exposure(rows)[0, joined.index(victim)]) == pytest.approx(1, abs=1e-12)
    same = [{**part, min(part): part[min(part)] / 2, max(part): part[max(part)] * 1.5} for part in first]
    swapped = [dict.fromkeys(joined, 1 / 4), dict.fromkeys(sorted(set(large) - {victim}), 1 / 3)]
    for parts in (swapped, same, []):  # another partition, other weights in the same groups, all sites again
        dealt(net, parts)
        for site in seven:
            question = of_group(site, parts or [dict.fromkeys(seven, 1 / 7)], round=2, model=b"\x05" * 32)
            with pytest.raises(SumRefused, match="with fixed weights; others would"):
                net.sends(question, site)


def test_a_lost_round_is_no_way_to_a_second_sum(tmp_path: Path) -> None:
    """Let a server that has opened a sum say that it was lost, and ask for the same updates, or for fewer sites."""
    net = Network(tmp_path, SIX)
    net.sum_of(ask([1 / 6] * 6))
    net.start(b"\x02" * 32)
    with pytest.raises(SumRefused, match="other members or weights in round 0"):
        net.sends(ask([0.2] * 5), "a")  # the same updates
    with pytest.raises(SumRefused, match=r"other members .* If \['f'\] cannot come"):
        net.sends(ask([0.2] * 5, round=1), "a")  # trained anew from the same model, so nearly the same updates
    with pytest.raises(SumRefused, match="another sum of these numbers is not of"):
        net.sends(ask([0.2] * 5, "anchor", round=1), "a")
    net.updates["a"]["w"] += 0.01
    with pytest.raises(SumRefused, match="its numbers are others than before"):
        net.sends(ask([1 / 6] * 6), "a")
    net.sends(ask([1 / 6] * 6, round=1), "a")  # the same sites and weights, trained anew: nothing about one of them


def test_a_group_in_which_one_site_would_show_is_refused_by_it(tmp_path: Path) -> None:
    """Ask for equal weights beside a sum of all with others: less the other group's sum it gives the large site's."""
    net = Network(tmp_path, SIX)
    large = min(PARTS[0])
    net.sum_of(ask([4 / 9 if site == large else 1 / 9 for site in SIX]))
    dealt(net, PARTS)
    with pytest.raises(SumRefused, match=r"beside that of all .*1.0000, .* 0.95"):
        net.sends(of_group(large), large)


QUESTIONS = st.tuples(
    st.sampled_from(["params", "anchor", "buffers"]), st.integers(0, 1), st.integers(0, 2), st.integers(0, 1),
    st.sampled_from([EVEN, APART, [0.5, 1 / 6, 1 / 6, 1 / 6], [0.4, 0.3, 0.3], [1 / 3] * 3, [0.2] * 5]),
)  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2), QUESTIONS), min_size=4, max_size=25))
def test_whatever_a_server_asks(tmp_path_factory: pytest.TempPathFactory, asked: list[Any]) -> None:
    """Hold what a site has released, after questions in any order and in two runs, to what may be open together."""
    net = Network(tmp_path_factory.mktemp("net"), "abcde")
    pairs = {run: replace(net.pairs["a"], run=bytes([run]) * 32) for run in (1, 2)}
    released: dict[Any, set[tuple[float, ...]]] = {}
    attempts: dict[Any, set[bytes]] = {}
    for again, run, (label, number, attempt, model, weights) in asked:
        question = ask(weights, label, round=number, attempt=attempt, model=bytes([model]) * 32)
        for does in (net.sends, net.opens)[: 1 + again]:
            net.pairs["a"] = pairs[run]
            try:
                answer = does(question, "a")
            except SumRefused:
                continue
            if does == net.opens:
                assert len(answer) == 32
                attempts.setdefault((run, number, label), set()).add(question.context())
                released.setdefault((model, question.vectors), set()).add(tuple(weights))
    assert all(len(contexts) == 1 for contexts in attempts.values())
    for rows in released.values():
        assert len({len(row) for row in rows}) == 1  # members
        matrix = np.array(sorted(rows))
        for unit in np.eye(len(matrix[0])):  # the combination of sums that is nearest to one site's numbers
            left = unit - matrix.T @ np.linalg.lstsq(matrix.T, unit, rcond=1e-10)[0]
            assert 1 - left @ left <= 0.95**2 + 1e-9
