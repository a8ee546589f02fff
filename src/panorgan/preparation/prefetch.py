"""Cuts batches in the background while the device computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from panorgan.preparation.batch import PackedBatch


def prefetched(batches: Iterator[PackedBatch], ahead: int = 4, pin: bool = False) -> Iterator[PackedBatch]:
    """The same batches in the same order, cut (and pinned for CUDA) by a background thread while the device works."""
    ready: queue.Queue[PackedBatch | BaseException | None] = queue.Queue(maxsize=ahead)
    stop = threading.Event()

    def put(item: PackedBatch | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for batch in batches:
                if not put(batch.pinned() if pin else batch):
                    return
            put(None)
        except BaseException as error:  # handed over and raised where the batches are used
            put(error)

    thread = threading.Thread(target=work, name="patches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
