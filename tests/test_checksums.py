"""Checksums in files: whatever byte changes, it is noticed, or what is read is the same as before."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save

from panorgan import checksums
from panorgan.checksums import (
    DamagedError,
    checksum,
    ends_in_checksum,
    is_damaged,
    read_json,
    refuse_damage,
    sealed_json,
    sealed_tensors,
    unsealed_tensors,
)
from panorgan.federation.files import read_with_checksum, write_with_checksum
from panorgan.federation.message import Message

MESSAGE = Message({"w": torch.arange(6.0), "n": torch.tensor([1, 2])}, {"loss": 0.5}, {"run": "a", "round": 3})
CONTENT = {"run": "abc", "rounds": 3, "zeros": "00000000", "sites": {"north": [1, 2.5, None]}}


def changed(content: bytes):
    """The content with every single bit flipped, one at a time."""
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            yield bytes(damaged)


def test_a_checksum_is_crc_32_of_all_pieces():
    assert checksum([b"1234", memoryview(b"56789")]) == "cbf43926"  # the check value of CRC-32
    assert checksum([]) == "00000000"


@pytest.mark.parametrize("indent", [None, 1, 2])
def test_json_comes_back_and_any_flipped_bit_is_noticed_or_changes_nothing(indent):
    text = sealed_json(CONTENT, indent=indent).encode()
    assert read_json(text) == CONTENT
    assert {key: value for key, value in json.loads(text).items() if key != "crc32"} == CONTENT, "others can read it"
    noticed = 0
    for damaged in changed(text):
        try:
            assert read_json(damaged) == CONTENT, damaged
        except ValueError:
            noticed += 1
    assert noticed > 7.5 * len(text)


def test_what_was_read_by_another_tool_is_sealed_anew():
    text = sealed_json({"rounds": 4, **json.loads(sealed_json(CONTENT))})
    assert read_json(text.encode()) == {**CONTENT}
    assert text.startswith('{"crc32": "')


def test_json_without_a_checksum_is_read_as_it_is():
    assert read_json(b'{"crd": "1", "rounds": 3}') == {"crd": "1", "rounds": 3}
    assert read_json(b"[1, 2]") == [1, 2]


def test_tensors_come_back_and_any_flipped_bit_is_noticed():
    plain = MESSAGE.to_bytes()
    content = b"".join(sealed_tensors(MESSAGE.to_pieces()))
    assert b"".join(sealed_tensors([plain])) == content, "however it is cut into pieces"
    assert unsealed_tensors(content) == plain
    assert load(content).keys() == MESSAGE.tensors.keys()
    assert len(content) % 8 == len(plain) % 8, "tensors stay aligned"
    refuse_damage(content)
    for damaged in changed(content):
        with pytest.raises((DamagedError, SafetensorError, ValueError)):
            _read_tensors(damaged)


def _read_tensors(content: bytes):
    refuse_damage(content)
    return load(content)


def test_what_the_library_wrote_is_sealed_too(tmp_path):
    content = save({"w": torch.ones(3)}, {"format": "pt"})
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"".join(sealed_tensors([content])))
    assert not is_damaged(path)
    assert torch.equal(load_file(path)["w"], torch.ones(3))
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert is_damaged(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"short", save({"w": torch.ones(3)}), b"\xff" * 8 + b'{"__metadata__":{"panorgan":"x"}}'],
    ids=["nothing", "short", "no metadata", "a header longer than the file"],
)
def test_what_cannot_be_sealed_stays_as_it_is(content):
    """Whatever a site sends is written down before it is read: it must not become something else by that."""
    assert b"".join(sealed_tensors([content])) == content
    assert unsealed_tensors(content) == content


def test_a_large_file_is_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "_BLOCK", 7)
    path = tmp_path / "file"
    path.write_bytes(b"".join(sealed_tensors([MESSAGE.to_bytes()])))
    assert not is_damaged(path)
    for content in (b"", b"x" * 6, b"x" * 7, b"x" * 50):
        path.write_bytes(content + checksum([content]).encode())
        assert ends_in_checksum(path)
        path.write_bytes(content + b"y" + checksum([content]).encode())
        assert not ends_in_checksum(path)
    path.write_bytes(b"")
    assert not ends_in_checksum(path)


# -- a checksum beside the file -------------------------------------------------------------------------------------


def test_a_table_has_its_checksum_beside_it(tmp_path):
    path = tmp_path / "metrics.csv"
    write_with_checksum(path, "a,b\n1,2\n")
    assert path.read_text() == "a,b\n1,2\n" == read_with_checksum(path)
    path.write_text("a,b\n1,3\n")
    with pytest.raises(DamagedError):
        read_with_checksum(path)
    write_with_checksum(path, "a,b\n1,4\n")
    assert read_with_checksum(path) == "a,b\n1,4\n"
    (tmp_path / ".metrics.csv.crc32").unlink()
    assert read_with_checksum(path) == "a,b\n1,4\n", "of an older version"
    with pytest.raises(FileNotFoundError):
        read_with_checksum(tmp_path / "absent.csv")


def test_a_kill_between_the_two_files_leaves_a_table_that_can_be_read(tmp_path, monkeypatch):
    from panorgan.federation import files

    path = tmp_path / "metrics.csv"
    write_with_checksum(path, "old")
    original, calls = files.os.replace, 0

    def killed(source, target):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        original(source, target)

    monkeypatch.setattr(files.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_with_checksum(path, "new")
    monkeypatch.undo()
    assert read_with_checksum(path) == "old"
    write_with_checksum(path, "new")
    assert read_with_checksum(path) == "new"


def test_a_damaged_table_is_not_made_good_by_the_next_that_is_not_finished(tmp_path, monkeypatch):
    from panorgan.federation import files

    path = tmp_path / "metrics.csv"
    write_with_checksum(path, "old")
    path.write_text("odd")
    monkeypatch.setattr(files, "write_atomically", lambda target, text: target.write_text(text))
    monkeypatch.setattr(files.Path, "write_text", _only_beside(files.Path.write_text))
    write_with_checksum(path, "new")
    monkeypatch.undo()
    with pytest.raises(DamagedError):
        read_with_checksum(path)


def _only_beside(original):
    def write(self, text):
        if self.name.startswith("."):
            original(self, text)

    return write
