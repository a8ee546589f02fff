"""Every error has a code, a code means one thing, and docs/errors.md lists them all."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]

# Rooms in which every error has a code. What is finished is added here; when all are, the list can go.
FINISHED = (
    "evaluation",
    "workflows",
    "report",
    "methods",
    "anatomy",
    "data",
    "data_doctor",
    "phantom",
    "preparation",
    "networks",
    "losses",
    "config.py",
    "overrides.py",
    "settings.py",
    "checksums.py",
    "cli",
    "federation",
    "deployment",
)

# The same situation, raised as different classes.
SHARED = {
    "organ-twice": {"AnatomyError", "ConfigError"},  # in the vocabulary, in a phantom's list
    "union-with-part": {"AnatomyError", "ConfigError"},
    "file-unreadable": {"DataError", "MessageError"},  # a scan; a message on disk
    "not-finite": {"DataError", "MessageError", "NotAgreedError"},  # a scan; an answer; a delivered model
    # What a file says, what a site says of itself, and what a coordinator says of sites.
    "annotates-nothing": {"ConfigError", "MessageError"},
    "no-training-cases": {"ConfigError", "MessageError"},
    "bad-counts": {"MessageError", "NotAgreedError"},
    "unknown-structure": {"MessageError", "NotAgreedError"},
    "bad-site-name": {"ConfigError", "NotAgreedError"},
    # In a simulation that is resumed, and at a hospital.
    "data-changed": {"DataChangedError", "RunError"},
    "plan-changed": {"NotAgreedError", "RunError"},
    "out-of-memory": {"PanorganError", "RunError"},  # of the whole command; of one run of several
}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("error_codes", ROOT / "scripts" / "error_codes.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


error_codes = load()


@pytest.fixture(scope="module")
def places() -> list:
    return error_codes.places()


def test_every_error_of_a_finished_room_has_a_code(places):
    rooms = {place.file.split("/")[0] for place in places}
    assert {"anatomy", "data", "config.py", "cli"} <= rooms, "the search finds errors"
    without = [f"{p.file}:{p.line} {p.what}" for p in places if p.file.split("/")[0] in FINISHED and p.code is None]
    assert without == []


def test_codes_are_short_words(places):
    assert [p.code for p in places if p.code and not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", p.code)] == []


def test_a_code_belongs_to_one_class(places):
    kinds: dict[str, set[str]] = {}
    for place in places:
        if place.code:
            kinds.setdefault(place.code, set()).add(place.kind)
    assert {code: found for code, found in kinds.items() if len(found) > 1} == SHARED


def test_the_page_is_fresh(places):
    written = (ROOT / "docs" / "errors.md").read_text()
    assert written == error_codes.page(places), f"docs/errors.md is stale; write it anew: {error_codes.COMMAND}"


SOURCE = """
class DeepError(PanorganError):
    def __init__(self, path):
        super().__init__("It is deep.", code="deep", fix="Dig.")

class WordyError(DataError):
    def __init__(self, what, sites, *, code):
        super().__init__(what, code=code)

class DataError(PanorganError): ...

def forgetful(error, name, code_of):
    raise errors.DataError(f"No {name}.", fix="Give one.")
    raise DataError("Odd.", code=code_of(error))
    raise DataError("Odd.", code="")
    raise DeepError(name)
    raise ValueError("no error of ours")

def careful(error, found, name):
    fix, rest = f"Use {name}" + " here.", 1
    return DataError(
        f"It fits {'none' if not found else 'two'} of {name}.", code="two-fit" if found else "none-fits", fix=fix
    )
    raise DataError(error.what, code=error.code)
    raise SettingError("must be 1", code="not-one")

def made(what, code):
    return DataError(what, code=code)

def use():
    raise made("From a helper.", code="made")
    raise made("From a helper.")
    raise WordyError("Many.", [], code="wordy")
    raise WordyError("Many.", [])
"""


def test_what_is_found_in_a_source(tmp_path):
    (tmp_path / "room.py").write_text(SOURCE)
    found = error_codes.places(tmp_path)
    assert [(p.kind, p.code, p.what, p.fix) for p in found] == [
        ("DeepError", "deep", "It is deep.", "Dig."),
        ("DataError", None, "No ….", "Give one."),
        ("DataError", None, "Odd.", ""),
        ("DataError", None, "Odd.", ""),
        ("DataError", "two-fit", "It fits two of ….", "Use … here."),
        ("DataError", "none-fits", "It fits none of ….", "Use … here."),
        ("DataError", "", "…", ""),
        ("ConfigError", "not-one", "must be 1", "Correct the setting."),
        ("DataError", "made", "From a helper.", ""),
        ("DataError", None, "From a helper.", ""),
        ("WordyError", "wordy", "Many.", ""),
        ("WordyError", None, "Many.", ""),
    ]
    rows = [line for line in error_codes.page(found).splitlines() if line.startswith("| `")]
    assert rows[0] == "| `deep` | It is deep. | Dig. |"
    assert len(rows) == 6
