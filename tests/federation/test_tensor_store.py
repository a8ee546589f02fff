"""Tensors that are written once and read often."""

from __future__ import annotations

import pytest
import torch
from refusing import refused

from panorgan.errors import RunError
from panorgan.federation import tensor_store as store_module
from panorgan.federation.tensor_store import DiskTensorStore, RunTensorStores, safe_name
from panorgan.methods.protocol import MemoryTensorStore

ARRAYS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.steps": torch.tensor(4), "b": torch.ones(2).bfloat16()}


@pytest.fixture(params=["disk", "memory"])
def tensor_store(request, tmp_path):
    return DiskTensorStore(tmp_path / "vault") if request.param == "disk" else MemoryTensorStore()


def test_what_is_put_comes_back(tensor_store):
    assert tensor_store.names() == ()
    tensor_store.put("teacher/south", ARRAYS)
    tensor_store.put("teacher/North", {"x": torch.zeros(1)})
    assert tensor_store.names() == ("teacher/North", "teacher/south")
    found = tensor_store.get("teacher/south")
    assert found.keys() == ARRAYS.keys()
    assert all(torch.equal(found[k], ARRAYS[k]) and found[k].dtype == ARRAYS[k].dtype for k in ARRAYS)


def test_putting_again_replaces_the_whole(tensor_store):
    tensor_store.put("t", ARRAYS)
    tensor_store.put("t", {"b": torch.zeros(2)})
    assert tensor_store.names() == ("t",)
    found = tensor_store.get("t")
    assert list(found) == ["b"]
    assert torch.equal(found["b"], torch.zeros(2))


def test_what_is_kept_does_not_change_with_its_source(tensor_store):
    weight = torch.zeros(3)
    tensor_store.put("t", {"w": weight})
    weight += 1
    assert not tensor_store.get("t")["w"].any()


def test_a_folder_is_made_only_when_needed(tmp_path):
    tensor_store = DiskTensorStore(tmp_path / "vault" / "run")
    assert tensor_store.names() == ()
    assert not (tmp_path / "vault").exists()


def test_a_kill_while_writing_leaves_what_was_there(tmp_path, monkeypatch):
    tensor_store = DiskTensorStore(tmp_path)
    tensor_store.put("t", ARRAYS)

    def die(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("panorgan.federation.files.os.replace", die)
        with pytest.raises(KeyboardInterrupt):
            tensor_store.put("t", {"b": torch.zeros(1)})
    assert tensor_store.get("t").keys() == ARRAYS.keys()
    assert tensor_store.names() == ("t",)


def test_what_is_written_survives_a_power_cut(tmp_path, monkeypatch):
    written: list[bool] = []
    original = store_module.write_atomically

    def watched(path, content, durable=False):
        written.append(durable)
        original(path, content, durable)

    monkeypatch.setattr(store_module, "write_atomically", watched)
    DiskTensorStore(tmp_path).put("t", ARRAYS)
    assert written == [True]


def test_what_is_gone_or_damaged_is_named(tmp_path):
    tensor_store = DiskTensorStore(tmp_path)
    with refused("vault-unreadable", RunError) as caught:
        tensor_store.get("teacher/south")
    assert "teacher/south" in caught.value.what
    assert caught.value.fix
    tensor_store.put("t", ARRAYS)
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:60])
    with refused("vault-unreadable", RunError) as caught:
        tensor_store.get("t")
    assert caught.value.where == str(path)


@pytest.mark.parametrize("name", ["teacher/a", "../../escape", "Ünïversity", "a" * 300, "", ".", "con:1"])
def test_names_are_safe_for_file_systems(name):
    safe = safe_name(name)
    assert set(safe) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
    assert len(safe) <= 80


def test_names_that_differ_in_capitals_or_odd_characters_stay_apart():
    names = ["a/b", "a-b", "A-b", "a b", "a--b"]
    assert len({safe_name(name).lower() for name in names}) == len(names)


def test_vaults_of_other_runs_can_be_removed(tmp_path):
    stores = RunTensorStores(tmp_path)
    stores.remove()  # nothing is there
    for run in ("first", "second", "third"):
        stores.of(run).put("t", ARRAYS)
    (tmp_path / "state.safetensors").touch()
    stores.remove(but="second")
    assert [stores.of(run).names() for run in ("first", "second", "third")] == [(), ("t",), ()]
    stores.remove()
    assert not list((tmp_path / "vault").iterdir())
    assert (tmp_path / "state.safetensors").exists()
