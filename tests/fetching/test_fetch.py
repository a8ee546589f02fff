"""Fetch a data set: its licence, checksum, structure and folder; by hand, without a network, from the command line."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile

import nibabel as nib
import numpy as np
import pytest
from file_server import serving
from filelock import FileLock
from invoking import invoke
from refusing import refused

from panorgan.config import load_experiment
from panorgan.data.layouts import find_layout, layouts
from panorgan.data.places import data_folder
from panorgan.fetching import catalogue
from panorgan.fetching.catalogue import LICENCES, DataSet, data_sets, find_data_set
from panorgan.fetching.fetch import fetch
from panorgan.fetching.unpack import unpack

SCAN = nib.Nifti1Image(np.zeros((2, 2, 2), dtype=np.int16), np.eye(4)).to_bytes()
DESCRIPTION = {
    "labels": {"0": "background", "1": "Anterior"},
    "training": [{"image": "./imagesTr/a.nii", "label": "./labelsTr/a.nii"}],
}
FILES = {
    "Task04_Hippocampus/dataset.json": json.dumps(DESCRIPTION).encode(),
    "Task04_Hippocampus/imagesTr/a.nii": SCAN,
    "Task04_Hippocampus/labelsTr/a.nii": SCAN,
    "Task04_Hippocampus/imagesTr/._a.nii": b"Finder",
}


def tar_of(files, kind="w"):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=kind) as tape:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tape.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def zip_of(files):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


def described(archive, **changes):
    """The hippocampus, with the checksum of a made archive."""
    known = find_data_set("hippocampus").model_dump()
    return DataSet(**{**known, "md5": hashlib.md5(archive).hexdigest(), **changes})


TAR = tar_of(FILES)


# -- the catalogue ---------------------------------------------------------------------------------------------


def test_every_set_names_a_layout_a_licence_and_its_source():
    assert {one.layout for one in data_sets().values()} <= set(layouts())
    fetched = [one for one in data_sets().values() if one.url]
    assert len(fetched) >= 12
    assert [one.name for one in fetched if one.licence not in LICENCES or not one.url.startswith("https://")] == []
    assert [one.name for one in fetched if not one.size or not one.archive.endswith((".tar", ".zip"))] == []
    folders = [one.folder for one in data_sets().values()]
    assert len(set(folders)) == len(folders)


def test_the_checksums_of_the_decathlon_are_those_that_monai_checks():
    """Not copied from memory: the library that is installed beside states the same."""
    from monai.apps import DecathlonDataset

    ours = {one.folder: (one.url, one.md5) for one in data_sets().values() if one.folder.startswith("Task")}
    assert len(ours) == 10
    assert ours == {task: (DecathlonDataset.resource[task], DecathlonDataset.md5[task]) for task in ours}


def test_a_set_is_found_by_its_name_or_folder():
    assert find_data_set("Task04_Hippocampus") is find_data_set("hippocampus")
    assert find_data_set("brain-tumour").folder == "Task01_BrainTumour"
    with refused("unknown-data-set") as caught:
        find_data_set("hipocampus")
    assert "hippocampus" in caught.value.why


# -- fetching --------------------------------------------------------------------------------------------------


def test_a_set_is_downloaded_checked_unpacked_and_its_licence_kept(tmp_path):
    steps = []
    with serving(TAR, break_after=700, breaks=1) as server:
        done = fetch(described(TAR, url=server.url), tmp_path, watch=lambda what, *_: steps.append(what))
    assert (done.scans, done.was_there) == (1, False)
    assert hashlib.md5(TAR).hexdigest() in done.checked
    assert list(dict.fromkeys(steps)) == ["downloading", "checking", "unpacking"]
    assert find_layout(done.folder).name == "msd"
    assert sorted(path.name for path in done.folder.rglob("*") if path.is_file()) == ["a.nii", "a.nii", "dataset.json"]
    licence = done.licence_file.read_text()
    assert "creativecommons.org/licenses/by-sa/4.0" in licence
    assert server.url in licence
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"} == {
        "Task04_Hippocampus",
        "Task04_Hippocampus.licence.txt",
    }
    again = fetch(described(TAR, url=server.url), tmp_path)  # the server is gone, and not needed
    assert (again.was_there, again.scans) == (True, 1)


def test_a_wrong_checksum_is_refused_and_the_file_removed(tmp_path):
    with serving(TAR) as server:
        with refused("wrong-checksum") as caught:
            fetch(described(TAR, url=server.url, md5="0" * 32), tmp_path)
        assert hashlib.md5(TAR).hexdigest() in caught.value.why
        assert not (tmp_path / "set.tar").exists()
        assert not (tmp_path / "Task04_Hippocampus").exists()
        assert fetch(described(TAR, url=server.url), tmp_path).scans == 1


def test_a_sha256_is_checked_where_it_is_stated(tmp_path):
    wanted = described(TAR, md5="", sha256=hashlib.sha256(TAR).hexdigest(), url="https://example.org/set.tar")
    (tmp_path / "set.tar").write_bytes(TAR)
    assert fetch(wanted, tmp_path).checked.startswith("sha256")


def test_without_a_known_checksum_size_and_structure_are_checked_and_it_says_so(tmp_path):
    with serving(TAR) as server:
        done = fetch(described(TAR, md5="", checksum_from="", url=server.url), tmp_path)
    assert "no checksum" in done.checked
    assert "no checksum" in done.licence_file.read_text()
    lacking = tar_of({name: content for name, content in FILES.items() if "labelsTr" not in name})
    with serving(lacking) as server, refused("data-set-incomplete"):
        fetch(described(lacking, md5="", checksum_from="", url=server.url), tmp_path / "other")


def test_without_a_network_it_says_where_the_files_go_and_takes_them_from_there(tmp_path):
    with serving(TAR) as server:
        pass
    wanted = described(TAR, url=server.url)
    with refused("server-unreachable") as caught:
        fetch(wanted, tmp_path)
    for place in (server.url, str(tmp_path / "set.tar"), str(tmp_path / "Task04_Hippocampus")):
        assert place in caught.value.fix
    (tmp_path / "set.tar").write_bytes(TAR)  # carried there
    assert fetch(wanted, tmp_path).scans == 1
    assert (tmp_path / "set.tar").exists()


def test_an_archive_from_elsewhere_is_used_checked_and_kept(tmp_path):
    carried = tmp_path / "usb" / "any-name.tar"
    carried.parent.mkdir()
    carried.write_bytes(TAR)
    assert fetch(described(TAR), tmp_path / "data", source=str(carried)).scans == 1
    carried.write_bytes(TAR + b"x")
    with refused("wrong-checksum"):
        fetch(described(TAR), tmp_path / "other", source=str(carried))
    assert carried.exists()
    with refused("archive-missing"):
        fetch(described(TAR), tmp_path / "third", source=str(tmp_path / "nothing.tar"))


def test_two_processes_do_not_write_one_file(tmp_path):
    with FileLock(tmp_path / ".Task04_Hippocampus.lock"), refused("already-fetching"):
        fetch(described(TAR), tmp_path)


def test_a_set_that_is_not_fetched_says_what_to_do(tmp_path):
    with refused("fetch-by-hand") as caught:
        fetch(find_data_set("acdc"), tmp_path)
    assert caught.value.where == str(tmp_path / "acdc")
    assert find_data_set("acdc").page in caught.value.why


def test_a_folder_that_was_changed_is_noticed(tmp_path):
    (tmp_path / "set.tar").write_bytes(TAR)
    done = fetch(described(TAR, url="https://example.org/set.tar"), tmp_path)
    (done.folder / "labelsTr" / "a.nii").unlink()
    with refused("data-set-incomplete"):
        fetch(described(TAR), tmp_path)


# -- archives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [tar_of, lambda files: tar_of(files, "w:gz"), zip_of], ids=["tar", "tar.gz", "zip"])
def test_archives_with_and_without_a_folder_at_the_top(tmp_path, pack):
    archive = tmp_path / "a"
    for top in ("Top/", ""):
        archive.write_bytes(pack({f"{top}s1/ct.nii": SCAN, f"{top}s2/ct.nii": SCAN, "__MACOSX/x": b""}))
        folder = tmp_path / f"set{len(top)}"
        unpack(archive, folder)
        assert sorted(path.name for path in folder.iterdir()) == ["s1", "s2"]


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "..\\out", "C:/out"])
def test_an_archive_cannot_write_outside_its_folder(tmp_path, name):
    for pack in (tar_of, zip_of):
        (tmp_path / "a").write_bytes(pack({"good": b"1", name: b"2"}))
        with refused("bad-archive"):
            unpack(tmp_path / "a", tmp_path / "in" / "set")
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a"]


def test_links_and_rubbish_are_refused(tmp_path):
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "a", "w") as tape:
        tape.addfile(link)
    for content in ((tmp_path / "a").read_bytes(), b"no archive", TAR[:700], tar_of({})):
        (tmp_path / "a").write_bytes(content)
        with refused("bad-archive"):
            unpack(tmp_path / "a", tmp_path / "set")
        assert not (tmp_path / "set").exists()


# -- the data folder and the command line ----------------------------------------------------------------------


def test_experiments_find_the_data_folder(tmp_path, monkeypatch):
    content = {
        "vocabulary": ["liver"],
        "sites": {"a": {"folder": "$PANORGAN_DATA/x", "withheld": "${PANORGAN_DATA}/y"}, "b": {"folder": "z"}},
    }
    monkeypatch.setenv("PANORGAN_DATA", str(tmp_path / "sets"))
    sites = load_experiment(content).sites
    assert (sites["a"].folder, sites["a"].withheld) == (tmp_path / "sets" / "x", tmp_path / "sets" / "y")
    monkeypatch.delenv("PANORGAN_DATA")
    monkeypatch.chdir(tmp_path)
    assert data_folder() == tmp_path / "data"
    assert load_experiment(content).sites["a"].folder == tmp_path / "data" / "x"
    assert load_experiment(content).sites["b"].folder == tmp_path / "z"
    with refused("folder-missing") as caught:
        find_layout(tmp_path / "data" / "x")
    assert "panorgan fetch" in caught.value.fix
    with refused("folder-missing") as caught:
        find_layout(tmp_path / "x")
    assert "panorgan fetch" not in caught.value.fix


@pytest.fixture
def at_command(tmp_path, capfd, monkeypatch):
    """panorgan fetch, with a data folder and a catalogue of the test's own."""
    monkeypatch.setenv("PANORGAN_DATA", str(tmp_path / "data"))
    made = {**data_sets(), "hippocampus": described(TAR)}
    monkeypatch.setattr(catalogue, "data_sets", lambda: made)
    return lambda *words: invoke(capfd, monkeypatch, "fetch", *words)


