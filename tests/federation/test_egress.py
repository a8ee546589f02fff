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
from refusing import refused
from safetensors.torch import save

from panorgan.anatomy import Vocabulary
from panorgan.errors import ConfigError
from panorgan.federation.audit import AuditLog, head_path, read_log
from panorgan.federation.egress import (
    Egress,
    EgressPolicy,
    TensorRule,
    default_policy,
    number_words,
    parse_policy,
    policy_text,
    weights_of_site,
)
from panorgan.federation.failures import CODES, EgressError, code_of
from panorgan.federation.lookalikes import image_test, suspicious_name
from panorgan.federation.message import Message
from panorgan.methods import registry
from panorgan.methods.base import Method
from panorgan.methods.protocol import Federation, SiteInfo
from panorgan.networks import UNetSettings
from panorgan.networks.organ_parts import group_of_key

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


def message(tensors=WEIGHTS, numbers=None, **meta: Any) -> bytes:
    return Message(tensors, {"loss": 0.5, "cases": 3.0} if numbers is None else numbers, {**META, **meta}).to_bytes()


def objections(log: Path, answer: bytes, **changes: Any) -> dict[str, str]:
    """Code → reason, of a refused answer; makes sure that it was logged and which code travels."""
    with refused("egress-refused", EgressError) as caught:
        guard(log, **changes).release(answer, "train", 2, "train")
    report, records = read_log(log)
    assert report.ok
    assert records[-1]["kind"] == "refused"
    assert tuple(records[-1]["codes"]) == caught.value.reasons
    assert records[-1]["sha256"] == hashlib.sha256(answer).hexdigest()
    assert code_of(caught.value) == "egress-refused"
    return dict(zip(records[-1]["codes"], records[-1]["reasons"], strict=True))


# -- what may leave ----------------------------------------------------------------------------------------------


def test_weights_and_named_numbers_leave_as_they_are_and_are_written_down(log):
    answer = message()
    assert guard(log).release(answer, "train", 2, "train") is answer
    _, (record,) = read_log(log)
    reported = {
        name: record[name] for name in ("direction", "kind", "task", "stage", "round", "run", "tensors", "bytes")
    }
    assert reported == {
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
    tensors = {"head.bias": torch.ones(3), "mask/encoder": torch.ones(10, dtype=torch.uint8)}
    assert guard(log).release(message(tensors), "train") == message(tensors)


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
    with refused("audit-log-broken", EgressError):
        egress.release(message(), "train")


def test_the_line_of_a_round_is_short_although_the_model_is_big(log):
    tensors = {f"layers.{i}.convolution.weight": torch.zeros(2) for i in range(200)}
    egress = guard(log)
    egress.known_weights = tensors
    for round_ in range(3):
        egress.release(message(tensors), "train", round_)
    first, *others = log.read_bytes().splitlines()
    assert len(first) > 5000
    assert all(len(line) < 600 for line in others)
    assert all(len(record["listed"]) == 200 for record in read_log(log)[1])


# -- what may not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "code", "named"),
    [
        ({"head.bias": torch.zeros(4)}, "weight-differs", ["head.bias", "float32 [4]", "float32 [3]"]),
        ({"head.bias": torch.zeros(3, dtype=torch.float64)}, "weight-differs", ["head.bias", "float64 [3]"]),
        ({"encoder.weight": torch.zeros(VOLUME)}, "weight-differs", ["encoder.weight", "[30, 20, 25]"]),
        ({"feature": torch.zeros(3)}, "tensor-not-named", ["feature"]),
        ({"mask/a": torch.zeros(3)}, "type-not-allowed", ["mask/a", "float32", "uint8"]),
        ({"mask/a": torch.zeros(11, dtype=torch.uint8)}, "too-many-elements", ["mask/a", "11", "10"]),
        ({"mask/a": torch.zeros(2, 2, dtype=torch.uint8)}, "too-many-dimensions", ["mask/a", "2", "1"]),
        ({"mask/a": torch.zeros(VOLUME, dtype=torch.uint8)}, "looks-like-image", ["mask/a"]),
    ],
)
def test_a_tensor_that_is_not_what_it_should_be(log, tensors, code, named):
    found = objections(log, message(tensors))
    assert list(found) == [code]
    assert all(name in found[code] for name in named), found


