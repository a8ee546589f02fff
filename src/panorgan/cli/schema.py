"""`panorgan schema`: the JSON schema of a settings file, with which editors complete and check it."""

from __future__ import annotations

import json
from typing import Any

from panorgan.cli.console import say_lines
from panorgan.config import Experiment
from panorgan.deployment.settings import FederationSettings, SiteFile
from panorgan.errors import ConfigError, did_you_mean
from panorgan.methods.registry import methods
from panorgan.settings import Settings

FILES: dict[str, type[Settings]] = {"experiment": Experiment, "federation": FederationSettings, "site": SiteFile}
"""What there is a schema for: experiment files, federation.yaml, and a hospital's site.yaml."""

_DIALECT = "http://json-schema.org/draft-07/schema#"  # what editors' YAML support is made for


def print_schema(name: str) -> None:
    """Print one schema."""
    say_lines(json.dumps(schema(name), indent=1, ensure_ascii=False) + "\n")


def schema(name: str) -> dict[str, Any]:
    """The schema of one kind of file."""
    if name not in FILES:
        raise ConfigError(
            f"There is no schema called {name!r}.",
            code="unknown-schema",
            where="panorgan schema",
            why=did_you_mean(name, FILES),
            fix=f"Use one of: {', '.join(FILES)}.",
        )
    found = _plain(FILES[name].model_json_schema())
    if name == "experiment":
        # Checks that look at several keys accept more than their types say: a phantom brings its own vocabulary.
        found["required"] = [key for key in found.get("required", ()) if key != "vocabulary"]
        found["anyOf"] = [{"required": ["vocabulary"]}, {"required": ["phantom"]}]
        start = found["$defs"]["TrainingSettings"]["properties"]["start_from"]
        start["anyOf"] = [{"type": "string"}, *start["anyOf"]]
        found["properties"]["method"] = _method(found["$defs"])
        found["properties"]["local_models"] = {"anyOf": [found["properties"]["local_models"], {"type": "boolean"}]}
    if name == "federation":  # bare names will do
        sites = found["properties"]["sites"]
        sites["additionalProperties"] = {"anyOf": [sites["additionalProperties"], {"type": "null"}]}
        found["properties"]["sites"] = {"anyOf": [sites, {"type": "array", "items": {"type": "string"}}]}
    return {"$schema": _DIALECT, "title": f"panorgan {name} file", **{k: v for k, v in found.items() if k != "title"}}


def _method(definitions: dict[str, Any]) -> dict[str, Any]:
    """A method's name and its own settings, for every method; what they refer to goes to the other definitions."""
    known = []
    for name, method in sorted(methods().items()):
        own = _plain(method.Config.model_json_schema())
        definitions.update(own.get("$defs", {}))
        properties = {"name": {"const": name}, **own.get("properties", {})}
        known.append({"type": "object", "properties": properties, "required": ["name"], "additionalProperties": False})
    known.append({"type": "string", "description": "the name alone"})
    return {"required": ["name"], "oneOf": known}


def _plain(content: Any) -> Any:
    """In the words of draft 7: a tuple's entries are `items`. Titles that repeat the key, and notes, are left out."""
    if isinstance(content, list):
        return [_plain(one) for one in content]
    if not isinstance(content, dict):
        return content
    dropped = ("title", "paper")  # as notes, not as names of settings
    plain = {k: _plain(value) for k, value in content.items() if not (k in dropped and not isinstance(value, dict))}
    if "prefixItems" in plain:
        plain["items"] = plain.pop("prefixItems")
        plain["additionalItems"] = False
    return plain
