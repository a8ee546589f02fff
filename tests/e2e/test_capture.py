"""An eavesdropper on the machine reads no weights, neither between sites and server nor between processes of one."""

from __future__ import annotations

import json
import re

import pytest
from capture import seen, sent_in_the_open, why_not, windows
from intruders import text_of
from safetensors.torch import load_file

from panorgan.federation.checkpoint import Checkpoints
from panorgan.federation.message import Message

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def test_no_tensor_and_no_word_of_a_message_can_be_read(disturbed_run, loopback, tmp_path):
    captured = disturbed_run.captured
    assert disturbed_run.capture.dropped == 0
    assert disturbed_run.ports <= disturbed_run.capture.ports, "no other port was open"
    manifest = json.loads((disturbed_run.folder / "manifest.json").read_text())
    weights = {
        f"{path.stem}/{key}": value
        for path in (disturbed_run.folder / "checkpoints").glob("round-*.safetensors")
        for key, value in load_file(path).items()
    }
    answers = {name: load_file(kit.path / "state" / "answer.safetensors") for name, kit in loopback.site_kits.items()}
    # The run and the experiment are named in the head of every message.
    words = [manifest["run"].encode(), manifest["fingerprint"].encode()]
    secrets = windows(weights) + [window for answer in answers.values() for window in windows(answer)] + words
    assert len(secrets) > 200

    _it_was_all_there(captured, loopback, disturbed_run)
    assert seen(secrets, captured) == []

    # The same search finds every one of them where nothing is encrypted.
    tensors = {
        **weights,
        **{f"{name}/{key}": value for name, answer in answers.items() for key, value in answer.items()},
    }
    message = Message(tensors, meta={"run": manifest["run"], "experiment": manifest["fingerprint"]}).to_bytes()
    in_the_open = sent_in_the_open(message, tmp_path / "open.pcap")
    assert {secret for _, secret in seen(secrets, in_the_open)} == set(secrets)


def _it_was_all_there(captured, loopback, run) -> None:
    """The capture holds the weights' way: from the sites to the server's port, and inside to the job's process."""
    model = sum(value.nbytes for value in Checkpoints(run.folder / "checkpoints").load_latest().weights.values())
    inside = re.findall(r"internal listener for s?tcp://[\w.]+:(\d+)", text_of(loopback.server_kit.path / "log.txt"))
    for port in (loopback.settings.server.port, int(inside[-1])):
        for direction in (0, 1):
            assert sum(len(content) for ports, content in captured.items() if ports[direction] == port) > 4 * model
