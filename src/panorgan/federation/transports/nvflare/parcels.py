"""Sends a large answer through NVFlare in chunks that the receiver requests.

NVFlare 2.9 formats a whole incoming request for a log line that is then dropped; for 80 MB that takes longer than the
transfer. So the answer itself holds only a reference, and the server fetches the bytes with NVFlare's own download
service, as NVFlare does with the tensors of its own methods.

NVFlare writes the names of these classes and of this module into messages, so they must not change.
"""

from __future__ import annotations

from typing import Any

from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.streaming.download_service import Consumer, Downloadable, ProduceRC, download_object
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.fobs.datum import DatumManager
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer

PIECE_BYTES = 16 << 20
"""NVFlare copies a chunk once less if it has more than 10 MB; several of them are in memory at a time."""

_SMALL = 1 << 14
"""Below this many bytes, fetching costs more than it saves. No model is that small, not even a test's."""
_PATIENCE = 120.0
"""Seconds without a piece after which the rest is given up. The site counts as missing until the next segment."""
_MOST_BYTES = 4 << 30
"""A larger answer is dropped: no model is that large, and the coordinator has a lower limit."""
_KIND = 200
"""NVFlare's number for what has to be fetched; its own are below 10, and it must fit into a byte."""


class Parcel:
    """The bytes of a message; None if they did not arrive."""

    __slots__ = ("content",)

    def __init__(self, content: bytes | None) -> None:
        self.content = content


def packed(content: bytes) -> bytes | Parcel:
    """What to put into NVFlare's container: small messages as they are, large ones to be fetched."""
    return content if len(content) < _SMALL else Parcel(content)


def unpacked(found: object) -> bytes | None:
    """The inverse of `packed`; None if the bytes did not arrive, or if it is not something that we send."""
    content = found.content if isinstance(found, Parcel) else found
    return content if isinstance(content, bytes) else None


class _Pieces(Downloadable):
    """The sender's side. NVFlare releases it when the receiver has everything, or no longer asks."""

    def __init__(self, parcels: dict[str, Parcel], size: int) -> None:
        super().__init__(parcels)
        self._pieces = [
            (name, memoryview(parcel.content)[start : start + size])
            for name, parcel in parcels.items()
            if parcel.content
            for start in range(0, len(parcel.content), size)
        ]

    def produce(self, state: dict[str, Any] | None, requester: str) -> tuple[str, Any, dict[str, Any]]:
        """The piece that the receiver asks for."""
        position = int(state["next"]) if state else 0
        if position >= len(self._pieces):
            return ProduceRC.EOF, None, {}
        return ProduceRC.OK, list(self._pieces[position]), {"next": position + 1}

    def release(self) -> None:
        """The receiver has everything, or has given up."""
        self.base_obj, self._pieces = None, []


class _Collected(Consumer):
    """The receiver's side."""

    supports_pipelining = True  # the next piece may be on its way while this one is put down

    def __init__(self) -> None:
        super().__init__()
        self.pieces: dict[str, list[bytes]] = {}
        self.complete = False
        self._bytes = 0

    def consume(self, ref_id: str, state: dict[str, Any], data: Any) -> dict[str, Any]:
        """A piece arrived."""
        name, piece = data
        self._bytes += len(piece)
        if self._bytes <= _MOST_BYTES:
            self.pieces.setdefault(name, []).append(piece)
        else:
            self.pieces.clear()  # the rest runs by
        return state

    def download_completed(self, ref_id: str) -> None:
        """All arrived."""
        self.complete = self._bytes <= _MOST_BYTES

    def download_failed(self, ref_id: str, reason: str) -> None:
        """The rest will not come."""
        self.pieces.clear()


class _Arrived(dict[str, Parcel]):
    """Parcels by name. One that did not arrive is empty: NVFlare would end the whole job over an error here."""

    def __contains__(self, name: object) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Parcel:
        """The parcel, empty if it did not arrive."""
        return super().get(name) or Parcel(None)


class ParcelDecomposer(ViaDownloaderDecomposer):
    """Registers with NVFlare how parcels travel."""

    def __init__(self) -> None:
        super().__init__(PIECE_BYTES, "panorgan_")

    def supported_type(self) -> type:
        """Parcels."""
        return Parcel

    def get_download_dot(self) -> int:
        """NVFlare's number for them."""
        return _KIND

    def to_downloadable(self, items: dict[str, Parcel], max_chunk_size: int, fobs_ctx: dict[str, Any]) -> Downloadable:
        """What the receiver will ask."""
        return _Pieces(items, max_chunk_size)

    def download(
        self, from_fqcn: str, ref_id: str, per_request_timeout: float, cell: Cell, **options: Any
    ) -> tuple[str, dict[str, Parcel]]:
        """Fetch them. Whatever goes wrong, the other sites' round goes on."""
        collected = _Collected()
        try:
            download_object(from_fqcn, ref_id, min(per_request_timeout, _PATIENCE), cell, collected, **options)
        except Exception:
            self.logger.exception(f"could not fetch an answer from {from_fqcn}")
            return "", _Arrived()
        if not collected.complete:
            return "", _Arrived()
        return "", _Arrived({name: Parcel(b"".join(pieces)) for name, pieces in collected.pieces.items()})

    def native_decompose(self, target: Parcel, manager: DatumManager = None) -> bytes:
        """As they are, where there is no network."""
        return target.content or b""

    def native_recompose(self, data: bytes, manager: DatumManager = None) -> Parcel:
        """As they are, where there is no network."""
        return Parcel(data)


fobs.register(ParcelDecomposer)
