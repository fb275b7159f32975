"""Batches prepared by a thread while the training step runs; the state resumes exactly.

batches = ReadAhead(TokenBatches(...))
batch = batches.next()
batches.state_dict()    # of the batches that were taken, not of those that were read
"""

import queue
import threading
from typing import Any

from mol.data.loader import Sequence, TokenBatches


class ReadAhead:
    """`batches`, of which up to `depth` are ready before they are asked for. What goes wrong while
    reading is raised by `next`."""

    def __init__(self, batches: TokenBatches, depth: int = 4):
        self._batches, self._depth = batches, depth
        self._taken = batches.state_dict()
        self._thread: threading.Thread | None = None

    @property
    def epochs(self) -> float:
        """Passes over the split in the batches that were taken."""
        return self._taken["position"] / self._batches.n

    def next(self) -> Sequence:
        """The next batch, as `TokenBatches.next` returns it."""
        if self._thread is None:
            self._start()
        batch, state = self._ready.get()
        if isinstance(batch, BaseException):
            self.close()
            raise batch
        self._taken = state
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; errors as `TokenBatches` raises them."""
        self.close()
        self._batches.load_state_dict(state)
        self._taken = self._batches.state_dict()

    def close(self) -> None:
        """Stop the thread, and start anew after the last batch taken if there is a next call."""
        if self._thread is None:
            return
        self._stopped.set()
        while self._thread.is_alive():  # it may wait for room
            try:
                self._ready.get(timeout=0.01)
            except queue.Empty:
                pass
        self._thread = None
        self._batches.load_state_dict(self._taken)

    def _start(self) -> None:
        self._ready: queue.Queue = queue.Queue(self._depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True, name="read ahead")
        self._thread.start()

    def _read(self) -> None:
        ready, stopped = self._ready, self._stopped
        while not stopped.is_set():
            try:
                item = self._batches.next(), self._batches.state_dict()
            except BaseException as error:  # shown where the batch is asked for
                item = error, {}
                stopped.set()
            ready.put(item)
