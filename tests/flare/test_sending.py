"""Test that the model is sent in turns: few pieces at a time, first come first served, no wait for a dead site."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.streaming.download_service import DownloadService, request_download_chunk
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs import dots

from fairflare.flare.messages import sending
from fairflare.flare.messages.sending import Sent, Turns, send_in_turns

from ..e2e.poc_tools import free_ports

PIECE = 10  # bytes, in the tests without a network


class Clock:
    """Stand in for a clock whose seconds pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """Run ``Turns`` with a FLARE that serves at once and records whom."""

    def __init__(self, under_way: int) -> None:
        self.clock, self.served = Clock(), []
        self.turns = Turns(self.serve, under_way=under_way, patience=10.0, longest_wait=30.0, clock=self.clock)
        self.model = Sent({f"w{index}": torch.zeros(2) for index in range(3)}, PIECE, self.turns.models)
        self.turns.models["model"] = self.model

    def serve(self, request: Any) -> str:
        if request.payload.keys() == {"ref_id", "state"}:  # no word about a piece
            self.served.append(request.site)
        return f"piece for {request.site}"

    def ask(self, site: str, after: int = 0, **told: Any) -> Any:
        """Ask as FLARE calls; ``after``: the number of pieces that the site has."""
        state = {"start": after - 1, "count": 1} if after else None
        told = {"ref_id": "model", "state": state, **told}
        request = SimpleNamespace(site=site, payload=told, get_header={MessageHeaderKey.ORIGIN: site}.get)
        return self.turns(request)

    def pass_by(self, seconds: float) -> None:
        self.clock.now += seconds
        with self.turns._changed:
            self.turns._changed.notify()


@pytest.fixture
def desk() -> Iterator[Callable[[int], Desk]]:
    made: list[Desk] = []

    def make(under_way: int) -> Desk:
        made.append(Desk(under_way))
        return made[-1]

    yield make
    for one in made:
        one.turns.close()


def test_a_third_waits_until_one_of_two_asks_for_the_next(desk):
    desk = desk(2 * PIECE)
    assert desk.ask("a") == "piece for a"
    assert desk.ask("b") == "piece for b"
    third = desk.ask("c")
    assert isinstance(third, Future)
    assert desk.served == ["a", "b"]
    next_of_a = desk.ask("a", after=1)  # it has the first; now it is behind c
    assert third.result(5) == "piece for c"
    assert not next_of_a.done()
    desk.ask("b", confirm="success")
    assert next_of_a.result(5) == "piece for a"
    assert desk.served == ["a", "b", "c", "a"]


def test_who_comes_when_others_wait_does_not_overtake_them(desk):
    desk = desk(2 * PIECE)
    for site in "ab":
        desk.ask(site)
    waiting = [desk.ask(site) for site in "cde"]
    for done, answer in zip("abc", waiting, strict=True):
        desk.ask(done, confirm="success")
        answer.result(5)
    assert desk.served == ["a", "b", "c", "d", "e"]