def test_the_command_fetches_once_the_licence_is_accepted(at_command, tmp_path):
    with serving(TAR) as server:
        code, out, err = at_command("hippocampus", "--from", server.url)
        assert (code, server.ranges) == (2, [])
        assert "licence-not-accepted" in err
        assert "CC BY-SA 4.0" in err
        code, out, err = at_command("hippocampus", "--from", server.url, "--accept-licence", "--json")
    assert code == 0, err
    fetched = json.loads(out)["fetched"]
    assert (fetched["scans"], fetched["folder"]) == (1, str(tmp_path / "data" / "Task04_Hippocampus"))
    assert "CC BY-SA 4.0" in err
    code, out, _ = at_command("hippocampus")  # there already: nothing to accept
    assert (code, "already" in out) == (0, True)


def test_the_command_lists_what_there_is(at_command, tmp_path):
    (tmp_path / "data" / "acdc").mkdir(parents=True)
    code, out, _ = at_command("--json")
    rows = {row["name"]: row for row in json.loads(out)["data_sets"]}
    assert code == 0
    assert (rows["acdc"]["there"], rows["hippocampus"]["there"]) == (True, False)
    assert (rows["hippocampus"]["licence"], rows["acdc"]["url"]) == ("CC BY-SA 4.0", "")
    code, out, _ = at_command()
    assert (code, "hippocampus" in out) == (0, True)
    code, _, err = at_command("btcv")
    assert (code, "fetch-by-hand" in err) == (2, True)
