"""Checks what leaves a site: what the policy does not allow is refused before it is sent. Both are logged.

The guard checks a finished message just before it goes to the network. It knows the site's policy, the weights of the
site's network and the shapes of its images. It stops what a method sends by mistake or undeclared. It has limits:
values inside a permitted tensor are not examined, and trained weights always carry traces of their training data.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, ValidationError

from panorgan.errors import ConfigError, MessageError, did_you_mean
from panorgan.federation.audit import AuditLog
from panorgan.federation.failures import CODES, EgressError
from panorgan.federation.lookalikes import LONGEST_NAME, SUSPICIONS, image_test, suspicious_name
from panorgan.federation.message import Message
from panorgan.methods.base import Method
from panorgan.methods.protocol import Federation
from panorgan.methods.registry import find_method
from panorgan.networks import UNetSettings
from panorgan.networks.organ_parts import weights_for
from panorgan.preparation.store import StoredCase
from panorgan.settings import Settings

TensorType = Literal["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
_USUAL_TYPES: tuple[TensorType, ...] = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32")

COMMON_NUMBERS = {
    "train_cases": "how many training cases the site has",
    "annotated/*": "how many of them show each structure",
    "plan/*": "median voxel size and extent, and the range of intensities per structure",
    "cases": Method.numbers["cases"],
    "dice/*": "mean validation score per structure",
    "volume/*": "predicted / annotated volume per structure, over all validation cases (optional)",
}
"""Numbers that every site sends with any method: when it joins, and when it scores the model."""


def number_words(method_name: str) -> dict[str, str]:
    """Every number that leaves a site under a method: name or pattern → description, for the people who decide."""
    return {**COMMON_NUMBERS, **find_method(method_name).numbers}


META = ("answers", "run", "site", "experiment", "failed")
"""The complete meta of an answer."""

_POLICY = "the egress policy (local/egress.yaml)"
_LONGEST_META = 100
_TASK_LABEL = re.compile(r"[a-z_-]{1,20}/[A-Za-z0-9_-]{0,40}/[0-9]{1,9}")
# JSON allows integers of any length; a float holds them exactly up to here.
_LARGEST_WHOLE = 2**53
# A refusal names everything; its line in the log names this many of a kind.
_LOGGED_NAMES = 20


class TensorRule(Settings):
    """Limits for tensors that are not weights. A tensor with the exact shape of a weight may be larger."""

    what: str = Field("", description="what it is, in a sentence")
    types: tuple[TensorType, ...] = Field(_USUAL_TYPES, min_length=1)
    max_dimensions: int = Field(3, ge=0)
    max_elements: int = Field(2**22, ge=1, description="per tensor")


class EgressPolicy(Settings):
    """`local/egress.yaml` at a site: what may leave. Everything not named stays."""

    weights: bool = Field(False, description="tensors of the site's own network, by key, shape and type")
    numbers: tuple[str, ...] = Field((), description="names or patterns of numbers")
    tensors: dict[str, TensorRule] = Field(default_factory=dict, description="extra tensors: key or pattern → limits")
    failures: bool = Field(False, description="codes for why a site could not answer; without them it does not answer")
    max_numbers: int = Field(1000, ge=0, description="per message: many numbers can be an image too")
    max_message_mb: float = Field(1024.0, gt=0, description="1 MB is 10^6 bytes")


def default_policy(method_name: str) -> EgressPolicy:
    """The declared uploads of a method, and what every site sends."""
    tensors = {key: TensorRule(what=what) for key, what in find_method(method_name).tensors.items()}
    return EgressPolicy(weights=True, numbers=tuple(number_words(method_name)), tensors=tensors, failures=True)


def parse_policy(content: Mapping[str, Any], where: str = "") -> EgressPolicy:
    """A policy from plain data, as read from `local/egress.yaml`; `where` names the file in an error."""
    try:
        return EgressPolicy.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors()[0]
        *groups, name = [str(part) for part in first["loc"]] or [""]
        known = TensorRule.model_fields if groups[:1] == ["tensors"] else EgressPolicy.model_fields
        unknown = first["type"] == "extra_forbidden"
        raise ConfigError(
            f"There is no setting called {name!r}." if unknown else "A setting cannot be used as written.",
            code="unknown-setting" if unknown else "bad-setting",
            where=": ".join(part for part in (where, ".".join([*groups, name])) if part),
            why=did_you_mean(name, known) if unknown else f"{first['msg']} (got {first['input']!r:.80})",
            fix=f"Known here: {', '.join(known)}." if unknown else "Correct it; until then nothing leaves.",
        ) from error


def policy_text(policy: EgressPolicy, method_name: str) -> str:
    """The policy as YAML with comments, for the people who decide; numbers are described by the method."""
    words = number_words(method_name)
    lines = [
        "# What may leave this site. Anything else is refused before it is sent; the refusal is written to the log.",
        "# Arrays with the shape of an image or a mask, and names that look like a file or a patient's number, are",
        "# refused whatever is written here.",
        "# See what has left: panorgan federation egress",
        "",
        "# Weights of the network that this site trains. Without them the site cannot take part in training.",
        f"weights: {_yaml(policy.weights)}",
        "",
        "# Numbers, by name; * stands for anything.",
        "numbers:" if policy.numbers else "numbers: []",
        *(_with_comment(f"  - {_yaml(name)}", words.get(name, "")) for name in policy.numbers),
        "",
        "# Tensors besides the weights, by key; * stands for anything.",
        "tensors:" if policy.tensors else "tensors: {}",
        *(line for key, rule in policy.tensors.items() for line in _rule_lines(key, rule)),
        "",
        "# If this site cannot answer, it sends a code such as 'data' or 'memory': no file names, no details.",
        "# false: it stays silent instead.",
        f"failures: {_yaml(policy.failures)}",
        "",
        "# Most numbers in a message, and its largest size (1 MB is 10^6 bytes).",
        f"max_numbers: {policy.max_numbers}",
        f"max_message_mb: {policy.max_message_mb:g}",
    ]
    return "\n".join(lines) + "\n"


def _rule_lines(key: str, rule: TensorRule) -> Iterator[str]:
    yield f"  {_yaml(key)}:"
    for name, value in rule.as_json().items():
        yield f"    {name}: {_yaml(value)}"


def _with_comment(line: str, comment: str) -> str:
    return f"{line:<23} # {comment}" if comment else line


def _yaml(value: Any) -> str:
    """A value as JSON, which is valid YAML and quoted where needed."""
    return json.dumps(value, ensure_ascii=False)


def weights_of_site(
    method: Method, network: UNetSettings, federation: Federation, site: str
) -> dict[str, torch.Tensor]:
    """Keys, shapes and types of the weights that a site trains and sends, on the meta device."""
    with torch.device("meta"):
        weights = dict(method.build_network(network, federation, site=site).state_dict())
    return weights if method.config.organ_parts == "everyone" else weights_for(weights, federation.organs_of(site))


def image_shapes(cases: Iterable[StoredCase], patch_size: Iterable[int]) -> set[tuple[int, ...]]:
    """Shapes in which a site holds images: prepared volumes and patches, each channel and all of them."""
    found: set[tuple[int, ...]] = {tuple(patch_size)}
    for case in cases:
        found |= {case.shape, case.image.shape}
        if case.channels > 1:
            found.add((case.channels, *patch_size))
    return found


class _Objection(NamedTuple):
    """Why an item may not leave, as a code and a sentence, and what would permit it."""

    code: str
    why: str
    fix: str
    item: str


class Egress:
    """Checks every answer of a site's worker before it goes to the network.

    Parameters
    ----------
    known_weights : the weights that the site trains (see `weights_of_site`); set again when the network changes.
    forbidden_shapes : shapes of the site's volumes and patches (see `image_shapes`); add those of the original scans.
    """

    def __init__(
        self,
        policy: EgressPolicy,
        known_weights: Mapping[str, torch.Tensor],
        audit: AuditLog,
        forbidden_shapes: Iterable[Iterable[int]] = (),
    ) -> None:
        self.policy, self.known_weights, self.audit = policy, known_weights, audit
        self._looks_like_an_image = image_test(forbidden_shapes)

    def release(self, answer: bytes, task: str, round: int = 0, stage: str = "") -> bytes:
        """Return the same bytes, once checked and logged. Raises `EgressError` if they must stay.

        The record is on disk before the bytes are returned, so nothing leaves unrecorded. After a kill in between, the
        log has a record of something that did not leave.
        """
        entry = {"direction": "out", "kind": "sent", "task": task, "stage": stage, "round": round}
        size = {"bytes": len(answer), "sha256": hashlib.sha256(answer).hexdigest()}
        message, objections = self._examine(answer)
        if message is None or objections:
            grouped = _group_objections(objections)
            reasons = [f"{_names(group.items[:_LOGGED_NAMES], len(group.items))}: {group.why}" for group in grouped]
            codes = [group.code for group in grouped]
            self.audit.append({**entry, "kind": "refused", "codes": codes, "reasons": reasons, **size})
            raise _refusal(task, stage, round, grouped)
        entry["run"] = str(message.meta.get("run", ""))
        if "failed" in message.meta:
            self.audit.append({**entry, "kind": "failed", "code": message.meta["failed"], **size})
        else:
            tensors = [[key, list(value.shape), type_name(value)] for key, value in sorted(message.tensors.items())]
            entry |= {"tensors": len(tensors), "numbers": dict(message.scalars), **size}
            self.audit.append(entry, listed=tensors if tensors else None)
        return answer

    def _examine(self, answer: bytes) -> tuple[Message | None, list[_Objection]]:
        limit = self.policy.max_message_mb
        if len(answer) > limit * 1e6:
            why = f"it has {len(answer) / 1e6:.1f} MB, {limit:g} MB may leave"
            return None, [_Objection("message-too-large", why, f"raise 'max_message_mb' in {_POLICY}", "the message")]
        try:
            message = Message.outline(answer)
        except MessageError as error:
            why = f"it cannot be read ({error.why or error.what})"
            return None, [_Objection(error.code, why, "", "the message")]
        objections = [*self._meta(message), *self._numbers(message), *self._tensors(message)]
        if not objections and not message.is_all_of(answer):
            why = "it holds more than tensors, numbers and the meta of an answer"
            objections.append(_Objection("hidden-content", why, "", "the message"))
        return message, objections

    # -- meta ----------------------------------------------------------------------------------------------

    def _meta(self, message: Message) -> Iterator[_Objection]:
        for name, value in message.meta.items():
            item = f"meta {_short(name)}"
            if name not in META:
                yield _Objection("unknown-meta", f"an answer has only {', '.join(META)}", "", item)
            elif name == "failed":
                yield from self._failure(message, value)
            elif name == "answers":
                if not isinstance(value, str) or not _TASK_LABEL.fullmatch(value):
                    yield _Objection("bad-task-label", "it is not a task, a stage and a round", "", item)
            elif not isinstance(value, str) or len(value) > _LONGEST_META:
                yield _Objection("meta-not-text", f"it is not a text of at most {_LONGEST_META} characters", "", item)
            elif re.search(r"[/\\]", value) or not value.isprintable():
                yield _Objection("looks-like-path", "it looks like a path", "", item)

    def _failure(self, message: Message, code: Any) -> Iterator[_Objection]:
        if not self.policy.failures:
            fix = f"set 'failures: true' in {_POLICY}"
            yield _Objection("failures-kept", "the policy does not let failures leave", fix, "meta 'failed'")
        if code not in CODES:
            yield _Objection("unknown-failure", "it is not one of the failure codes", "", "meta 'failed'")
        if message.tensors or message.scalars:
            why = "it carries tensors or numbers besides the code"
            yield _Objection("failure-with-content", why, "", "the message about a failure")

    # -- numbers -------------------------------------------------------------------------------------------

    def _numbers(self, message: Message) -> Iterator[_Objection]:
        if len(message.scalars) > self.policy.max_numbers:
            why = f"{len(message.scalars)} numbers, {self.policy.max_numbers} may leave at once"
            yield _Objection("too-many-numbers", why, f"raise 'max_numbers' in {_POLICY}", "the message")
        for name, value in message.scalars.items():
            item = f"number {_short(name)}"
            if code := suspicious_name(name):
                yield _Objection(code, SUSPICIONS[code], "rename it in the method", item)
            elif not any(fnmatchcase(name, pattern) for pattern in self.policy.numbers):
                fix = f"add it to 'numbers' in {_POLICY}"
                yield _Objection("number-not-named", "the policy does not name it", fix, item)
            if type(value) is not float and (type(value) is not int or abs(value) > _LARGEST_WHOLE):
                yield _Objection("not-a-number", "it is not a plain number", "", item)

    # -- tensors -------------------------------------------------------------------------------------------

    def _tensors(self, message: Message) -> Iterator[_Objection]:
        for key, tensor in sorted(message.tensors.items()):
            item = f"tensor {_short(key)}"
            known = self.known_weights.get(key)
            if code := suspicious_name(key, is_ours=known is not None):
                yield _Objection(code, SUSPICIONS[code], "rename it in the method", item)
            elif known is not None:
                yield from self._weight(tensor, known, item)
            else:
                yield from self._extra(key, tensor, item)

    def _weight(self, tensor: torch.Tensor, known: torch.Tensor, item: str) -> Iterator[_Objection]:
        if not self.policy.weights:
            fix = f"set 'weights: true' in {_POLICY}"
            yield _Objection("weights-kept", "the policy does not let weights leave", fix, item)
        if tensor.shape != known.shape or tensor.dtype != known.dtype:
            why = f"it is {_describe(tensor)}, but that weight is {_describe(known)}"
            yield _Objection("weight-differs", why, "send it under a name of its own", item)

    def _extra(self, key: str, tensor: torch.Tensor, item: str) -> Iterator[_Objection]:
        # `teacher/<weight>` with that weight's own shape holds no more than the weight itself, whatever its shape.
        like = self.known_weights.get(key.partition("/")[2])
        if (like is None or like.shape != tensor.shape) and self._looks_like_an_image(tensor):
            why = "it has the shape of an image, a patch or a mask; these never leave"
            yield _Objection("looks-like-image", why, "", item)
            return
        rule = next((rule for pattern, rule in self.policy.tensors.items() if fnmatchcase(key, pattern)), None)
        if rule is None:
            fix = f"if it is harmless, add it to 'tensors' in {_POLICY}"
            why = "it is not a weight of the site's network, and the policy does not name it"
            yield _Objection("tensor-not-named", why, fix, item)
            return
        if type_name(tensor) not in rule.types:
            why = f"it is {type_name(tensor)}, allowed are {', '.join(rule.types)}"
            yield _Objection("type-not-allowed", why, f"add the type to its rule in {_POLICY}", item)
        if any(tensor.shape == weight.shape for weight in self.known_weights.values()):
            return
        if tensor.dim() > rule.max_dimensions:
            why = f"it has {tensor.dim()} dimensions, {rule.max_dimensions} may leave"
            yield _Objection("too-many-dimensions", why, f"raise 'max_dimensions' of its rule in {_POLICY}", item)
        if tensor.numel() > rule.max_elements:
            why = f"it has {tensor.numel()} elements, {rule.max_elements} may leave"
            yield _Objection("too-many-elements", why, f"raise 'max_elements' of its rule in {_POLICY}", item)


def type_name(tensor: torch.Tensor) -> str:
    """`float32`, `uint8`…"""
    return str(tensor.dtype).removeprefix("torch.")


def _describe(tensor: torch.Tensor) -> str:
    return f"{type_name(tensor)} {list(tensor.shape)}"


def _short(name: str) -> str:
    return repr(name if len(name) <= LONGEST_NAME else name[:40] + "…")


class _Group(NamedTuple):
    """A reason, its remedy, and all items that it applies to."""

    code: str
    why: str
    fix: str
    items: list[str]


def _group_objections(objections: Iterable[_Objection]) -> list[_Group]:
    ordered = sorted(objections, key=lambda o: (o.why, o.fix, o.code))
    groups = groupby(ordered, lambda o: (o.code, o.why, o.fix))
    return [_Group(*reason, [objection.item for objection in group]) for reason, group in groups]


def _names(items: list[str], total: int) -> str:
    more = f" and {total - len(items)} more" if total > len(items) else ""
    return ", ".join(items) + more


def _refusal(task: str, stage: str, round: int, grouped: list[_Group]) -> EgressError:
    place = [f"the answer to {task!r}", *([f"stage {stage}"] if stage else []), *([f"round {round}"] if round else [])]
    named = [(_names(group.items, len(group.items)), group) for group in grouped]
    count = sum(len(group.items) for group in grouped)
    error = EgressError(
        f"{'Something' if count == 1 else f'{count} things'} in an answer may not leave this site.",
        where=", ".join(place),
        why="\n".join(f"{names}: {group.why}" for names, group in named),
        fix="\n".join(f"{names}: {group.fix}." for names, group in named if group.fix)
        or "Nothing was sent. Inform the coordinator and the author of the method.",
    )
    error.reasons = tuple(group.code for group in grouped)
    return error