def test_weights_stay_where_the_policy_keeps_them(log):
    found = objections(log, message(), weights=False)
    assert list(found) == ["weights-kept"]
    assert all(key in found["weights-kept"] for key in WEIGHTS)


def test_an_extra_tensor_may_have_the_shape_of_a_weight(log):
    """Control variates and masks of weights: larger than the rule's limits, but no larger than what leaves anyhow."""
    extra = {"mask/encoder.weight": torch.ones(4, 1, 3, 3, 3, dtype=torch.uint8)}
    guard(log).release(message(extra), "train")
    found = objections(log, message({"mask/x": torch.ones(4, 1, 3, 3, 2, dtype=torch.uint8)}))
    assert found.keys() == {"too-many-dimensions", "too-many-elements"}


def test_a_declared_copy_of_a_weight_may_look_like_an_image(log):
    """`teacher/<weight>` in that weight's shape: such a layer is no scan. Under any other name it may be one."""
    egress = guard(log, tensors={"teacher/*": TensorRule(), "other/*": TensorRule()})
    layer = torch.zeros(30, math.prod(VOLUME))
    egress.known_weights = {**egress.known_weights, "linear.weight": layer.to("meta")}
    egress.release(message({"teacher/linear.weight": layer}), "train")
    for tensors, code in (
        ({"other/linear": layer}, "looks-like-image"),
        ({"teacher/linear.weight": layer[:4]}, "looks-like-image"),
        ({"copy/linear.weight": layer}, "tensor-not-named"),
    ):
        with pytest.raises(EgressError) as caught:
            egress.release(message(tensors), "train")
        assert caught.value.reasons == (code,)


def test_every_offender_is_named_with_what_would_let_it_leave(log):
    numbers = {"loss": 0.1, "age/mean": 61.0, "grad_norm": 2.0}
    with refused("egress-refused", EgressError) as caught:
        guard(log).release(message({"head.bias": torch.zeros(3), "feature": torch.zeros(2)}, numbers), "train")
    assert set(caught.value.reasons) == {"number-not-named", "tensor-not-named"}
    for text in (caught.value.why, caught.value.fix):
        assert all(name in text for name in ("'age/mean'", "'grad_norm'", "'feature'"))
        assert "'loss'" not in text
        assert "head.bias" not in text
    assert all(name in caught.value.fix for name in ("'numbers'", "'tensors'", "local/egress.yaml"))


def test_numbers_that_are_many_or_no_numbers(log):
    many = {f"dice/a{index}": 0.5 for index in range(1001)}
    found = objections(log, message({}, many))
    assert list(found) == ["too-many-numbers"]
    assert all(number in found["too-many-numbers"] for number in ("1001", "1000"))
    assert list(objections(log, message({}, {"loss": 2**53 + 1}))) == ["not-a-number"]
    assert list(objections(log, message({}, {"loss": True}))) == ["not-a-message"]
    guard(log).release(message({}, {"cases": 3}), "train")


@pytest.mark.parametrize(
    ("meta", "code"),
    [
        ({"note": "hello"}, "unknown-meta"),
        ({"run": "a/b"}, "looks-like-path"),
        ({"run": "C:\\data"}, "looks-like-path"),
        ({"run": "x" * 101}, "meta-not-text"),
        ({"run": "two\nlines"}, "looks-like-path"),
        ({"site": {"name": "north"}}, "meta-not-text"),
        ({"experiment": 5}, "meta-not-text"),
        ({"answers": "/data/patients"}, "bad-task-label"),
        ({"answers": "train/train/2/patient"}, "bad-task-label"),
        ({"failed": "Traceback (most recent call last)"}, "unknown-failure"),
    ],
)
def test_words_that_do_not_belong_into_an_answer(log, meta, code):
    assert list(objections(log, message({}, {}, **meta))) == [code]


def test_an_ordinary_experiment_fingerprint_may_be_told(log):
    answer = message(experiment="0123456789abcdef")
    assert guard(log).release(answer, "train") == answer


def test_a_failure_that_says_more_than_its_code(log):
    assert list(objections(log, message(failed="memory"))) == ["failure-with-content"]
    assert list(objections(log, message({}, {}, failed="memory"), failures=False)) == ["failures-kept"]


