"""All checks that are possible before a participant starts, so that problems show before a run and not during it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from panorgan.agreement import Agreement
from panorgan.anatomy import Vocabulary
from panorgan.config import load_agreement
from panorgan.data_doctor import CODES, Severity, examine
from panorgan.data_doctor.summary import Group, group_findings
from panorgan.deployment.addresses import refuse_another_address
from panorgan.deployment.certificate_checks import check_credentials
from panorgan.deployment.check import Check, Verdict, failed_by
from panorgan.deployment.engine import network_engine
from panorgan.deployment.folders import Kit, ServerKit, SiteKit
from panorgan.deployment.machine import check_clock, check_device, check_folder, check_port
from panorgan.deployment.policy_checks import check_approval, check_open_policy, check_server_policy
from panorgan.deployment.processes import running_process
from panorgan.deployment.reachability import TITLES, check_reachability, parse_address
from panorgan.deployment.settings import CoordinatorFile, SiteFile
from panorgan.deployment.versions import check_versions
from panorgan.errors import PanorganError
from panorgan.federation.certificates import Credentials
from panorgan.workflows.site_cases import by_split, read_site
from panorgan.workflows.sources import source_of
from panorgan.yaml_files import read_yaml

if TYPE_CHECKING:
    from panorgan.federation.egress import EgressPolicy

OnProgress = Callable[[str, int, int], None]

SERVER_DISK_GB = 5.0
"""Disk space for the server: checkpoints, one answer of every site at a time, and every site's teacher."""

_NAMED_CASES = 3


def preflight(kit: SiteKit, data: bool = True, on_progress: OnProgress | None = None) -> list[Check]:
    """Check a site before it starts. Changes nothing.

    `data` False skips the doctor, which reads every scan; `on_progress` gets (what, done, total) meanwhile.
    """
    site, site_check = _load_site(kit)
    name, server, agreed = (site.name, site.server, site.experiment_fingerprint) if site else _partial_settings(kit)
    agreement, experiment_check = _load_experiment(kit, agreed)
    credentials = Credentials.of_site(kit.startup)
    checks = [*_check_place(kit), site_check, experiment_check, _check_egress(kit, agreement), check_approval(kit)]
    checks += check_credentials(credentials, name)
    checks += _check_server(kit, server, credentials)
    checks.append(check_clock(credentials, seen=kit.clock))
    if site is None:
        names = ("device", "disk: cache", "disk: state", "versions", "data")
        return checks + [Check(title, "skipped", "site.yaml cannot be used yet") for title in names]
    checks.append(check_device(site.hardware, site.min_gpu_memory_gb))
    checks.append(check_folder("cache", kit.cache(site), site.min_free_disk_gb))
    checks.append(check_folder("state", kit.state(site), site.min_free_disk_gb))
    checks += check_versions(site.versions)
    return checks + _check_data(site, agreement, data, on_progress)


def preflight_server(kit: ServerKit) -> list[Check]:
    """Check the server before it starts. Changes nothing."""
    settings, settings_check = _load_coordinator(kit)
    experiment_check = _load_experiment(kit, settings.experiment_fingerprint if settings else "")[1]
    checks = [*_check_place(kit), settings_check, experiment_check, check_server_policy(kit)]
    if settings is None:
        names = ("certificate", "admin certificate", "clock", "port", "disk: run", "versions")
        return checks + [Check(title, "skipped", "coordinator.yaml cannot be used yet") for title in names]
    server = Credentials.of_server(kit.startup)
    checks += check_credentials(server, settings.host)
    checks += check_credentials(Credentials.of_site(kit.admin / "startup"), settings.coordinator, prefix="admin ")
    checks.append(check_clock(server))
    checks += _check_address(kit)
    checks.append(check_port(settings.host, settings.port, running_process(kit) is not None))
    checks.append(check_folder("run", kit.run(settings), SERVER_DISK_GB))
    return checks + check_versions({})


# -- files -------------------------------------------------------------------------------------------------------


def _check_place(kit: Kit) -> list[Check]:
    """The network engine starts its jobs through a command line that breaks at spaces."""
    if not any(character.isspace() for character in str(kit.path)):
        return []
    what, fix = f"Its path holds spaces: {kit.path}", "Move the kit to a path without them."
    return [Check("kit folder", "failed", what, fix, "spaces-in-path")]


def _load_site(kit: SiteKit) -> tuple[SiteFile | None, Check]:
    from panorgan.deployment.kit_files import load_site_file

    try:
        site = load_site_file(kit)
    except PanorganError as error:
        return None, failed_by("site.yaml", error)
    return site, Check("site.yaml", "ok", f"site {site.name} of {site.federation}, data in {site.data.folder}")


