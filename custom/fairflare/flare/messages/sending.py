"""Bound the bytes of the model that are being sent at one moment, however many sites fetch the model.

A task names the place from which a site fetches the tensors. Every site fetches one piece (a tensor, or several small
ones) after the other, and all sites do so at once. FLARE holds a few copies of each piece until it has arrived, some of
them in reference cycles.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.app_opt.pt.tensor_downloader import TensorDownloadable
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC, DownloadService
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs import dots

UNDER_WAY = 32 * 2**20  # bytes of the model that may be on the way at once; one piece may be larger
BEHIND = 8 * 2**20  # sent bytes after which reference cycles are searched for
PATIENCE = 10.0  # seconds after which a sent piece no longer counts as on the way
LONGEST_WAIT = 30.0  # largest number of seconds that a request waits; FLARE's sites ask again after 600 s

_Key = tuple[str, str]  # site that requests a piece, and id of the model


@contextmanager
def send_in_turns(cell: Any) -> Iterator[bool]:
    """Limit how many bytes of tensors are on their way to the sites over ``cell`` at once, while the context lasts.

    The context yields False if this version of FLARE does not allow it; then all sites are served at once.

    Args:
        cell: FLARE's cell from which the sites fetch; ``None`` if there is no network.
    """
    serve = getattr(DownloadService, "_handle_download", None)
    if cell is None or serve is None:
        yield cell is None
        return
    fobs.register(TensorDecomposer)
    turns = Turns(serve)
    DownloadService.initialize(cell)  # registers FLARE's own handler, which ``turns`` replaces
    route = {"channel": OBJ_DOWNLOADER_CHANNEL, "topic": OBJ_DOWNLOADER_TOPIC}
    decomposer = fobs.get_dot_handler(dots.TENSOR_DOWNLOAD)
    decomposer.to_downloadable = lambda items, max_chunk_size, fobs_ctx: Sent(items, max_chunk_size, turns.models)
    cell.register_request_cb(**route, cb=turns)
    try:
        yield True
    finally:
        del decomposer.to_downloadable
        cell.register_request_cb(**route, cb=serve)
        turns.close()


class Sent(TensorDownloadable):
    """Offer a model to one site for download, in pieces that are made on request.

    FLARE would make pieces in advance and hold them for other sites, which costs memory.

    Args:
        tensors: the model's tensors by name.
        max_chunk_size: largest number of bytes of a piece that holds several tensors.
        models: registry to which this model is added, under the id that FLARE gives it.
    """

    def __init__(self, tensors: Mapping[str, Any], max_chunk_size: int, models: WeakValueDictionary[str, Sent]) -> None:
        super().__init__(tensors, max_chunk_size)
        self._models = models

    def set_transaction(self, tx_id: str, ref_id: str) -> None:
        super().set_transaction(tx_id, ref_id)
        if self.num_receivers == 1:
            self.clear_cache()  # from now on FLARE holds no piece
        self._models[ref_id] = self

    def prefetch_item(self, index: int) -> None:
        """Do nothing, since a piece is made only when a site requests it."""

    def bytes_after(self, state: Any) -> int:
        """Return an upper bound on the bytes of the next piece; 0: the last piece has arrived.

        ``state`` is FLARE's description of the part of the model that has arrived.
        """
        arrived = sum(state.values()) if state else 0  # FLARE's state: number of the first tensor of a piece, and count
        if not 0 <= arrived < len(self.keys):
            return 0
        size = self.get_item_size(arrived)
        return 0 if size is None else max(int(size), int(self.max_chunk_size))


class Turns:
    """Serve requests for pieces of models in turns: as many at once as fit, further requests wait in order of arrival.

    A piece counts as on the way until its site requests the next piece or reports that it has all, but at most
    :data:`PATIENCE` seconds, so that a dead or slow site does not block other sites. No request waits longer than
    :data:`LONGEST_WAIT`. A waiting request occupies no thread.

    Args:
        serve: FLARE's handler of a request.
        under_way: bytes that may be on the way at once; a larger piece is sent alone.
        patience, longest_wait: limits in seconds, in place of :data:`PATIENCE` and :data:`LONGEST_WAIT`.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        serve: Callable[[Any], Any],
        *,
        under_way: int = UNDER_WAY,
        patience: float = PATIENCE,
        longest_wait: float = LONGEST_WAIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.serve = serve
        self.under_way, self.patience, self.longest_wait, self.clock = under_way, patience, longest_wait, clock
        self.models: WeakValueDictionary[str, Sent] = WeakValueDictionary()
        self._out: dict[_Key, tuple[int, float]] = {}  # pieces on the way: bytes, and time until which they count
        self._waiting: dict[_Key, tuple[Any, int, float, Future[Any]]] = {}  # request, bytes, time of arrival, answer
        self._changed = threading.Condition()
        self._closed = False
        self._sent = 0  # bytes since the last search for reference cycles
        self._thread = threading.Thread(target=self._work, name="fairflare_turns", daemon=True)
        self._thread.start()

    def __call__(self, request: Any) -> Any:
        """Return the answer to a request for a piece, or a future of the answer if the request has to wait."""
        key, size = self._read_request(request)
        with self._changed:
            if self._out.pop(key, None):
                self._changed.notify()
            if size and not self._closed:
                if self._waiting or not self._fits(size):
                    # A repeated request keeps its place in the queue. The site no longer waits for the first answer.
                    since = self._waiting[key][2] if key in self._waiting else self.clock()
                    answer: Future[Any] = Future()
                    self._waiting[key] = request, size, since, answer
                    self._changed.notify()
                    return answer
                self._out[key] = size, self.clock() + self.patience
        return self._serve(request, size)

    def close(self) -> None:
        """Serve all waiting requests for pieces of models, and from now on serve every request at once."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(LONGEST_WAIT)

    def _read_request(self, request: Any) -> tuple[_Key, int]:
        """Return the key of a request (site, model), and the bytes of its piece; 0: no piece of a registered model."""
        payload = request.payload if isinstance(request.payload, Mapping) else {}
        ref = str(payload.get("ref_id"))
        key = str(request.get_header(MessageHeaderKey.ORIGIN)), ref
        model = self.models.get(ref)
        with suppress(TypeError, AttributeError):  # the state is malformed, and FLARE's handler refuses it
            if model is not None and payload.get("confirm") is None and not payload.get("cancel"):
                return key, model.bytes_after(payload.get("state"))
        return key, 0

    def _fits(self, size: int) -> bool:
        return not self._out or sum(bytes_ for bytes_, _ in self._out.values()) + size <= self.under_way

    def _serve(self, request: Any, size: int) -> Any:
        with self._changed:
            due = self._sent + size >= BEHIND
            self._sent = 0 if due else self._sent + size
        if due:
            gc.collect()  # free pieces that were sent, before another one is made
        return self.serve(request)

    def _work(self) -> None:
        while True:
            with self._changed:
                while (transfer := self._next()) is None:
                    if self._closed:
                        return
                    self._changed.wait(self._seconds_to_next())
            request, size, _, answer = transfer
            try:
                answer.set_result(self._serve(request, size))
            except Exception as error:
                answer.set_exception(error)

    def _next(self) -> tuple[Any, int, float, Future[Any]] | None:
        """Remove and return the first waiting request if it may be served now; else return ``None``."""
        now = self.clock()
        self._out = {key: (size, end) for key, (size, end) in self._out.items() if end > now}
        for key, waiting in list(self._waiting.items())[:1]:
            _, size, since, _ = waiting
            if self._closed or self._fits(size) or now >= since + self.longest_wait:
                self._out[key] = size, now + self.patience
                return self._waiting.pop(key)
        return None

    def _seconds_to_next(self) -> float | None:
        """Return the seconds until a waiting request may be served without any event; ``None`` if none waits."""
        if not self._waiting:
            return None
        first = next(iter(self._waiting.values()))[2] + self.longest_wait
        return max(0.0, min([first, *(end for _, end in self._out.values())]) - self.clock())
