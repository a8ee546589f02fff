"""What may leave a site: the policy, the guard that enforces it, and what it writes down."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from panorgan.anatomy import Vocabulary
from panorgan.errors import ConfigError
from panorgan.federation.audit import AuditLog, head_path, read_log
from panorgan.federation.egress import (
    Egress,
    EgressPolicy,
    TensorRule,
    default_policy,
    image_test,
    number_words,
    parse_policy,
    policy_text,
    suspicious_name,
    weights_of_site,
)
from panorgan.federation.failures import CODES, EgressError, code_of
from panorgan.federation.message import Message
from panorgan.methods import registry
from panorgan.methods.base import Method
from panorgan.methods.exchange import Federation, SiteFacts
from panorgan.networks import UNetSettings

WEIGHTS = {"encoder.weight": torch.zeros(4, 1, 3, 3, 3), "head.bias": torch.zeros(3), "steps": torch.tensor(0)}
META = {"answers": "train/train/2", "run": "tiny-1", "site": "north"}
POLICY = EgressPolicy(
    weights=True,
    numbers=("loss", "cases", "dice/*"),
    tensors={"mask/*": TensorRule(types=("uint8",), max_dimensions=1, max_elements=10)},
    failures=True,
)
VOLUME, PATCH = (30, 20, 25), (16, 16, 16)


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "egress-log.jsonl"


def guard(log: Path, policy: EgressPolicy = POLICY, **changes: Any) -> Egress:
    meta = {key: value.to("meta") for key, value in WEIGHTS.items()}
    return Egress(policy.model_copy(update=changes), meta, AuditLog(log), (VOLUME, PATCH))


def message(arrays=WEIGHTS, numbers=None, **meta: Any) -> bytes:
    return Message(arrays, {"loss": 0.5, "cases": 3.0} if numbers is None else numbers, {**META, **meta}).to_bytes()


def refused(log: Path, answer: bytes, **changes: Any) -> str:
    """The error's text; makes sure that it was logged as refused and that its code is the right one."""
    with pytest.raises(EgressError) as caught:
        guard(log, **changes).release(answer, "train", 2, "train")
    report, records = read_log(log)
    assert report.ok
    assert records[-1]["kind"] == "refused"
    assert records[-1]["reasons"]
    assert records[-1]["sha256"] == hashlib.sha256(answer).hexdigest()
    assert code_of(caught.value) == "egress-refused"
    return str(caught.value)


# -- what may leave ----------------------------------------------------------------------------------------------


def test_weights_and_named_numbers_leave_as_they_are_and_are_written_down(log):
    answer = message()
    assert guard(log).release(answer, "train", 2, "train") is answer
    _, (record,) = read_log(log)
    told = {name: record[name] for name in ("direction", "kind", "task", "stage", "round", "run", "tensors", "bytes")}
    assert told == {
        "direction": "out",
        "kind": "sent",
        "task": "train",
        "stage": "train",
        "round": 2,
        "run": "tiny-1",
        "tensors": 3,
        "bytes": len(answer),
    }
    assert record["numbers"] == {"cases": 3.0, "loss": 0.5}
    assert record["sha256"] == hashlib.sha256(answer).hexdigest()
    assert record["listed"] == [
        ["encoder.weight", [4, 1, 3, 3, 3], "float32"],
        ["head.bias", [3], "float32"],
        ["steps", [], "int64"],
    ]


def test_a_part_of_the_weights_and_declared_tensors_leave(log):
    arrays = {"head.bias": torch.ones(3), "mask/encoder": torch.ones(10, dtype=torch.uint8)}
    assert guard(log).release(message(arrays), "train") == message(arrays)


def test_a_failure_leaves_as_a_code_alone(log):
    for code in CODES:
        guard(log).release(Message(meta={**META, "failed": code}).to_bytes(), "train", 2)
    _, records = read_log(log)
    assert [(record["kind"], record["code"]) for record in records] == [("failed", code) for code in CODES]


def test_the_record_is_on_disk_before_the_bytes_are_handed_out(log, monkeypatch):
    """A log that cannot be written keeps everything here."""
    egress = guard(log)
    egress.release(message(), "train")
    head_path(log).write_text("nonsense")
    with pytest.raises(EgressError, match="does not verify"):
        egress.release(message(), "train")


def test_the_line_of_a_round_is_short_although_the_model_is_big(log):
    arrays = {f"layers.{i}.convolution.weight": torch.zeros(2) for i in range(200)}
    egress = guard(log)
    egress.known_weights = arrays
    for round_ in range(3):
        egress.release(message(arrays), "train", round_)
    first, *others = log.read_bytes().splitlines()
    assert len(first) > 5000
    assert all(len(line) < 600 for line in others)
    assert all(len(record["listed"]) == 200 for record in read_log(log)[1])