def _partial_settings(kit: SiteKit) -> tuple[str, str, str]:
    """Name, server and experiment of a site.yaml that cannot be used as a whole.

    So the network can be checked before the data folder is filled in.
    """
    try:
        content = read_yaml(kit.settings, "site file")
    except PanorganError:
        return "", "", ""
    name, server, agreed = (str(content.get(key) or "") for key in ("name", "server", "experiment_fingerprint"))
    return name, server, agreed


def _load_coordinator(kit: ServerKit) -> tuple[CoordinatorFile | None, Check]:
    from panorgan.deployment.kit_files import load_coordinator_file

    name = "coordinator.yaml"
    try:
        settings = load_coordinator_file(kit)
    except PanorganError as error:
        return None, failed_by(name, error)
    return settings, Check(name, "ok", f"{settings.federation}, sites {', '.join(settings.sites)}")


def _check_address(kit: ServerKit) -> list[Check]:
    """Reports only a problem: a changed port would have no effect."""
    try:
        refuse_another_address(kit)
    except PanorganError as error:
        return [failed_by("address", error)]
    return []


def _load_experiment(kit: Kit, agreed: str) -> tuple[Agreement | None, Check]:
    """The experiment, and whether it is the agreed one; an empty `agreed` is not known."""
    name = "experiment"
    try:
        agreement = load_agreement(kit.experiment)
    except PanorganError as error:
        return None, failed_by(name, error)
    found = agreement.fingerprint()
    method = agreement.method["name"]
    if not agreed:
        return agreement, Check(name, "skipped", f"readable ({method}, {found}), but the agreed one is not known")
    if found != agreed:
        return agreement, Check(
            name,
            "failed",
            f"experiment.yaml is not what was agreed: its fingerprint is {found}, not {agreed}.",
            "Copy local/experiment.yaml from the kit again. To change an experiment, make new kits for all.",
            "experiment-changed",
        )
    return agreement, Check(name, "ok", f"as agreed ({found}): {method} for {', '.join(agreement.vocabulary)}")


def _check_egress(kit: SiteKit, agreement: Agreement | None) -> Check:
    from panorgan.federation.egress import parse_policy

    name = "egress.yaml"
    try:
        policy = parse_policy(read_yaml(kit.egress_policy, "egress policy"), str(kit.egress_policy))
    except PanorganError as error:
        return failed_by(name, error)
    objection = _check_policy(policy, agreement) if agreement is not None else None
    return objection or check_open_policy(policy) or Check(name, "ok", "what may leave is defined and valid")


def _check_policy(policy: EgressPolicy, agreement: Agreement) -> Check | None:
    """Whether the policy permits everything that the method sends; if not, what it withholds and the lines to add.

    An answer with one item too many is refused as a whole, possibly after days of training.
    """
    from panorgan.federation.egress import COMMON_NUMBERS
    from panorgan.federation.optional_numbers import OPTIONAL_NUMBERS
    from panorgan.methods.about.uploads import uploads

    method = agreement.build_method()
    sent = {pattern for upload in uploads(method) for pattern in upload.tensors}
    tensors = [pattern for pattern in method.tensors if pattern in sent and not _covers(policy.tensors, pattern)]
    lacking = [p for p in dict.fromkeys((*method.numbers, *COMMON_NUMBERS)) if not _covers(policy.numbers, p)]
    numbers = [pattern for pattern in lacking if pattern not in OPTIONAL_NUMBERS]
    optional = [pattern for pattern in lacking if pattern in OPTIONAL_NUMBERS]
    kept = [
        *([] if policy.weights else ["weights"]),
        *(f"{pattern} ({method.tensors[pattern].rstrip('.')})" for pattern in tensors),
        *(f"number {pattern}" for pattern in numbers),
    ]
    if not kept:
        return _without_optional(optional)
    lines = [
        *([] if policy.weights else ["'weights: true'"]),
        *(f"under 'tensors': '{json.dumps(pattern)}: {{}}'" for pattern in tensors),
        *(f"under 'numbers': '- {json.dumps(pattern)}'" for pattern in numbers),
    ]
    # A policy that names each number one by one may have all of them; and not every site measures for the plan.
    open_to_doubt = (
        policy.weights and not tensors and all(_touches(policy.numbers, p) or p == "plan/*" for p in numbers)
    )
    return Check(
        "egress.yaml",
        "warning" if open_to_doubt else "failed",
        f"{method.name} sends what this policy does not permit: {'; '.join(kept)}. The answer is refused as a whole.",
        f"If it may leave, add to local/egress.yaml {'; '.join(lines)}. If not, do not take part.",
        "policy-keeps-payload",
    )


