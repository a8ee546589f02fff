"""What a file holds, as a hash. It is computed once; afterwards size, time and inode tell that nothing changed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from pathlib import Path

# A file changed again within a clock tick would keep its time; so young ones are hashed every time.
_SETTLED_SECONDS = 2.0


class ContentHashes:
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
            if len(known) == hashlib.sha256().digest_size:
                return known
        except OSError:
            pass
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        if time.time() - max(before.st_mtime, before.st_ctime) > _SETTLED_SECONDS:
            with contextlib.suppress(OSError):  # a cache that may only be read is still a cache
                self.folder.mkdir(parents=True, exist_ok=True)
                scratch = memory.with_name(f"{memory.name}.{os.getpid()}-{threading.get_ident()}")
                scratch.write_bytes(digest)
                os.replace(scratch, memory)
        return digest