# -- what may not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"head.bias": torch.zeros(4)}, ["head.bias", "float32 [4]", "float32 [3]"]),
        ({"head.bias": torch.zeros(3, dtype=torch.float64)}, ["head.bias", "float64 [3]"]),
        ({"encoder.weight": torch.zeros(VOLUME)}, ["encoder.weight", "[30, 20, 25]"]),
        ({"feature": torch.zeros(3)}, ["feature", "the policy does not name it", "'tensors' in the egress policy"]),
        ({"mask/a": torch.zeros(3)}, ["mask/a", "float32", "uint8"]),
        ({"mask/a": torch.zeros(11, dtype=torch.uint8)}, ["11 elements", "max_elements"]),
        ({"mask/a": torch.zeros(2, 2, dtype=torch.uint8)}, ["2 dimensions", "max_dimensions"]),
        ({"mask/a": torch.zeros(VOLUME, dtype=torch.uint8)}, ["shape of an image"]),
    ],
)
def test_a_tensor_that_is_not_what_it_should_be(log, arrays, words):
    text = refused(log, message(arrays))
    assert all(word in text for word in words), text


def test_weights_stay_where_the_policy_keeps_them(log):
    text = refused(log, message(), weights=False)
    assert all(key in text for key in WEIGHTS)
    assert "weights: true" in text


def test_an_extra_tensor_may_have_the_shape_of_a_weight(log):
    """Control variates and masks of weights: larger than the rule's limits, but no larger than what leaves anyhow."""
    extra = {"mask/encoder.weight": torch.ones(4, 1, 3, 3, 3, dtype=torch.uint8)}
    guard(log).release(message(extra), "train")
    assert "5 dimensions" in refused(log, message({"mask/x": torch.ones(4, 1, 3, 3, 2, dtype=torch.uint8)}))


def test_a_declared_copy_of_a_weight_may_look_like_an_image(log):
    """`teacher/<weight>` in that weight's shape: such a layer is no scan. Under any other name it may be one."""
    egress = guard(log, tensors={"teacher/*": TensorRule(), "other/*": TensorRule()})
    layer = torch.zeros(30, math.prod(VOLUME))
    egress.known_weights = {**egress.known_weights, "linear.weight": layer.to("meta")}
    egress.release(message({"teacher/linear.weight": layer}), "train")
    with pytest.raises(EgressError, match="shape of an image"):
        egress.release(message({"other/linear": layer}), "train")
    with pytest.raises(EgressError, match="shape of an image"):
        egress.release(message({"teacher/linear.weight": layer[:4]}), "train")
    with pytest.raises(EgressError, match="does not name it"):
        egress.release(message({"copy/linear.weight": layer}), "train")


def test_every_offender_is_named_with_what_would_let_it_leave(log):
    numbers = {"loss": 0.1, "age/mean": 61.0, "grad_norm": 2.0}
    text = refused(log, message({"head.bias": torch.zeros(3), "feature": torch.zeros(2)}, numbers))
    assert "3 things" in text
    assert "number 'age/mean', number 'grad_norm': the policy does not name it" in text
    assert "add it to 'numbers' in the egress policy (local/egress.yaml)" in text
    assert "tensor 'feature'" in text
    assert "'loss'" not in text
    assert "head.bias" not in text


def test_numbers_that_are_many_or_no_numbers(log):
    many = {f"dice/a{index}": 0.5 for index in range(1001)}
    assert "1001 numbers, 1000 may leave" in refused(log, message({}, many))
    assert "not a plain number" in refused(log, message({}, {"loss": 2**53 + 1}))
    assert "not a plain number" in refused(log, message({}, {"loss": True}))
    guard(log).release(message({}, {"cases": 3}), "train")


@pytest.mark.parametrize(
    "meta",
    [
        {"note": "hello"},
        {"run": "a/b"},
        {"run": "C:\\data"},
        {"run": "x" * 101},
        {"run": "two\nlines"},
        {"site": {"name": "north"}},
        {"experiment": 5},
        {"answers": "/data/patients"},
        {"answers": "train/train/2/patient"},
        {"failed": "Traceback (most recent call last)"},
    ],
)
def test_words_that_do_not_belong_into_an_answer(log, meta):
    refused(log, message({}, {}, **meta))


