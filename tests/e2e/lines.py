"""Simulate a slow or broken line between a site and its server, by a TCP proxy on loopback in this process."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

PIECE = 1 << 16


class Line:
    """Listen on a free port, and pass on all data both ways.

    Args:
        port: of the server, on loopback.
        bytes_per_second: each way, over all connections; ``None``: as fast as it goes.

    Attributes:
        port: to connect to.
        carried: bytes so far, both ways.
    """

    def __init__(self, port: int, bytes_per_second: float | None = None) -> None:
        self._server, self.rate = port, bytes_per_second
        self.carried = 0
        self._whole, self._closed = threading.Event(), threading.Event()
        self._whole.set()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._free = {"out": 0.0, "back": 0.0}  # when each direction has room again
        self._door = socket.create_server(("127.0.0.1", 0))
        self._door.settimeout(0.2)
        self.port = self._door.getsockname()[1]
        self._threads = [threading.Thread(target=self._listen, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Break all connections off; new connections are refused until :meth:`mend`."""
        self._whole.clear()
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self._closed.set()
        self.cut()
        self._door.close()
        for thread in self._threads:
            thread.join(5)

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                here, _ = self._door.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if not self._whole.is_set():
                here.close()
                continue
            try:
                there = socket.create_connection(("127.0.0.1", self._server), 5)
            except OSError:
                here.close()
                continue
            there.settimeout(None)
            with self._lock:
                self._open |= {here, there}
            for way, source, target in (("out", here, there), ("back", there, here)):
                thread = threading.Thread(target=self._carry, args=(way, source, target), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, way: str, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE):
                self._wait_for_room(way, len(piece))
                target.sendall(piece)
                self.carried += len(piece)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _wait_for_room(self, way: str, size: int) -> None:
        if self.rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free[way] = max(self._free[way], now) + size / self.rate
            wait = self._free[way] - now
        time.sleep(wait)
