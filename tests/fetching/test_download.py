"""Downloads against a server on the loopback interface: whole, broken off, continued, changed, refused."""

from __future__ import annotations

import errno
import os
from collections import namedtuple
from urllib.error import URLError

import pytest
from file_server import serving
from refusing import refused

from panorgan.fetching import download as downloading
from panorgan.fetching.download import download

CONTENT = bytes(range(256)) * 40


def quickly(url, target, on_progress=None):
    download(url, target, on_progress, pause=lambda seconds: None)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(downloading, "_BLOCK", 1000)


def test_a_file_arrives_whole_and_leaves_nothing_beside_it(tmp_path):
    seen = []
    with serving(CONTENT) as server:
        quickly(server.url, tmp_path / "new" / "a.tar", lambda done, total: seen.append((done, total)))
    assert (tmp_path / "new" / "a.tar").read_bytes() == CONTENT
    assert os.listdir(tmp_path / "new") == ["a.tar"]
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_a_connection_that_breaks_off_is_taken_up_where_it_stopped(tmp_path):
    with serving(CONTENT, break_after=3000, breaks=3) as server:
        quickly(server.url, tmp_path / "a.tar")
        assert server.ranges == ["", "bytes=3000-", "bytes=6000-", "bytes=9000-"]
    assert (tmp_path / "a.tar").read_bytes() == CONTENT


def test_a_download_that_gave_up_is_continued_by_the_next_command(tmp_path):
    target = tmp_path / "a.tar"
    with serving(CONTENT, break_after=4000, breaks=1) as server:
        with pytest.raises(KeyboardInterrupt):
            download(server.url, target, pause=_stop)
        assert not target.exists()
        quickly(server.url, target)
        assert server.ranges == ["", "bytes=4000-"]
    assert target.read_bytes() == CONTENT


def test_after_four_attempts_without_a_byte_it_gives_up_and_keeps_what_arrived(tmp_path):
    with serving(CONTENT, break_after=0, breaks=99) as server:
        with refused("download-broken-off") as caught:
            quickly(server.url, tmp_path / "a.tar")
        assert len(server.ranges) == 4
        server.breaks, server.break_after = 1, 500
        server.ranges.clear()
        quickly(server.url, tmp_path / "a.tar")
    assert caught.value.where == server.url
    assert (tmp_path / "a.tar").read_bytes() == CONTENT


def test_a_file_that_has_changed_meanwhile_begins_again(tmp_path):
    target = tmp_path / "a.tar"
    with serving(CONTENT, break_after=4000, breaks=1) as server:
        with pytest.raises(KeyboardInterrupt):
            download(server.url, target, pause=_stop)
        server.content, server.tag = CONTENT[::-1], '"v2"'
        quickly(server.url, target)
        assert server.ranges == ["", "bytes=4000-"]
    assert target.read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("tag", ["", 'W/"weak"'])
def test_without_a_version_that_can_be_relied_on_nothing_is_continued(tmp_path, tag):
    with serving(CONTENT, tag=tag, break_after=4000, breaks=1) as server:
        quickly(server.url, tmp_path / "a.tar")
        assert server.ranges == ["", ""]
    assert (tmp_path / "a.tar").read_bytes() == CONTENT


def test_what_arrived_from_another_address_is_not_continued(tmp_path):
    target = tmp_path / "a.tar"
    with serving(CONTENT, break_after=4000, breaks=1) as first, pytest.raises(KeyboardInterrupt):
        download(first.url, target, pause=_stop)
    with serving(CONTENT[::-1]) as second:
        quickly(second.url, target)
        assert second.ranges == [""]
    assert target.read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize(("kept", "asked"), [(len(CONTENT), 1), (len(CONTENT) + 5, 2)])
def test_a_range_behind_the_end_means_whole_or_another_file(tmp_path, kept, asked):
    """Killed between the last byte and the renaming; or the server now has a shorter file."""
    with serving(CONTENT, break_after=1, breaks=1) as server:
        with pytest.raises(KeyboardInterrupt):
            download(server.url, tmp_path / "a.tar", pause=_stop)
        (tmp_path / "a.tar.part").write_bytes((CONTENT + b"12345")[:kept])
        server.ranges.clear()
        quickly(server.url, tmp_path / "a.tar")
        assert len(server.ranges) == asked
    assert (tmp_path / "a.tar").read_bytes() == CONTENT


@pytest.mark.parametrize(("status", "attempts"), [(404, 1), (403, 1), (503, 4)])
def test_a_server_that_refuses_is_named_and_asked_again_only_if_it_may_help(tmp_path, status, attempts):
    with serving(CONTENT, status=status) as server:
        with refused("download-refused") as caught:
            quickly(server.url, tmp_path / "a.tar")
        assert len(server.ranges) == attempts
    assert str(status) in caught.value.why


def test_without_a_network_it_says_so_at_once(tmp_path):
    with serving(CONTENT) as server:
        pass
    with refused("server-unreachable"):  # nothing listens there any more
        download(server.url, tmp_path / "a.tar", pause=_stop)
    assert list(tmp_path.iterdir()) == []


def test_a_connection_that_vanishes_between_attempts_is_broken_off_not_unreachable(tmp_path, monkeypatch):
    opened = downloading.urlopen
    with serving(CONTENT, break_after=2000, breaks=1) as server:
        calls = []

        def once(request, timeout):
            calls.append(request)
            if len(calls) > 1:
                raise URLError("no route")
            return opened(request, timeout=timeout)

        monkeypatch.setattr(downloading, "urlopen", once)
        with refused("download-broken-off"):
            quickly(server.url, tmp_path / "a.tar")
    assert (tmp_path / "a.tar.part").stat().st_size == 2000


def test_a_disk_without_room_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(downloading.shutil, "disk_usage", lambda path: usage(1, 1, len(CONTENT) - 1))
    with serving(CONTENT) as server, refused("no-room-to-download"):
        quickly(server.url, tmp_path / "a.tar")


def test_a_full_disk_is_not_blamed_on_the_connection(tmp_path):
    def full(done, total):
        if done:
            raise OSError(errno.ENOSPC, "no space")

    with serving(CONTENT) as server:
        with pytest.raises(OSError, match="no space"):
            quickly(server.url, tmp_path / "a.tar", full)
        assert len(server.ranges) == 1


def test_a_way_out_of_encryption_is_not_taken():
    downloading._refuse_downgrade("https://a/b", "https://c/b")
    downloading._refuse_downgrade("http://a/b", "http://c/b")
    with refused("download-unencrypted"):
        downloading._refuse_downgrade("https://a/b", "http://a/b")


def _stop(seconds):
    raise KeyboardInterrupt
