"""The base of every config section: immutable, typed, and strict about names.

Each room declares its own section next to the code that uses it; `panorgan.config` composes them into an experiment.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen pydantic model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types, in declaration order."""
        return self.model_dump(mode="json")