def test_an_ordinary_experiment_fingerprint_may_be_told(log):
    answer = message(experiment="0123456789abcdef")
    assert guard(log).release(answer, "train") == answer


def test_a_failure_that_says_more_than_its_code(log):
    assert "beside the code" in refused(log, message(failed="memory"))
    silent = refused(log, message({}, {}, failed="memory"), failures=False)
    assert "failures: true" in silent


def test_a_message_that_is_too_large(log):
    assert "max_message_mb" in refused(log, message(), max_message_mb=0.0001)


def test_bytes_that_are_no_message(log):
    assert "cannot be read" in refused(log, b"\x89PNG...")


def test_nothing_hides_beside_the_message(log):
    """Other metadata, other fields, a key that stands twice, spaces in the header: all of it would leave unseen."""
    head = {"version": 1, "numbers": {}, "meta": META}
    text = json.dumps(head, sort_keys=True)
    assert guard(log).release(save(WEIGHTS, {"panorgan": text}), "train")
    for metadata in (
        {"panorgan": text, "patient": "Doe, Jane"},
        {"panorgan": json.dumps({**head, "patient": "Doe, Jane"}, sort_keys=True)},
        {"panorgan": text + " " * 8},
    ):
        assert "holds more than" in refused(log, save(WEIGHTS, metadata))
    assert "stands there twice" in refused(log, save(WEIGHTS, {"panorgan": text[:-1] + ', "version": 1}'}))
    answer = message()
    (length,) = struct.unpack("<Q", answer[:8])
    padded = struct.pack("<Q", length + 8) + answer[8 : 8 + length] + b" " * 8 + answer[8 + length :]
    assert "holds more than" in refused(log, padded)


def test_a_refusal_with_many_names_is_one_line_of_bearable_length(log):
    refused(log, message({}, {f"voxel_{index}": 1.0 for index in range(5000)}))
    (line,) = log.read_bytes().splitlines()
    assert len(line) < 2000
    assert b"and 4980 more" in line


# -- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "/data/scan",
        "data//scan",
        "../scan",
        "~/scan",
        "C:/scan",
        "c:scan",
        "data\\scan",
        "north/scan.nii.gz",
        "scan.dcm/mean",
        "two words",
        "größe",
        "",
        "a" * 201,
        "annotated/19580312",
        "1.2.840.113619.2",
    ],
)
def test_names_that_may_tell_of_files_or_patients(log, name):
    assert suspicious_name(name)
    refused(log, message({}, {name: 1.0}), numbers=("*",))
    refused(log, message({name: torch.zeros(2)}, {}), tensors={"*": TensorRule()})


@pytest.mark.parametrize(
    "name", ["dice/kidney_left", "plan/hu_low/liver", "members.site-a.down1.conv.0.weight", "head:liver"]
)
def test_names_that_are_fine(name):
    assert not suspicious_name(name)


def test_a_site_whose_name_is_a_number_may_send_its_weights():
    assert not suspicious_name("members.site-20240101.weight", is_ours=True)


# -- images ------------------------------------------------------------------------------------------------------

VOXELS = 30 * 20 * 25


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (VOLUME, torch.float32),
        ((25, 20, 30), torch.float32),
        ((1, 1, *VOLUME), torch.uint8),
        ((2, 4, *PATCH), torch.float16),
        ((VOXELS,), torch.float32),
        ((3, VOXELS), torch.float32),
        ((1, VOXELS), torch.uint8),
        ((16, 16, 16), torch.bool),
    ],
)
def test_shapes_that_hold_an_image(shape, dtype):
    assert image_test((VOLUME, PATCH))(torch.zeros(shape, dtype=dtype))


