"""One request to many sites: send it, wait, check the answers, spool them to disk, refuse bad ones by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from panorgan.checksums import sealed_tensors
from panorgan.errors import MessageError, RunError
from panorgan.federation.checks import (
    SiteFailedError,
    check_answer,
    check_size,
    extra_norms,
    is_own_fault,
    outliers,
    refusal,
)
from panorgan.federation.events import EventLog
from panorgan.federation.failures import DIVERGED
from panorgan.federation.files import write_atomically
from panorgan.federation.message import Message, MessageFile
from panorgan.federation.message_files import refuse_damaged
from panorgan.federation.settings import Patience
from panorgan.federation.tasks import Task
from panorgan.federation.transports.base import Transport
from panorgan.methods.protocol import Payload, Scalars

PayloadFor = Callable[[str], Payload]
Read = Callable[[str, bytes], None]
"""Takes a site's answer. Any exception refuses that answer, except for failures of this machine (`is_own_fault`)."""


class SitesMissingError(RunError):
    """A round cannot continue without absent sites. Nothing is lost: it continues when they are back."""

    def __init__(self, what: str, sites: Sequence[str], *, code: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, code=code, why=why, fix=fix)
        self.sites = tuple(sites)


@dataclass
class Traffic:
    """Bytes of messages in one round."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Request:
    """A task, and the payload for each site; `number` is the round in the log."""

    task: Task
    payload_for: PayloadFor
    number: int
    traffic: Traffic = field(default_factory=Traffic)


# Codes of refusals that mean that a site's training no longer gives finite numbers.
_DIVERGED = (DIVERGED, "not-finite")


@dataclass
class Responses:
    """The outcome of a request: the sites that were refused, failed (with the code), or did not answer.

    `sound`: sites with a sound update, even if it was an outlier. They have saved the round's state. `diverged`: those
    that were refused because their training no longer gives finite numbers.
    """

    refused: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    sound: set[str] = field(default_factory=set)
    diverged: set[str] = field(default_factory=set)

    @property
    def missing(self) -> list[str]:
        """Sites that have not answered, and are worth waiting for."""
        return sorted({*self.failed, *self.silent})


class Collector:
    """Asks through a transport with a given patience."""

    def __init__(self, transport: Transport, events: EventLog, patience: Patience) -> None:
        self.transport, self.events, self.patience = transport, events, patience

    def ask(self, sites: Sequence[str], request: Request, read: Read, deadline: float | None = None) -> Responses:
        """Ask every site and pass sound answers to `read`; sites that report a failure are asked again.

        `deadline`: seconds for the request and all its repetitions; the default is that of the patience.
        """
        responses = Responses()
        waiting = list(sites)
        seconds = deadline if deadline is not None else self.patience.deadline
        ends = None if seconds is None else time.monotonic() + seconds
        for attempt in range(self.patience.retries + 1):
            left = None if ends is None else max(ends - time.monotonic(), 0.0)
            answered = self._ask_once(waiting, request, read, responses, left)
            responses.silent = (*responses.silent, *(site for site in waiting if site not in answered))
            waiting = [site for site in waiting if site in responses.failed]
            if not waiting or attempt == self.patience.retries:
                break
            for site in waiting:
                del responses.failed[site]
        return responses

    def _ask_once(
        self, sites: Sequence[str], request: Request, read: Read, responses: Responses, deadline: float | None
    ) -> set[str]:
        answered: set[str] = set()
        number = request.number
        began = time.perf_counter()

        def on_reply(site: str, answer: bytes) -> None:
            request.traffic.received += len(answer)
            if site not in sites or site in answered:
                twice = site in answered
                unwanted = MessageError(
                    f"Site {site} sent an unexpected answer.",
                    code="answered-twice" if twice else "not-asked",
                    why="it has answered already" if twice else "it was not asked",
                )
                self.refuse(number, site, unwanted)
                return
            answered.add(site)
            try:
                read(site, answer)
            except SiteFailedError as failure:
                responses.failed[site] = failure.code
                self.events.record("failed", number=number, site=site, code=failure.code)
            except Exception as error:
                if is_own_fault(error):
                    raise
                responses.refused.add(site)
                refused = refusal(site, error)
                if refused.code in _DIVERGED:
                    responses.diverged.add(site)
                self.refuse(number, site, refused)
            else:
                self.events.transient("answered", site=site, seconds=round(time.perf_counter() - began, 3))

        if sites:
            self.events.transient("asked", task=request.task.kind, number=number, sites=list(sites))
            self.transport.exchange(sites, _requests(request), on_reply, deadline)
        return answered

    def collect(
        self,
        sites: Sequence[str],
        request: Request,
        expects: Callable[[str], Mapping[str, torch.Tensor]],
        folder: Path,
        outlier_factor: float | None,
        check: Callable[[str, Scalars], None] = lambda site, numbers: None,
    ) -> tuple[dict[str, MessageFile], Responses]:
        """Updates of one round, spooled to `folder`. Sites whose answer is there already are not asked again.

        `check` refuses a site's numbers with a MessageError.
        """
        accepted: dict[str, MessageFile] = {}
        norms: dict[str, dict[str, float]] = {}
        expected = {site: expects(site) for site in sites}  # here, so that an error of the rule is not blamed on a site

        def accept(site: str, path: Path) -> None:
            try:
                file = MessageFile(path)
                norm = check_answer(file, request.task, site, expected[site])
                check(site, file.scalars)
                norms[site] = {"": norm, **extra_norms(file, expected[site])}
                accepted[site] = file
            except Exception as error:
                if not is_own_fault(error):
                    path.unlink(missing_ok=True)
                raise

        def read(site: str, answer: bytes) -> None:
            check_size(answer, site, expected[site])
            Message.outline(answer)  # bytes that are not a message must not reach the disk
            path = folder / f"{site}.safetensors"
            write_atomically(path, sealed_tensors([answer]))
            accept(site, path)

        for site in sites:
            # Left by a coordinator that was killed in this round: no need to train again.
            if (path := folder / f"{site}.safetensors").is_file():
                try:
                    refuse_damaged(path)
                    accept(site, path)
                except SiteFailedError:
                    pass
                except Exception as error:
                    if is_own_fault(error):
                        raise
                    self.refuse(request.number, site, refusal(site, error))
        waiting = [site for site in sorted(sites) if site not in accepted]
        responses = self.ask(waiting, request, read)
        responses.sound = set(norms)
        for site, why in _out_of_proportion(norms, outlier_factor).items():
            del accepted[site]
            (folder / f"{site}.safetensors").unlink(missing_ok=True)  # the site may be asked again once repaired
            responses.refused.add(site)
            blown_up = MessageError(f"Site {site} sent an update out of all proportion.", code="outlier", why=why)
            self.refuse(request.number, site, blown_up)
        return accepted, responses

    def require_all(self, responses: Responses, number: int, what: str) -> None:
        """Record missing sites; with `on_missing: wait`, do not continue without them."""
        if not responses.missing:
            return
        self.events.record("missing", number=number, sites=responses.missing)
        if self.patience.on_missing == "wait":
            raise SitesMissingError(
                f"{_names(responses.missing)} did not answer: {what}.",
                responses.missing,
                code="no-answer",
                why="; ".join(f"{site} reports {code!r}" for site, code in sorted(responses.failed.items())),
                fix="The round continues when they are back. Nothing is lost.",
            )

    def refuse(self, number: int, site: str, error: MessageError) -> None:
        """Record that an answer was refused, and why."""
        remedy = {"fix": error.fix} if error.fix else {}
        self.events.record(
            "refused", number=number, site=site, code=error.code, reason=error.what, why=error.why, **remedy
        )


def _out_of_proportion(norms: Mapping[str, Mapping[str, float]], factor: float | None) -> dict[str, str]:
    """Sites whose update, or anything else they sent, is an outlier. Everything else varies more between honest sites
    than weights do (gradients, teachers of other organs), so the factor is squared for it."""
    found: dict[str, str] = {}
    for group in sorted({group for own in norms.values() for group in own}):
        allowed = factor if factor is None or not group else factor**2
        found = {**outliers({site: own[group] for site, own in norms.items() if group in own}, allowed), **found}
    return dict(sorted(found.items()))


def _names(sites: Sequence[str]) -> str:
    return ("Site " if len(sites) == 1 else "Sites ") + ", ".join(sites)


def _requests(request: Request) -> Callable[[str], bytes]:
    """Encodes each site's request; equal tensors are serialised once."""
    meta = request.task.to_meta()
    last: Payload | None = None
    encoded = b""

    def make_request(site: str) -> bytes:
        nonlocal last, encoded
        payload = request.payload_for(site)
        if last is None or not _same(last, payload):
            encoded = Message(payload.tensors, payload.scalars, meta).to_bytes()
            last = Payload(dict(payload.tensors), dict(payload.scalars))  # the rule may refill its own
        request.traffic.sent += len(encoded)
        return encoded

    return make_request


def _same(first: Payload, second: Payload) -> bool:
    """Whether two payloads hold the same tensor objects under the same keys, and equal numbers."""
    tensors, others = first.tensors, second.tensors
    equal_keys = first.scalars == second.scalars and tensors.keys() == others.keys()
    return equal_keys and all(tensors[key] is others[key] for key in tensors)
