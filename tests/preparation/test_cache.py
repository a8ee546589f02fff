"""The cache: what is removed when it is full, and what stays because it is in use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from panorgan.checksums import sealed_json
from panorgan.preparation import cache_use
from panorgan.preparation.cache import clear, read_cache, size_of, trim
from panorgan.preparation.cache_use import mark_in_use

DAY = 86400.0


def entry(cache: Path, name: str, days: float, size: int = 1000, site: str = "north") -> Path:
    """An entry that was last used so many days ago."""
    folder = cache / "store" / name
    folder.mkdir(parents=True)
    (folder / "case.json").write_text(sealed_json({"site": site, "source": f"/data/{site}/{name}.nii.gz"}))
    (folder / "image.npy").write_bytes(bytes(size - (folder / "case.json").stat().st_size))
    os.utime(folder, (time.time() - days * DAY,) * 2)
    return folder


def phantom(cache: Path, name: str, days: float, size: int = 1000) -> Path:
    folder = cache / "phantom" / name
    (folder / "imagesTr").mkdir(parents=True)
    (folder / "imagesTr" / "scan").write_bytes(bytes(size))
    os.utime(folder, (time.time() - days * DAY,) * 2)
    return folder


def test_entries_are_listed_with_the_last_used_first(tmp_path):
    entry(tmp_path, "old", 9)
    entry(tmp_path, "new", 1, size=2000, site="south")
    phantom(tmp_path, "made", 5)
    found = read_cache(tmp_path)
    assert [(one.path.name, one.kind, one.name, one.size) for one in found] == [
        ("new", "case", "south", 2000),
        ("made", "phantom", "made", 1000),
        ("old", "case", "north", 1000),
    ]
    assert found[0].source == "/data/south/new.nii.gz"
    assert size_of(tmp_path) == 4000
    assert read_cache(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("limit", "left"),
    [(4000, ["a", "b", "c", "d"]), (3999, ["a", "b", "c"]), (2000, ["a", "b"]), (1999, ["a"]), (0, [])],
)
def test_what_was_not_used_for_longest_goes_first(tmp_path, limit, left):
    entry(tmp_path, "a", 1)
    phantom(tmp_path, "b", 2)
    entry(tmp_path, "c", 3)
    phantom(tmp_path, "d", 4)
    gone = trim(tmp_path, limit)
    assert sorted(one.path.name for one in gone) == sorted(set("abcd") - set(left))
    assert [one.path.name for one in read_cache(tmp_path)] == left
    assert not list(tmp_path.rglob(".incomplete-*"))


def test_what_this_process_uses_stays_even_if_it_is_too_much(tmp_path):
    used, other = entry(tmp_path, "used", 9), entry(tmp_path, "other", 1)
    mark_in_use(used)
    mark_in_use(used)
    assert [one.path for one in trim(tmp_path, 10)] == [other]
    assert trim(tmp_path, 0) == []
    assert used.is_dir()


MARK_AND_WAIT = """
import sys
from pathlib import Path
from panorgan.preparation.cache_use import mark_in_use
mark_in_use(Path(sys.argv[1]))
print("marked", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.name != "posix", reason="no locks here")
def test_what_another_process_uses_stays_until_it_ends_however_it_ends(tmp_path):
    used = entry(tmp_path, "used", 9)
    command = [sys.executable, "-c", MARK_AND_WAIT, str(used)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "marked\n"
        assert trim(tmp_path, 0) == []
        assert clear(tmp_path) == []
    finally:
        other.kill()
        other.wait()
    assert [one.path for one in trim(tmp_path, 0)] == [used]
    assert not list((tmp_path / "store" / ".in-use").glob("*.used")), "a dead process leaves nothing behind"


def test_a_process_that_works_with_many_caches_keeps_few_files_open(tmp_path):
    for number in range(2 * cache_use._MOST_FOLDERS):
        mark_in_use(tmp_path / f"{number}" / "store" / "entry")
    assert len(cache_use._own) == cache_use._MOST_FOLDERS


def test_clearing_takes_what_is_old_enough_and_the_notes_with_it(tmp_path):
    entry(tmp_path, "old", 9)
    entry(tmp_path, "new", 1)
    store = tmp_path / "store"
    (store / "hashes").mkdir()
    for note in ("x.measured", "y.checked", "hashes/z"):
        (store / note).write_text("")
    assert [one.path.name for one in clear(tmp_path, unused_days=5)] == ["old"]
    assert (store / "x.measured").is_file(), "that is younger"
    assert [one.path.name for one in clear(tmp_path)] == ["new"]
    assert {path.name for path in store.iterdir()} == {".in-use", "hashes"}
    assert not list((store / "hashes").iterdir())


def test_an_entry_whose_description_is_damaged_can_be_removed_too(tmp_path):
    folder = entry(tmp_path, "odd", 1)
    (folder / "case.json").write_text("{")
    assert [(one.name, one.source) for one in read_cache(tmp_path)] == [("", "")]
    assert [one.path for one in clear(tmp_path)] == [folder]
