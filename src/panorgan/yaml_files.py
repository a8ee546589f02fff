"""Read a YAML file of settings as plain data. Light: mistakes in it show before torch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from panorgan.errors import ConfigError


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """A YAML file of settings as plain data; `what` names it in an error."""
    if not path.is_file():
        fix = "Name a file in it. 'panorgan init FOLDER' drafts one from data." if path.is_dir() else "Check the path."
        raise ConfigError(
            f"There is no such {what}{'; this is a folder' if path.is_dir() else ''}.",
            code="settings-file-missing",
            where=str(path),
            fix=fix,
        )
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The {what} is not valid YAML.",
            code="not-yaml",
            where=str(path),
            why=str(error),
            fix="Correct that place.",
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"The {what} is empty or not a mapping.",
            code="not-a-mapping",
            where=str(path),
            fix="Write 'name: value' lines; the files in examples/ show how.",
        )
    return content


class _StrictLoader(yaml.SafeLoader):
    """Refuses a repeated key: YAML would silently drop the first, and with it perhaps a whole site."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                mark = node.value[place][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is repeated", mark)
        return super().construct_mapping(node, deep)
