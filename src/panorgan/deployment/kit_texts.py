"""The texts in a kit: settings with comments, instructions, units for systemd, a Compose file."""

from __future__ import annotations

import ipaddress
import json
import platform
from collections.abc import Mapping
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

import panorgan
from panorgan.agreement import Agreement
from panorgan.deployment.data_folder import FILL_IN
from panorgan.deployment.settings import FederationSettings, ParticipantSettings
from panorgan.deployment.versions import versions_here
from panorgan.federation.egress import EgressPolicy, number_words

HOME = "/opt/panorgan"
"""Where the units expect the kits; their comments say how to change it."""


def server_texts(settings: FederationSettings, experiment: Agreement, expires: str) -> dict[str, str]:
    """Files of the server's kit besides keys and policies, by their path in it."""
    host = settings.server.host
    words = {
        **_words(settings, experiment),
        "expires": expires,
        "home": f"{HOME}/{settings.name}/server",
        "sites": sites_block(settings.sites),
        "rounds": settings.rounds,
        "heartbeat_seconds": settings.heartbeat_seconds,
        "loopback": is_loopback(host),
        "named": not is_loopback(host) and not _is_address(host),
    }
    return {
        "local/coordinator.yaml": _fill_in("coordinator.yaml.j2", words),
        "local/experiment.yaml": experiment_text(settings.name, experiment),
        "README.md": _fill_in("server_README.md.j2", words),
        "panorgan-server.service": _fill_in("server.service.j2", {**words, "role": "server"}),
        "panorgan-coordinator.service": _fill_in("server.service.j2", {**words, "role": "coordinator"}),
        "compose.yaml": _fill_in("server_compose.yaml.j2", words),
        "image/Dockerfile": _fill_in("Dockerfile.j2", words),
    }


def site_texts(
    settings: FederationSettings, experiment: Agreement, site: str, policy: EgressPolicy, expires: str
) -> dict[str, str]:
    """Files of a site's kit besides keys and policies, by their path in it."""
    words = {
        **_words(settings, experiment),
        "site": site,
        "expires": expires,
        "home": f"{HOME}/{settings.name}/{site}",
        "fill_in": FILL_IN,
        "leaves": what_leaves(policy, experiment.method["name"]),
        "loopback": is_loopback(settings.server.host),
        "versions": json.dumps(versions_here()),
    }
    return {
        "local/site.yaml": _fill_in("site.yaml.j2", words),
        "local/experiment.yaml": experiment_text(settings.name, experiment),
        "README.md": _fill_in("site_README.md.j2", words),
        "panorgan-site.service": _fill_in("site.service.j2", words),
        "compose.yaml": _fill_in("site_compose.yaml.j2", words),
        "image/Dockerfile": _fill_in("Dockerfile.j2", words),
    }


def authority_text(settings: FederationSettings) -> str:
    """The note in `ca/` that explains the folder."""
    return _fill_in("ca_README.md.j2", {"federation": settings.name})


def experiment_text(federation: str, experiment: Agreement) -> str:
    """The agreed experiment as YAML: the same bytes in every kit."""
    return (
        f"# The experiment of the federation {federation}, the same file for the server and every site.\n"
        f"# Fingerprint {experiment.fingerprint()}: a changed file is another experiment, and is refused.\n"
        + yaml.safe_dump(experiment.without_places().as_json(), sort_keys=False, allow_unicode=True, width=120)
    )


def sites_block(sites: Mapping[str, ParticipantSettings]) -> str:
    """The `sites:` part of `coordinator.yaml`, one line per site, without a line end."""
    lines = [
        yaml.safe_dump(
            {name: with_organization(name, site).as_json()}, sort_keys=False, default_flow_style=None, width=200
        )
        for name, site in sites.items()
    ]
    return "sites:\n" + "".join(f"  {line}" for line in lines).rstrip("\n")


def with_organization(name: str, site: ParticipantSettings) -> ParticipantSettings:
    """The sites with their organisation, by default the site's own name."""
    return site.model_copy(update={"organization": site.organization or name.replace("-", "_")})


def what_leaves(policy: EgressPolicy, method_name: str) -> list[str]:
    """The policy in sentences; numbers are described by the method."""
    lines, words = [], number_words(method_name)
    if policy.weights:
        lines.append("Weights of the network that is trained here, once per round.")
    for name in policy.numbers:
        lines.append(_with(f"Numbers named `{name}`", words.get(name, "")))
    lines += [_with(f"Tensors named `{key}`, of limited size", rule.what) for key, rule in policy.tensors.items()]
    if policy.failures:
        lines.append("If something goes wrong: a code of one word, such as `data` or `disk`.")
    lines.append(
        "The name and local address of this site, that it is connected, the version of the network engine, and a "
        "number by which the server distinguishes a second machine with the same kit from a restart."
    )
    return lines


def _with(thing: str, explanation: str) -> str:
    return f"{thing}: {explanation.rstrip('.')}." if explanation else f"{thing}."


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine itself."""
    return host.rstrip(".").lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _words(settings: FederationSettings, experiment: Agreement) -> dict[str, Any]:
    """The values that all texts may use."""
    return {
        "federation": settings.name,
        "host": settings.server.host,
        "port": settings.server.port,
        "coordinator": settings.coordinator,
        "fingerprint": experiment.fingerprint(),
        "method": experiment.method["name"],
        "vocabulary": experiment.vocabulary,
        "start": experiment.training.start_from,
        "version": panorgan.__version__,
        "base": f"python:{platform.python_version()}-slim-bookworm",
    }


def _fill_in(template: str, words: Mapping[str, Any]) -> str:
    """Render a template; a missing value is an error. Nothing here is HTML, so nothing is escaped."""
    environment = Environment(
        loader=PackageLoader("panorgan.deployment", package_path="templates"),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # A JSON string is a YAML string, whatever it looks like ('no', '1e5', '007').
    environment.filters["quoted"] = lambda value: json.dumps(str(value), ensure_ascii=False)
    return environment.get_template(template).render(**words)
