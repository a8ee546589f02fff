"""The store: what an entry holds, when it is reused, and that a broken one is never seen."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusing import refused

from panorgan.data.case import Case, LabelMap
from panorgan.errors import DataError
from panorgan.preparation import store as store_module
from panorgan.preparation.plan import Plan
from panorgan.preparation.store import Store

PLAN = Plan(spacing_mm=(1.0, 1.0, 1.0))
HU = np.arange(6 * 5 * 4, dtype=np.float32).reshape(6, 5, 4)


def box(shape: tuple[int, ...], *ranges: tuple[int, int]) -> np.ndarray:
    mask = np.zeros(shape, dtype=bool)
    mask[tuple(slice(*r) for r in ranges)] = True
    return mask


MASKS = {
    "liver": box(HU.shape, (1, 5), (1, 4), (1, 3)),
    "liver_tumour": box(HU.shape, (2, 3), (2, 3), (1, 3)),  # inside the liver
    "spleen": np.zeros(HU.shape, dtype=bool),  # known to be absent
}


@pytest.fixture
def case(make_case):
    return make_case("a", HU, MASKS)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "deep" / "store")


def entries(store: Store) -> list[str]:
    """What lies in the store, remembered file hashes aside."""
    found = store.folder.iterdir() if store.folder.exists() else ()
    return sorted(path.name for path in found if path.name not in ("hashes", ".in-use"))


def test_an_entry_holds_image_bits_and_foreground(store, case) -> None:
    stored = store.add(case, PLAN)
    assert (stored.id, stored.patient, stored.site, stored.structures) == ("a", "a", "north", tuple(MASKS))
    np.testing.assert_allclose(stored.image, HU / 500, atol=5e-4)
    assert stored.image.dtype == np.float16
    by_hand = MASKS["liver"].astype(int) + 2 * MASKS["liver_tumour"].astype(int)
    np.testing.assert_array_equal(stored.labels, by_hand)
    assert stored.labels.dtype == np.uint8
    for (name, mask), (expected_name, expected) in zip(stored.masks(), MASKS.items(), strict=True):
        assert name == expected_name
        np.testing.assert_array_equal(mask, expected)
    assert stored.spacing == pytest.approx((1, 1, 1))


def test_arrays_are_memory_mapped_and_read_only(store, case) -> None:
    stored = store.add(case, PLAN)
    for array in (stored.image, stored.labels):
        assert isinstance(array, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0, 0] = 1


def test_foreground_lists_the_voxels_of_present_structures(store, case) -> None:
    foreground = store.add(case, PLAN).foreground
    assert list(foreground) == ["liver", "liver_tumour"]
    assert foreground["liver_tumour"].tolist() == [[2, 2, 1], [2, 2, 2]]
    np.testing.assert_array_equal(foreground["liver"], np.argwhere(MASKS["liver"]))


def test_a_large_structure_is_remembered_by_evenly_spread_voxels(store, make_case) -> None:
    mask = box((30, 30, 30), (2, 28), (2, 28), (2, 28))
    positions = store.add(make_case("big", np.zeros(mask.shape), {"liver": mask}), PLAN).foreground["liver"]
    assert len(positions) == len(np.unique(positions, axis=0)) == 2000
    assert mask[tuple(positions.T)].all()
    np.testing.assert_allclose(positions.mean(axis=0), 14.5, atol=0.3)
    assert positions.min() == 2
    assert positions.max() == 27


@pytest.mark.parametrize(("count", "dtype"), [(8, np.uint8), (9, np.int32), (31, np.int32), (32, np.int64)])
def test_more_structures_use_a_wider_type(store, make_case, count, dtype) -> None:
    masks = {f"structure{t}": box(HU.shape, (0, 6), (0, 5), (0, 4)) for t in range(count - 1)}
    last = box(HU.shape, (5, 6), (4, 5), (3, 4))
    stored = store.add(make_case("many", HU, {**masks, "last": last}), PLAN)
    assert stored.labels.dtype == dtype
    for name, mask in stored.masks():
        np.testing.assert_array_equal(mask, masks.get(name, last))


def test_too_many_structures_are_refused(store, make_case) -> None:
    full = np.ones(HU.shape, dtype=bool)
    case = make_case("a", HU, {f"structure{t}": full for t in range(62)})
    store.add(replace(case, annotated=case.annotated[:62]), PLAN)
    with refused("too-many-structures") as caught:
        store.add(replace(case, annotated=tuple(f"structure{t}" for t in range(64))), PLAN)
    assert "64" in caught.value.what
    assert len(entries(store)) == 1


def test_a_case_without_labels_is_stored_too(store, make_case) -> None:
    stored = store.add(make_case("bare", HU, {}), PLAN)
    assert stored.structures == ()
    assert not stored.labels.any()
    assert stored.foreground == {}


def test_the_stored_spacing_is_the_true_one(store, make_case) -> None:
    case = make_case("a", HU, MASKS, affine=np.diag([1.0, 2.0, 3.0, 1.0]))
    stored = store.add(case, Plan(spacing_mm=(4.0, 4.0, 4.0)))
    # 6, 10 and 12 mm become 2 (1.5 rounds to the even 2), 2 (2.5 also) and 3 voxels.
    assert stored.image.shape == (2, 2, 3)
    assert stored.spacing == pytest.approx((3, 5, 4))


def test_an_entry_is_reused_without_work(store, case, monkeypatch) -> None:
    first = store.add(case, PLAN)

    def never(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(store_module, "_write", never)
    again = Store(store.folder).add(case, Plan(spacing_mm=(1.0, 1.0, 1.0)))
    assert again.folder == first.folder
    other_patient = store.add(replace(case, id="copy", patient="copy"), PLAN)
    assert other_patient.folder == first.folder
    assert other_patient.id == "copy"


@pytest.mark.parametrize("what", ["image bytes", "label bytes", "spacing", "window", "annotated", "ids"])
def test_any_changed_input_gets_its_own_entry(store, case, what) -> None:
    first = store.add(case, PLAN)
    plan = PLAN
    if what.endswith("bytes"):
        path = case.image if what == "image bytes" else case.labels.path
        content = bytearray(path.read_bytes())
        old = path.stat()
        content[-4:] = b"\0\0\0\0" if what == "image bytes" else b"\1\0\1\0"
        path.write_bytes(content)
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    elif what == "spacing":
        plan = Plan(spacing_mm=(1.0, 1.0, 2.0))
    elif what == "window":
        plan = Plan(spacing_mm=(1.0, 1.0, 1.0), window_hu=(-400.0, 500.0))
    elif what == "annotated":
        case = replace(case, annotated=("spleen", "liver"))
    else:
        ids = {**case.labels.ids, "spleen": case.labels.ids["liver_tumour"]}
        case = replace(case, labels=replace(case.labels, ids=ids))
    second = store.add(case, plan)
    assert second.folder != first.folder
    assert len(entries(store)) == 2
    same = np.array_equal(first.image, second.image) and np.array_equal(first.labels, second.labels)
    assert not same


def test_a_missing_input_is_named(store, case) -> None:
    case.labels.path.unlink()
    with refused("image-missing") as caught:
        store.add(case, PLAN)
    assert caught.value.where == str(case.labels.path)


@pytest.mark.parametrize("error", [DataError("broken"), OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_entry_leaves_nothing(store, case, monkeypatch, error) -> None:
    write = store_module._write

    def break_off(case, plan, folder) -> None:
        write(case, plan, folder)
        assert folder.parent == store.folder
        raise error

    monkeypatch.setattr(store_module, "_write", break_off)
    with pytest.raises(type(error)):
        store.add(case, PLAN)
    assert entries(store) == []
    monkeypatch.setattr(store_module, "_write", write)
    assert store.add(case, PLAN).image.shape == HU.shape


def test_a_half_written_entry_is_invisible_to_others(store, case, monkeypatch) -> None:
    write = store_module._write
    seen: list[bool] = []

    def look_while_writing(case, plan, folder) -> None:
        write(case, plan, folder)
        seen.append(any(not name.startswith(".incomplete-") for name in entries(store)))

    monkeypatch.setattr(store_module, "_write", look_while_writing)
    store.add(case, PLAN)
    assert seen == [False]


def test_two_processes_may_prepare_the_same_case(store, case, monkeypatch) -> None:
    write = store_module._write
    finished_first = []

    def lose_the_race(case, plan, folder) -> None:
        monkeypatch.setattr(store_module, "_write", write)
        finished_first.append(Store(store.folder).add(case, plan))
        write(case, plan, folder)

    monkeypatch.setattr(store_module, "_write", lose_the_race)
    stored = store.add(case, PLAN)
    assert stored == finished_first[0]
    assert entries(store) == [stored.folder.name]
    np.testing.assert_allclose(stored.image, HU / 500, atol=5e-4)


def test_an_entry_that_comes_and_goes_at_the_wrong_moments_ends_whole(store, case, monkeypatch) -> None:
    """Another process moves a damaged entry away between our look and our rename; ours is put in place after all."""
    stored = store.add(case, PLAN)
    (stored.folder / "image.npy").unlink()
    replace_, moved = os.replace, []

    def raced(source, target) -> None:
        if Path(source) == stored.folder and not moved:
            moved.append(source)
            replace_(source, store.folder / ".incomplete-theirs")
        replace_(source, target)

    monkeypatch.setattr(os, "replace", raced)
    again = store.add(case, PLAN)
    np.testing.assert_allclose(again.image, HU / 500, atol=5e-4)
    assert moved
    assert sum(name.startswith(store_module.INCOMPLETE) for name in entries(store)) == 1  # theirs, which they remove


def test_an_entry_that_another_process_has_finished_is_left_in_place(store, case, monkeypatch) -> None:
    """They finish while we prepare ours: theirs must not be moved away, a third process may be reading it."""
    write, other = store_module._write, Store(store.folder)

    def slowly(case, plan, folder) -> None:
        monkeypatch.setattr(store_module, "_write", write)
        stored = other.add(case, plan)
        inodes.append(stored.folder.stat().st_ino)
        write(case, plan, folder)

    inodes: list[int] = []
    monkeypatch.setattr(store_module, "_write", slowly)
    assert store.add(case, PLAN).folder.stat().st_ino == inodes[0]
    assert len(entries(store)) == 1


def test_what_another_process_takes_away_while_it_is_swept_does_not_matter(store, monkeypatch) -> None:
    """An entry is removed, or gets another name, between being listed and being looked into."""
    entry = store.folder / "entry"
    entry.mkdir(parents=True)
    for name in ("scandir", "listdir"):  # of which pathlib makes all its listings
        plain = getattr(os, name)

        def vanishing(path, plain=plain):
            if Path(path) == entry and entry.exists():
                entry.rmdir()
            return plain(path)

        monkeypatch.setattr(os, name, vanishing)
    store.sweep()
    assert not entry.exists()


def test_what_cannot_be_read_is_left_alone_when_a_store_is_swept(store) -> None:
    """A folder of another user, or a link that leads nowhere or to itself."""
    store.folder.mkdir(parents=True, exist_ok=True)
    loop, nowhere = store.folder / "loop", store.folder / "nowhere"
    loop.symlink_to(loop)
    nowhere.symlink_to(store.folder / "absent")
    store.sweep()
    assert loop.is_symlink()
    assert nowhere.is_symlink()


def test_leftovers_of_killed_processes_are_swept_after_a_while(store) -> None:
    entry = store.folder / "entry"
    entry.mkdir(parents=True)
    fresh, old = store.folder / ".incomplete-fresh", store.folder / ".incomplete-old"
    inside, kept = entry / ".incomplete-old", entry / "image.npy"
    for folder in (fresh, old):
        folder.mkdir()
    for file in (inside, kept):
        file.touch()
    for path in (old, inside, kept):
        os.utime(path, (1e9, 1e9))
    store.sweep()
    assert sorted(path.name for path in store.folder.rglob("*")) == [".incomplete-fresh", "entry", "image.npy"]


def test_the_description_can_be_read_by_others(store, case) -> None:
    content = json.loads((store.add(case, PLAN).folder / "case.json").read_text())
    assert content["structures"] == list(MASKS)
    assert content["plan"] == PLAN.as_json()


def test_cropping_never_loses_what_was_annotated(store, make_case) -> None:
    hu = np.full((60, 60, 20), -1000.0)
    hu[20:50, 20:50] = 40
    hu[2:4, 2:4, 2:4] = 40  # a speck far outside of the body
    masks = {"liver": box(hu.shape, (25, 30), (25, 30), (5, 10)), "spleen": box(hu.shape, (2, 4), (2, 4), (2, 4))}
    with refused("crop-cuts-organ") as caught:
        store.add(make_case("a", hu, masks), Plan(spacing_mm=(1, 1, 1), crop="body"))
    assert "spleen" in caught.value.what
    assert "8 of its voxels" in caught.value.why
    store.add(make_case("a", hu, masks), Plan(spacing_mm=(1, 1, 1)))


def test_entries_can_be_shared(store, case) -> None:
    """Others may read what the user's umask lets them read."""
    old = os.umask(0o022)
    try:
        entry = store.add(case, PLAN).folder
        store.measure(case, PLAN)
    finally:
        os.umask(old)
    assert entry.stat().st_mode & 0o777 == 0o755
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in store.folder.glob("*.measured"))


