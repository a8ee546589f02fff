"""Traffic on the loopback interface as seen on the machine, by tcpdump."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil
import torch

_WINDOW = 32
_ETHERNET, _IPV4, _TCP = 14, 0x0800, 6


def why_not() -> str:
    """Why nothing can be captured here; empty if it can."""
    if shutil.which("tcpdump") is None:
        return "tcpdump is not installed"
    return "" if os.geteuid() == 0 else "capturing takes root's rights"


def listening(processes: Iterable[int]) -> set[int]:
    """Ports on which these processes, and all that they started, listen."""
    ports = set()
    for number in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(number)
            for process in (parent, *parent.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    sockets = process.net_connections("tcp")
                    ports |= {socket.laddr.port for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return ports


class Capture:
    """What goes over loopback from and to these ports while it is open. Others on the machine are not listened to."""

    def __init__(self, path: Path, ports: Iterable[int]) -> None:
        self.path, self.ports = path, set(ports)
        self.dropped = -1
        """Packets that were missed; known when it is closed."""

    def __enter__(self) -> Capture:
        only = " or ".join(f"tcp port {port}" for port in sorted(self.ports))
        with self.path.open("wb") as output:
            self._process = subprocess.Popen(
                ["tcpdump", "-i", "lo", "--immediate-mode", "-U", "-s", "0", "-B", "65536", "-w", "-", only],
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "listening on lo" in line:
                return self
        raise AssertionError(f"tcpdump ended with code {self._process.wait()}")

    def __exit__(self, *error: object) -> None:
        self._settle()
        self._process.send_signal(signal.SIGTERM)
        _, reported = self._process.communicate(timeout=30)
        found = re.search(r"(\d+) packets? dropped by kernel", reported)
        self.dropped = int(found[1]) if found else -1

    def _settle(self) -> None:
        """Until nothing has been written for a while: what was sent just now may still be on its way to the file."""
        size, since, ends = -1, time.monotonic(), time.monotonic() + 20
        while time.monotonic() - since < 1.5 and time.monotonic() < ends:
            if (now := self.path.stat().st_size) != size:
                size, since = now, time.monotonic()
            time.sleep(0.1)


def streams(path: Path) -> dict[tuple[int, int], bytes]:
    """The bytes of each direction of each connection, put together again, by (from port, to port)."""
    parts: dict[tuple[int, int], dict[int, bytes]] = {}
    for packet in _packets(path.read_bytes()):
        if struct.unpack_from("!H", packet, 12)[0] != _IPV4 or packet[_ETHERNET + 9] != _TCP:
            continue
        tcp = _ETHERNET + 4 * (packet[_ETHERNET] & 15)
        end = _ETHERNET + struct.unpack_from("!H", packet, _ETHERNET + 2)[0]
        source, target, number = struct.unpack_from("!HHI", packet, tcp)
        if content := packet[tcp + 4 * (packet[tcp + 12] >> 4) : end]:
            kept = parts.setdefault((source, target), {})
            kept[number] = max(kept.get(number, b""), content, key=len)
    return {ports: _joined(kept) for ports, kept in parts.items()}


def _packets(content: bytes) -> Iterator[bytes]:
    magic, _, _, _, _, _, link = struct.unpack_from("<IHHiIII", content)
    assert (magic, link) == (0xA1B2C3D4, 1), "a file of tcpdump, of Ethernet frames"
    place = 24
    while place + 16 <= len(content):
        _, _, kept, whole = struct.unpack_from("<IIII", content, place)
        assert kept == whole, "no packet is cut off"
        yield content[place + 16 : place + 16 + kept]
        place += 16 + kept


def _joined(parts: dict[int, bytes]) -> bytes:
    """In the order in which they were first seen to begin; what was sent twice counts once."""
    first = next(iter(parts))
    near = {(number - first + (1 << 31)) % (1 << 32): content for number, content in parts.items()}
    whole, upto = bytearray(), 0
    for place, content in sorted(near.items()):
        whole += content[max(0, upto - place) :]
        upto = max(upto, place + len(content))
    return bytes(whole)


def windows(tensors: dict[str, torch.Tensor], per_tensor: int = 4) -> list[bytes]:
    """Short runs of bytes from every tensor that is large and varied enough to be recognised."""
    found = []
    for tensor in tensors.values():
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else b""
        for part in range(per_tensor):
            place = (len(content) - _WINDOW) * part // max(1, per_tensor - 1) // 4 * 4
            window = content[max(0, place) :][:_WINDOW]
            if len(window) == _WINDOW and len(set(window)) > _WINDOW // 2:
                found.append(window)
    return found


def seen(secrets: Sequence[bytes], captured: dict[tuple[int, int], bytes]) -> list[tuple[tuple[int, int], bytes]]:
    """Which secrets can be read, and on which connection."""
    return [(ports, secret) for ports, content in captured.items() for secret in secrets if secret in content]


def sent_in_the_open(content: bytes, path: Path) -> dict[tuple[int, int], bytes]:
    """Capture a transfer of `content` over a plain connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Capture(path, [listener.getsockname()[1]]) as capture,
    ):

        def receive() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while connection.recv(1 << 16):
                    pass

        reader = threading.Thread(target=receive)
        reader.start()
        with socket.create_connection(listener.getsockname()) as connection:
            connection.sendall(content)
        reader.join()
    assert capture.dropped == 0
    return streams(path)