def test_a_message_that_is_too_large(log):
    assert list(objections(log, message(), max_message_mb=0.0001)) == ["message-too-large"]


def test_bytes_that_are_no_message(log):
    assert list(objections(log, b"\x89PNG...")) == ["not-a-message"]


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
        assert list(objections(log, save(WEIGHTS, metadata))) == ["hidden-content"]
    twice = save(WEIGHTS, {"panorgan": text[:-1] + ', "version": 1}'})
    assert list(objections(log, twice)) == ["not-a-message"]
    answer = message()
    (length,) = struct.unpack("<Q", answer[:8])
    padded = struct.pack("<Q", length + 8) + answer[8 : 8 + length] + b" " * 8 + answer[8 + length :]
    assert list(objections(log, padded)) == ["hidden-content"]


def test_a_refusal_with_many_names_is_one_line_of_bearable_length(log):
    objections(log, message({}, {f"voxel_{index}": 1.0 for index in range(5000)}))
    (line,) = log.read_bytes().splitlines()
    assert len(line) < 2000
    assert b"and 4980 more" in line


# -- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("/data/scan", "name-like-file"),
        ("data//scan", "name-like-file"),
        ("../scan", "name-like-file"),
        ("~/scan", "name-like-file"),
        ("C:/scan", "name-like-file"),
        ("c:scan", "name-like-file"),
        ("data\\scan", "name-like-file"),
        ("north/scan.nii.gz", "name-like-file"),
        ("scan.dcm/mean", "name-like-file"),
        ("two words", "name-like-file"),
        ("größe", "name-like-file"),
        ("", "name-like-file"),
        ("a" * 201, "name-too-long"),
        ("annotated/19580312", "name-like-identifier"),
        ("1.2.840.113619.2", "name-like-identifier"),
    ],
)
def test_names_that_may_tell_of_files_or_patients(log, name, code):
    assert suspicious_name(name) == code
    assert list(objections(log, message({}, {name: 1.0}), numbers=("*",))) == [code]
    assert list(objections(log, message({name: torch.zeros(2)}, {}), tensors={"*": TensorRule()})) == [code]


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
    found = objections(log, message({"mask/a": torch.zeros(VOLUME)}), tensors={"*": TensorRule(max_dimensions=9)})
    assert list(found) == ["looks-like-image"]


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


def test_a_number_that_no_method_explains_has_no_description():
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
    ("content", "code", "where", "named"),
    [
        ({"number": []}, "unknown-setting", "number", "'numbers'"),
        ({"tensors": {"a": {"max_element": 1}}}, "unknown-setting", "tensors.a.max_element", "'max_elements'"),
        ({"tensors": {"a": {"types": ["complex64"]}}}, "bad-setting", "tensors.a.types.0", "'complex64'"),
        ({"max_message_mb": -1}, "bad-setting", "max_message_mb", "-1"),
        ({5: True}, "bad-setting", "5", "5"),
    ],
)
def test_a_policy_that_cannot_be_read_says_where(content, code, where, named):
    with refused(code, ConfigError) as caught:
        parse_policy(content, "local/egress.yaml")
    assert caught.value.where == f"local/egress.yaml: {where}"
    assert named in caught.value.why
    assert caught.value.fix


# -- the site's weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, method in registry.methods().items() if not method.pooled])
def test_the_weights_of_a_site_without_its_memory(name):
    method = registry.methods()[name](registry.methods()[name].Config())
    facts = {"a": SiteInfo("a", 1, {"liver": 1}), "b": SiteInfo("b", 1, {"spleen": 1})}
    federation = Federation(Vocabulary(["liver", "spleen"]), facts)
    settings = UNetSettings(features=(4, 8))
    light = weights_of_site(method, settings, federation, "a")
    real = method.build_network(settings, federation, site="a").state_dict()
    if method.config.organ_parts == "owners":  # it may hold other organs' parts, and never sends them
        real = {key: value for key, value in real.items() if group_of_key(key) != "spleen"}
    assert {k: (v.shape, v.dtype) for k, v in light.items()} == {k: (v.shape, v.dtype) for k, v in real.items()}
    assert all(value.is_meta for value in light.values())