def test_packed_masks_of_large_volumes():
    test = image_test([(64, 64, 32)])
    assert test(torch.zeros(64 * 64 * 32 // 8, dtype=torch.uint8))
    assert not test(torch.zeros(64 * 64 * 32 // 8))


@pytest.mark.parametrize("shape", [(), (3,), (64, 32), (16, 16, 3, 3, 3), (16, 16), (30, 20), (VOXELS + 1,)])
def test_shapes_that_do_not(shape):
    assert not image_test((VOLUME, PATCH))(torch.zeros(shape))


def test_slices_are_images_but_weights_of_a_convolution_are_not():
    test = image_test([(64, 64, 1)])
    assert test(torch.zeros(64, 64))
    assert test(torch.zeros(2, 1, 64, 64))
    assert not test(torch.zeros(64, 64, 1, 1))


@given(st.lists(st.integers(2, 40), min_size=3, max_size=3), st.randoms(), st.lists(st.integers(1, 3), max_size=2))
def test_however_a_volume_is_turned_and_stacked(volume, random, stack):
    turned = random.sample(volume, 3)
    assert image_test([volume])(torch.empty([*stack, *turned], device="meta"))


def test_no_policy_lets_an_image_leave(log):
    text = refused(log, message({"mask/a": torch.zeros(VOLUME)}), tensors={"*": TensorRule(max_dimensions=9)})
    assert "never leave" in text


# -- the policy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(registry.methods()))
def test_the_default_policy_survives_being_written_and_read(name):
    policy = default_policy(name)
    assert parse_policy(yaml.safe_load(policy_text(policy, name))) == policy


def test_a_policy_with_everything_survives_too():
    rule = TensorRule(what='bits: "kept" # or not', types=("uint8", "bool"), max_dimensions=1, max_elements=7)
    policy = EgressPolicy(
        numbers=("*", "yes", "loss"), tensors={"mask/*": rule, "on": TensorRule()}, max_message_mb=2.5
    )
    text = policy_text(policy, "fedavg")
    assert parse_policy(yaml.safe_load(text)) == policy
    assert max(map(len, text.splitlines())) <= 120


def test_what_a_policy_does_not_name_stays(log):
    policy = parse_policy({"numbers": ["loss"]})
    assert not policy.weights
    assert not policy.failures
    assert not policy.tensors


def test_the_default_policy_says_what_the_method_says(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry.methods()))

    @registry.register("masking")
    class Masking(Method):
        """Sends masks."""

        numbers = {**Method.numbers, "kept/*": "how many weights of each layer this site keeps"}  # noqa: RUF012
        tensors = {"mask/*": "Which weights this site keeps, one bit each."}  # noqa: RUF012

    policy = default_policy("masking")
    assert policy.weights
    assert policy.failures
    assert policy.tensors == {"mask/*": TensorRule(what="Which weights this site keeps, one bit each.")}
    common = {"train_cases", "annotated/*", "plan/*", "cases", "dice/*", "volume/*"}
    assert set(policy.numbers) == {*common, "loss", "kept/*"}
    lines = policy_text(policy, "masking").splitlines()
    assert any("Which weights this site keeps" in line for line in lines)
    assert '  - "kept/*"            # how many weights of each layer this site keeps' in lines
    assert '  - "loss"              # mean loss of the round' in lines
    assert '  - "dice/*"            # mean validation score per structure' in lines
    assert any(line.startswith('  - "volume/*"          # predicted / annotated volume') for line in lines)


def test_a_number_that_no_method_explains_gets_no_made_up_words():
    lines = policy_text(EgressPolicy(numbers=("mine", "loss")), "fedavg").splitlines()
    assert '  - "mine"' in lines
    assert '  - "loss"              # mean loss of the round' in lines


@pytest.mark.parametrize("name", sorted(registry.methods()))
def test_every_number_of_a_default_policy_is_explained(name):
    text, words = policy_text(default_policy(name), name), number_words(name)
    for pattern in default_policy(name).numbers:
        (line,) = [line for line in text.splitlines() if line.startswith(f'  - "{pattern}" ')]
        assert line.partition("# ")[2] == words[pattern] != ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"number": []}, ["'number'", "did you mean 'numbers'", "local/egress.yaml: number"]),
        ({"tensors": {"a": {"max_element": 1}}}, ["'max_element'", "max_elements", "tensors.a.max_element"]),
        ({"tensors": {"a": {"types": ["complex64"]}}}, ["tensors.a.types.0", "complex64"]),
        ({"max_message_mb": -1}, ["max_message_mb", "greater than 0"]),
        ({5: True}, ["5"]),
    ],
)
def test_a_policy_that_cannot_be_read_says_where(content, words):
    with pytest.raises(ConfigError) as caught:
        parse_policy(content, "local/egress.yaml")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.fix


# -- the site's weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, method in registry.methods().items() if not method.pooled])
def test_the_weights_of_a_site_without_its_memory(name):
    method = registry.methods()[name](registry.methods()[name].Config())
    facts = {"a": SiteFacts("a", 1, {"liver": 1}), "b": SiteFacts("b", 1, {"spleen": 1})}
    federation = Federation(Vocabulary(["liver", "spleen"]), facts)
    settings = UNetSettings(features=(4, 8))
    light = weights_of_site(method, settings, federation, "a")
    real = method.build_network(settings, federation, site="a").state_dict()
    assert {k: (v.shape, v.dtype) for k, v in light.items()} == {k: (v.shape, v.dtype) for k, v in real.items()}
    assert all(value.is_meta for value in light.values())
