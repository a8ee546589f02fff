"""Hashes of files. One is computed once; afterwards equal size, times and inode mean that nothing changed.

What is remembered has a checksum behind it: a hash with a flipped bit would look like changed data.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path

from panorgan.checksums import checksum

# A file changed again within a clock tick would keep its time; so young ones are hashed every time.
_SETTLED_SECONDS = 2.0


class FileHashes:
    """SHA-256 of files, remembered in a folder. One small file per remembered hash, so that processes can share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, path: Path) -> bytes:
        """The hash of a file's content."""
        before = path.stat()
        identity = f"{path.resolve()}\n{before.st_size}\n{before.st_mtime_ns}\n{before.st_ctime_ns}\n{before.st_ino}"
        memory = self.folder / hashlib.sha256(identity.encode()).hexdigest()[:32]
        try:
            known = memory.read_bytes()
            size = hashlib.sha256().digest_size
            if len(known) > size and known[size:] == checksum((known[:size],)).encode():
                return known[:size]
        except OSError:
            pass
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        if time.time() - max(before.st_mtime, before.st_ctime) > _SETTLED_SECONDS:
            with contextlib.suppress(OSError):  # a cache that may only be read is still a cache
                self.folder.mkdir(parents=True, exist_ok=True)
                scratch = memory.with_name(f"{memory.name}.{os.getpid()}-{threading.get_ident()}")
                scratch.write_bytes(digest + checksum((digest,)).encode())
                os.replace(scratch, memory)
        return digest
