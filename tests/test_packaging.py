"""What is needed to install and to cite panorgan: the image's recipe, the citation, and words about installing."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import yaml

import panorgan

ROOT = Path(__file__).parents[1]
WHEEL = f"build/dist/panorgan-{panorgan.__version__}-py3-none-any.whl"


def instructions() -> list[tuple[str, str]]:
    text = "\n".join(line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines) if word]


def test_the_image_copies_what_exists_and_its_context_lets_through():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    copied = [source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]]
    assert "build/dist/*.whl" in copied
    for source in copied:
        example = WHEEL if "*" in source else source
        assert any(fnmatch.fnmatch(example, pattern) for pattern in allowed), source
        assert "*" in source or (ROOT / source).is_file(), source


def test_the_image_is_for_the_tested_python_runs_as_nobody_special_and_uses_its_arguments():
    found = instructions()
    assert {word for word, _ in found} <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "ENTRYPOINT", "CMD"}
    assert ("USER", "panorgan") in found
    assert ("ENTRYPOINT", '["panorgan"]') in found
    base = next(rest for word, rest in found if word == "ARG" and rest.startswith("BASE="))
    version = re.search(r"python:3\.(\d+)", base)
    assert int(version[1]) >= 11
    whole = " ".join(rest for word, rest in found if word != "ARG")
    assert [r for w, r in found if w == "ARG" and f"${{{r.partition('=')[0]}}}" not in whole] == []
    install = next(rest for word, rest in found if word == "RUN" and "pip install" in rest)
    for file in re.findall(r"-r (\S+)", install):
        assert (ROOT / file).is_file()
    assert "--require-hashes" in install


def test_the_citation_names_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert cited["version"] == project["version"] == panorgan.__version__
    assert cited["license"] == project["license"]
    assert cited["authors"] == [{"name": "panorgan developers"}]


def test_nothing_says_to_install_a_name_that_is_on_no_index():
    """An unpublished name is one that anybody may publish."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "Dockerfile"]
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".j2", ".yaml", ".toml")]
    named = re.compile(r"pip (?:install|download)[^\n`]*?[\s\"']panorgan(?:\[|[\"'\s=]|$)")
    assert [path.name for path in [*pages, *sources] if named.search(path.read_text())] == []
