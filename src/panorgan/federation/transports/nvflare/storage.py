"""NVFlare's file storage, inside the kit."""

from __future__ import annotations

from pathlib import Path

from nvflare.app_common.storages.filesystem_storage import FilesystemStorage


class KitStorage(FilesystemStorage):
    """Stores below a folder that is relative to the kit, so that a kit may be moved.

    NVFlare's own storage wants an absolute path. Its processes change into the kit before they build this. A folder
    outside is refused.
    """

    def __init__(self, folder: str = ".") -> None:
        kit = Path.cwd().resolve()
        place = (kit / folder).resolve()
        if not place.is_relative_to(kit):
            raise ValueError("a kit stores inside its own folder only")
        super().__init__(root_dir=str(place))