def test_what_a_case_holds_does_not_depend_on_the_plan(store, case) -> None:
    key = store.content_of(case)
    assert key == store.content_of(replace(case, id="b"))
    content = bytearray(case.image.read_bytes())
    content[-4:] = b"\0\0\0\0"
    case.image.write_bytes(content)
    assert store.content_of(case) != key


def test_voxels_in_a_file_of_their_own_count_too(store, tmp_path) -> None:
    """MetaImage keeps a small header and a large .raw: the header alone does not tell that the scan has changed."""
    sitk = pytest.importorskip("SimpleITK")

    def write(value: int) -> None:
        for name, voxels in (("ct", np.full((4, 5, 6), value, np.int16)), ("label", np.ones((4, 5, 6), np.uint8))):
            sitk.WriteImage(sitk.GetImageFromArray(voxels), str(tmp_path / f"{name}.mhd"))

    write(0)
    labels = LabelMap(tmp_path / "label.mhd", {"liver": (1,)}, frozenset({1}))
    case = Case("a", "a", "north", tmp_path / "ct.mhd", ("liver",), labels)
    assert float(store.add(case, PLAN).image.mean()) == 0
    write(400)
    assert float(store.add(case, PLAN).image.mean()) == pytest.approx(0.8, abs=1e-3)
    first = store.content_of(case)
    sitk.WriteImage(sitk.GetImageFromArray(np.zeros((4, 5, 6), np.uint8)), str(tmp_path / "label.mhd"))
    assert store.content_of(case) != first