def test_a_piece_larger_than_the_limit_goes_alone(desk):
    desk = desk(PIECE // 2)
    assert desk.ask("a") == "piece for a"
    second = desk.ask("b")
    assert not second.done()
    desk.ask("a", cancel=True)
    assert second.result(5) == "piece for b"


def test_a_dead_site_keeps_its_place_for_ten_seconds(desk):
    desk = desk(PIECE)
    desk.ask("dead")
    waiting = desk.ask("b")
    desk.pass_by(9.9)
    with pytest.raises(TimeoutError):
        waiting.result(0.2)
    desk.pass_by(0.2)
    assert waiting.result(5) == "piece for b"


def test_nobody_waits_longer_than_thirty_seconds(desk):
    desk = desk(PIECE)
    desk.turns.patience = 1000.0
    desk.ask("slow")
    waiting = desk.ask("b")
    desk.pass_by(30.1)
    assert waiting.result(5) == "piece for b"


def test_the_end_needs_no_turn_and_asking_again_keeps_the_place(desk):
    desk = desk(PIECE)
    desk.ask("a")
    assert desk.ask("b", after=3) == "piece for b"  # all has arrived: FLARE says so
    lost, other = desk.ask("c"), desk.ask("d")
    again = desk.ask("c")
    desk.ask("a", confirm="success")
    assert again.result(5) == "piece for c"
    assert not lost.done()
    assert not other.done()


@pytest.mark.parametrize("told", [{"state": "x"}, {"state": {"start": "x"}}, {"state": 3}, {"ref_id": ["model"]}])
def test_odd_requests_are_left_to_flare(desk, told):
    desk = desk(PIECE)
    desk.ask("a")
    assert desk.ask("b", **told) == "piece for b"


def test_what_flare_raises_goes_to_who_asked_and_the_next_is_served(desk):
    desk = desk(PIECE)
    desk.ask("a")
    failing, fine = desk.ask("b"), desk.ask("c")
    serve = desk.turns.serve
    desk.turns.serve = lambda request: 1 / 0 if request.site == "b" else serve(request)
    desk.ask("a", confirm="success")
    with pytest.raises(ZeroDivisionError):
        failing.result(5)
    desk.pass_by(11)
    assert fine.result(5) == "piece for c"


def test_closing_serves_all_who_wait(desk):
    desk = desk(PIECE)
    desk.ask("a")
    waiting = [desk.ask(site) for site in "bcd"]
    desk.turns.close()
    assert [answer.result(5) for answer in waiting] == ["piece for b", "piece for c", "piece for d"]
    assert desk.ask("e") == "piece for e"
    assert not desk.turns._thread.is_alive()


# -- over FLARE's network

SITES = 6


@pytest.fixture(scope="module")  # FLARE allows one cell of a name in a process
def cells() -> Iterator[tuple[Cell, list[Cell]]]:
    """Return a server and sites of one process, over the loopback interface."""
    url = f"tcp://localhost:{free_ports(1)[0]}"
    server = Cell("server", url, secure=False, credentials={})
    sites = [Cell(f"site-{number}", url, secure=False, credentials={}) for number in range(SITES)]
    for cell in (server, *sites):
        cell.start()
    yield server, sites
    for cell in (*sites, server):
        cell.stop()


def fetched(site: Cell) -> dict[str, torch.Tensor]:
    reply = site.send_request(
        channel="work", topic="task", target="server", request=new_cell_message({}, {}), timeout=30.0
    )
    return reply.payload["model"]


def opened(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[Turns]:
    """Return where the next ``send_in_turns`` puts its objects, with other limits."""
    made: list[Turns] = []
    monkeypatch.setattr(sending, "Turns", lambda serve: made.append(Turns(serve, **settings)) or made[0])
    return made


@pytest.mark.long
def test_every_site_gets_the_same_bits_with_few_pieces_under_way(cells, monkeypatch):
    server, sites = cells
    generator = torch.Generator().manual_seed(3)
    model = {f"w{index}": torch.rand(300_000, generator=generator) for index in range(8)}  # 1.2 MB each
    model["counter"] = torch.tensor(7)
    server.register_request_cb(channel="work", topic="task", cb=lambda request: make_reply("ok", "", {"model": model}))
    limit = 5 * 2**20  # two pieces, which FLARE makes of at most 2 MB
    turns, out, kept = opened(monkeypatch, under_way=limit), [], []
    serve = DownloadService._handle_download

    def watched(request: Any) -> Any:
        reply = serve(request)
        out.append(sum(size for size, _ in turns[0]._out.copy().values()))
        kept.extend(len(sent.cache or ()) + len(sent._prefetch_futures) for sent in turns[0].models.values())
        time.sleep(0.01)  # so that others ask meanwhile
        return reply

    monkeypatch.setattr(DownloadService, "_handle_download", watched)
    with send_in_turns(server) as in_turns, ThreadPoolExecutor(SITES) as pool:
        assert in_turns
        found = list(pool.map(fetched, sites))
    for one in found:
        assert one.keys() == model.keys()
        assert all(torch.equal(one[name], value) and one[name].dtype == value.dtype for name, value in model.items())
    assert 2 * 2**20 < max(out) <= limit
    assert max(kept) == 0
    assert "to_downloadable" not in vars(fobs.get_dot_handler(dots.TENSOR_DOWNLOAD))
    served, ours = len(out), set(turns[0].models)
    again = fetched(sites[0])  # FLARE's own way, after it
    assert all(torch.equal(again[name], value) for name, value in model.items())
    assert len(out) > served
    assert set(turns[0].models) <= ours


@pytest.mark.timeout(60)
def test_sites_that_die_while_they_fetch_hold_nobody_up(cells, monkeypatch):
    server, sites = cells
    model = {f"w{index}": torch.full((600_000,), float(index)) for index in range(4)}  # 2.4 MB each
    server.register_request_cb(channel="work", topic="task", cb=lambda request: make_reply("ok", "", {"model": model}))
    turns = opened(monkeypatch, under_way=2**20, patience=0.3, longest_wait=1000.0)
    dead, living = sites[:2], sites[2:]
    with send_in_turns(server), ThreadPoolExecutor(SITES) as pool:
        for site in dead:  # asks for the first piece, and is not heard of again
            before = set(turns[0].models)
            fobs.dumps(model, fobs_ctx=server.get_fobs_context())
            (ref,) = set(turns[0].models) - before
            pool.submit(request_download_chunk, "server", ref, None, 30.0, site)
        found = list(pool.map(fetched, living))
    assert all(torch.equal(one[name], value) for one in found for name, value in model.items())