def _without_optional(patterns: Sequence[str]) -> Check | None:
    """Numbers that are optional for taking part; answers leave them out."""
    from panorgan.federation.egress import COMMON_NUMBERS

    if not patterns:
        return None
    named = "; ".join(f"number {pattern} ({COMMON_NUMBERS[pattern]})" for pattern in patterns)
    lines = "; ".join(f"under 'numbers': '- {json.dumps(pattern)}'" for pattern in patterns)
    return Check(
        "egress.yaml",
        "warning",
        f"This policy withholds numbers that help to detect a failing model: {named}. The site takes part without.",
        f"If it may leave, add to local/egress.yaml {lines}.",
        "policy-keeps-optional",
    )


def _covers(allowed: Iterable[str], pattern: str) -> bool:
    """Whether everything that `pattern` matches may leave."""
    return any(fnmatchcase(pattern, known) for known in allowed)


def _touches(allowed: Iterable[str], pattern: str) -> bool:
    """Whether something that `pattern` matches may leave."""
    return any(fnmatchcase(known, pattern) for known in allowed)


# -- network -----------------------------------------------------------------------------------------------------


def _check_server(kit: SiteKit, server: str, credentials: Credentials) -> list[Check]:
    """Reach the server, at the address that the network engine will use: it reads the kit's signed startup folder."""
    used = network_engine().server_address(kit.path, "site") or server
    if not used:
        return [Check(title, "skipped", "the kit does not say where the server is") for title in TITLES]
    if server and used != server:
        what = f"site.yaml says {server}, but the kit will connect to {used}, as its startup folder says."
        fix = f"Write {used!r} into site.yaml, or ask for a new kit."
        differs = [Check("server", "failed", what, fix, "address-mismatch")]
    else:
        differs = []
    try:
        address = parse_address(used)
    except PanorganError as error:
        return [failed_by(TITLES[0], error), *(Check(title, "skipped", "no address") for title in TITLES[1:])]
    return differs + check_reachability(address, credentials)


# -- data --------------------------------------------------------------------------------------------------------


def _check_data(
    site: SiteFile, agreement: Agreement | None, wanted: bool, on_progress: OnProgress | None
) -> list[Check]:
    if agreement is None:
        return [Check("data", "skipped", "experiment.yaml cannot be read")]
    teaches = _check_teaching(site, agreement)
    if not wanted:
        return [teaches, Check("scans", "skipped", "skipped as requested (--no-data)")]
    source = source_of(site.name, site.data, agreement)
    try:
        seen = examine(
            [source],
            site.hardware.workers,
            (lambda done, total: on_progress("reading cases", done, total)) if on_progress else None,
        )
    except PanorganError as error:
        return [teaches, failed_by("scans", error)]
    groups = [group for group in group_findings(seen.findings) if group.severity > Severity.note]
    if not groups:
        return [teaches, Check("scans", "ok", f"the doctor found no problem in {len(seen.cases)} cases")]
    return [teaches, *(_finding_check(group, site.data.folder) for group in groups)]


def _check_teaching(site: SiteFile, agreement: Agreement) -> Check:
    """Can training begin with this folder: something of the vocabulary, in at least two patients?"""
    if site.data.external:
        fix = "Remove 'external: true' from site.yaml."
        what = "An external site trains on nothing, and every site here trains."
        return Check("data", "failed", what, fix, "external-site")
    vocabulary = Vocabulary(agreement.vocabulary)
    try:
        read = read_site(site.name, site.data, vocabulary, "annotated", agreement.channels)
        own, sizes = read.own, by_split(site.name, False, read, agreement).sizes()
    except PanorganError as error:
        return failed_by("data", error)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"The folder's description is not valid ({type(error).__name__}: {error})."
        return Check("data", "failed", what, f"panorgan doctor {site.data.folder}", "folder-unreadable")
    structures = sorted({structure for case in own for structure in case.annotated})
    patients = len({case.patient for case in own})
    split = ", ".join(f"{count} {name}" for name, count in sizes.items())
    return Check("data", "ok", f"{len(own)} cases of {patients} patients ({split}) annotate {', '.join(structures)}")


def _finding_check(group: Group, folder: Path) -> Check:
    """All findings of one kind as one check, with the first cases by name. This stays on the site's screen."""
    cases = [place.case for place in group.places if place.case]
    named = ", ".join(cases[:_NAMED_CASES]) + (f" and {len(cases) - _NAMED_CASES} more" * (len(cases) > _NAMED_CASES))
    what = group.what or CODES[group.code].meaning
    fix = group.fix or group.variants[0].fix or f"panorgan doctor {folder}"
    verdict: Verdict = "failed" if group.severity == Severity.error else "warning"
    return Check(f"scans: {group.code}", verdict, f"{what} ({named})" if named else what, fix, group.code)
