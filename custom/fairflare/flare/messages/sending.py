"""How much of the model is on its way at one moment: a bounded part, however many sites fetch it.

A task tells a site where to fetch the tensors, and every site fetches one piece after the other (a tensor, or several
small ones), all sites at once. For each piece FLARE has a few copies until it has arrived, also in reference cycles.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.app_opt.pt.tensor_downloader import TensorDownloadable
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC, DownloadService
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs import dots

UNDER_WAY = 32 * 2**20  # bytes of the model; one piece may be larger
BEHIND = 8 * 2**20  # bytes after which cycles are looked for
PATIENCE = 10.0  # seconds after which a piece that nobody asks to follow does not count any more
LONGEST_WAIT = 30.0  # seconds; FLARE's sites ask again after 600 s

_Key = tuple[str, str]  # who asks, for which model


@contextmanager
def sent_in_turns(cell: Any) -> Iterator[bool]:
    """Send the tensors of tasks over ``cell`` with few bytes under way, as long as the context lasts.

    False: this FLARE has no place for it, all sites are served at once.

    Args:
        cell: FLARE's, which the sites fetch from; ``None``: there is no network.
    """
    serve = getattr(DownloadService, "_handle_download", None)
    if cell is None or serve is None:
        yield cell is None
        return
    fobs.register(TensorDecomposer)
    turns = Turns(serve)
    DownloadService.initialize(cell)  # registers its own handler, which ours replaces
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
    """A model for one site. FLARE makes pieces ahead and keeps them for other sites; here neither, they cost memory.

    Args:
        tensors: by name.
        max_chunk_size: bytes of a piece of several tensors at most.
        models: where it can be found by FLARE's id of it.
    """

    def __init__(self, tensors: Mapping[str, Any], max_chunk_size: int, models: WeakValueDictionary[str, Sent]) -> None:
        super().__init__(tensors, max_chunk_size)
        self._models = models

    def set_transaction(self, tx_id: str, ref_id: str) -> None:
        super().set_transaction(tx_id, ref_id)
        if self.num_receivers == 1:
            self.clear_cache()  # and from now on nothing is kept
        self._models[ref_id] = self

    def prefetch_item(self, index: int) -> None:
        """Do nothing: a piece is not made before it is asked for."""

    def bytes_after(self, state: Any) -> int:
        """Return the bytes, at most, of the piece that follows what has arrived; 0 when that was the last piece.

        ``state`` says what has arrived.
        """
        arrived = sum(state.values()) if state else 0  # FLARE's: number of the first tensor, and how many
        if not 0 <= arrived < len(self.keys):
            return 0
        size = self.get_item_size(arrived)
        return 0 if size is None else max(int(size), int(self.max_chunk_size))


class Turns:
    """FLARE's handler of requests for pieces, called for as many as fit; the others wait, first come, first served.

    A piece is under way until its site asks for the next one or says that it has all, :data:`PATIENCE` seconds at most,
    so that a site that died or is slow does not keep the others from theirs; and nobody waits longer than
    :data:`LONGEST_WAIT`. Who waits keeps no thread busy.

    Args:
        serve: FLARE's handler.
        under_way: bytes; a larger piece goes alone.
        patience, longest_wait: seconds.
        clock: in seconds.
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
        self._out: dict[_Key, tuple[int, float]] = {}  # bytes, until when they count
        self._waiting: dict[_Key, tuple[Any, int, float, Future[Any]]] = {}  # request, bytes, since when, its answer
        self._changed = threading.Condition()
        self._closed = False
        self._sent = 0  # bytes since cycles were last looked for
        self._thread = threading.Thread(target=self._work, name="fairflare_turns", daemon=True)
        self._thread.start()

    def __call__(self, request: Any) -> Any:
        """Return the answer, or a future of it."""
        key, size = self._asked(request)
        with self._changed:
            if self._out.pop(key, None):
                self._changed.notify()
            if size and not self._closed:
                if self._waiting or not self._fits(size):
                    # A repeated request keeps its place in the queue; nobody waits any more for the first answer.
                    since = self._waiting[key][2] if key in self._waiting else self.clock()
                    answer: Future[Any] = Future()
                    self._waiting[key] = request, size, since, answer
                    self._changed.notify()
                    return answer
                self._out[key] = size, self.clock() + self.patience
        return self._served(request, size)

    def close(self) -> None:
        """Serve whoever waits, and from now on serve everyone at once."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(LONGEST_WAIT)

    def _asked(self, request: Any) -> tuple[_Key, int]:
        """Return who asks, and bytes of what is asked for; 0: not a piece of one of our models."""
        told = request.payload if isinstance(request.payload, Mapping) else {}
        ref = str(told.get("ref_id"))
        key = str(request.get_header(MessageHeaderKey.ORIGIN)), ref
        model = self.models.get(ref)
        if model is None or told.get("confirm") is not None or told.get("cancel"):
            return key, 0
        try:
            return key, model.bytes_after(told.get("state"))
        except (TypeError, AttributeError):  # FLARE's handler refuses it
            return key, 0

    def _fits(self, size: int) -> bool:
        return not self._out or sum(bytes_ for bytes_, _ in self._out.values()) + size <= self.under_way

    def _served(self, request: Any, size: int) -> Any:
        with self._changed:
            self._sent += size
            due = self._sent >= BEHIND
            if due:
                self._sent = 0
        if due:
            gc.collect()  # of what is behind, before there is more
        return self.serve(request)

    def _work(self) -> None:
        while True:
            with self._changed:
                found = self._next()
                while found is None:
                    if self._closed:
                        return
                    self._changed.wait(self._until_next())
                    found = self._next()
            request, size, _, answer = found
            try:
                answer.set_result(self._served(request, size))
            except Exception as error:
                answer.set_exception(error)

    def _next(self) -> tuple[Any, int, float, Future[Any]] | None:
        """Take the first that waits, when it is its turn."""
        now = self.clock()
        self._out = {key: (size, end) for key, (size, end) in self._out.items() if end > now}
        for key, waiting in self._waiting.items():
            _, size, since, _ = waiting
            if self._closed or self._fits(size) or now >= since + self.longest_wait:
                del self._waiting[key]
                self._out[key] = size, now + self.patience
                return waiting
            break
        return None

    def _until_next(self) -> float | None:
        """Return seconds until the next turn may come without anybody asking; ``None``: nobody waits."""
        if not self._waiting:
            return None
        first = next(iter(self._waiting.values()))[2] + self.longest_wait
        return max(0.0, min([first, *(end for _, end in self._out.values())]) - self.clock())
