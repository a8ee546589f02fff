"""The public data sets that panorgan knows: the facts of `datasets.toml`, checked once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from panorgan.errors import ConfigError, did_you_mean
from panorgan.settings import Settings, validated

LICENCES = {
    "CC BY 4.0": (
        "https://creativecommons.org/licenses/by/4.0/legalcode",
        "Use, change and pass it on, also for money. Name the authors and the licence, and say what you changed.",
    ),
    "CC BY-SA 4.0": (
        "https://creativecommons.org/licenses/by-sa/4.0/legalcode",
        "Use, change and pass it on, also for money. Name the authors and the licence, say what you changed, and pass "
        "on what you make of the data under the same licence.",
    ),
    "CC BY-NC-SA 4.0": (
        "https://creativecommons.org/licenses/by-nc-sa/4.0/legalcode",
        "Not for commercial use. Name the authors and the licence, say what you changed, and pass on what you make of "
        "the data under the same licence.",
    ),
}
"""Where the text of a licence is, and what it asks for in short."""


class DataSet(Settings):
    """One table of `datasets.toml`; the file says what its fields are."""

    name: str
    title: str
    modality: str
    annotates: str
    folder: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    layout: str
    page: str
    licence: str
    cite: str
    url: str = ""
    size: str = ""
    md5: str = Field("", pattern=r"^([0-9a-f]{32})?$")
    sha256: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    checksum_from: str = ""
    how: str = ""

    @model_validator(mode="after")
    def _complete(self) -> DataSet:
        assert bool(self.url) != bool(self.how), "either an archive, or how to get it"
        assert bool(self.md5 or self.sha256) == bool(self.checksum_from), "a checksum has a source"
        return self

    @property
    def archive(self) -> str:
        """The file name of its archive; empty for a set that is not fetched."""
        return urlsplit(self.url).path.rpartition("/")[2]

    @property
    def licence_url(self) -> str:
        """Where the text of the licence is."""
        return LICENCES.get(self.licence, (self.page, ""))[0]

    @property
    def terms(self) -> str:
        """What the licence asks for, in short."""
        return LICENCES.get(self.licence, ("", "Read the terms on the page of the data set."))[1]


@cache
def data_sets() -> Mapping[str, DataSet]:
    """Every set by name."""
    content = tomllib.loads((files("panorgan.fetching") / "datasets.toml").read_text(encoding="utf-8"))
    return {name: validated(DataSet, {"name": name, **facts}, name) for name, facts in content.items()}


def find_data_set(name: str) -> DataSet:
    """A set by its name, or by that of its folder."""
    known = data_sets()
    for data_set in known.values():
        if name.lower().replace("-", "_") in (data_set.name, data_set.folder.lower()):
            return data_set
    raise ConfigError(
        f"There is no data set called {name!r}.",
        code="unknown-data-set",
        where="panorgan fetch",
        why=did_you_mean(name, known),
        fix=f"Use one of: {', '.join(known)}.",
    )