# -- damage and a full disk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["image.npy", "labels.npy", "foreground.npz", "case.json"])
@pytest.mark.parametrize("how", ["a flipped bit", "empty", "truncated", "gone"])
def test_a_damaged_entry_is_made_again(store, case, name, how, caplog) -> None:
    first = store.add(case, PLAN)
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    path, content = first.folder / name, before[name]
    if how == "gone":
        path.unlink()
    else:
        flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        path.write_bytes({"a flipped bit": flipped, "empty": b"", "truncated": content[: len(content) // 2]}[how])
    with caplog.at_level("INFO", logger="panorgan.preparation.store"):
        again = Store(store.folder).add(case, PLAN)
    assert {path.name: path.read_bytes() for path in again.folder.iterdir()} == before
    np.testing.assert_allclose(again.image, HU / 500, atol=5e-4)
    assert ["made again" in record.message for record in caplog.records] == [True]
    assert entries(store) == [first.folder.name]


def test_an_entry_is_checked_once_per_process_and_file(store, case, monkeypatch) -> None:
    stored = store.add(case, PLAN)
    store.add(case, PLAN)
    read: list[str] = []
    monkeypatch.setattr(store_module, "file_checksum", lambda path: read.append(path.name) or "")
    store.add(case, PLAN)
    assert read == []
    os.utime(stored.folder / "labels.npy", (1, 1))
    monkeypatch.setattr(store_module, "_write", lambda case, plan, folder: (folder / "case.json").touch())
    store.add(case, PLAN)
    assert read == ["labels.npy"] * 2  # and once more before it is replaced: another process may have mended it


def test_a_damaged_measurement_is_made_again(store, case) -> None:
    expected = store.measure(case, PLAN)
    (memory,) = store.folder.glob("*.measured")
    whole = memory.read_bytes()
    memory.write_bytes(whole.replace(b"[6.0", b"[7.0", 1))
    assert memory.read_bytes() != whole
    assert store.measure(case, PLAN).as_json() == expected.as_json()
    assert memory.read_bytes() == whole


def test_every_file_is_flushed_before_the_entry_gets_its_name(store, case, monkeypatch) -> None:
    happened: list[str] = []
    flush, rename = os.fsync, os.replace

    def flushed(handle: int) -> None:
        happened.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        flush(handle)

    def renamed(source, target) -> None:
        happened.append("renamed")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    store.add(case, PLAN)
    assert happened == ["image.npy", "labels.npy", "foreground.npz", "case.json", "renamed"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_with_its_reason_and_place(store, case, monkeypatch) -> None:
    """numpy's own error on a full disk has no number: '60 requested and 0 written'."""
    original = Path.mkdir

    def with_a_full_disk(self: Path, *arguments, **named) -> None:
        original(self, *arguments, **named)
        if self.name.startswith(".incomplete-"):
            (self / "image.npy").symlink_to("/dev/full")

    monkeypatch.setattr(Path, "mkdir", with_a_full_disk)
    with pytest.raises(OSError, match=r"image\.npy") as caught:
        store.add(case, PLAN)
    assert caught.value.errno == errno.ENOSPC
    assert entries(store) == []
