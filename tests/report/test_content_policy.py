"""Every page carries a Content-Security-Policy: nothing is loaded, no script runs but its own, and nothing is sent."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import checkups
import pytest
from browser import blocked, visit

import panorgan.report
from panorgan.report.doctor_page import render
from panorgan.report.templates import CONTENT_SECURITY_POLICY, PAGE_SCRIPT

PAGES = [path for path in sorted(Path(panorgan.report.__file__).parent.glob("*.j2")) if "<html" in path.read_text()]
META = f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'.replace("'", "&#39;")


def hash_of(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def test_the_pages_are_those_we_know():
    assert [path.name for path in PAGES] == [
        "comparison.html.j2",
        "doctor.html.j2",
        "federation.html.j2",
        "site.html.j2",
        "template.html.j2",
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_policy_comes_before_anything_that_could_be_loaded(path):
    text = path.read_text()
    place = text.index('<meta http-equiv="Content-Security-Policy" content="{{ content_security_policy }}">')
    assert place < text.index("<title>") < text.index("<style>")
    assert re.findall("<script.*", text) == ["<script>{{ page_script }}</script>"]


def test_the_policy_forbids_everything_but_what_a_page_holds():
    rules = dict(part.strip().split(" ", 1) for part in CONTENT_SECURITY_POLICY.split(";"))
    assert rules == {
        "default-src": "'none'",
        "script-src": f"'sha256-{hash_of(PAGE_SCRIPT)}'",
        "img-src": "data:",
        "style-src": "'unsafe-inline'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    page = render(checkups.sick(), "now")
    assert META in page
    assert re.findall("<script>(.*?)</script>", page, re.DOTALL) == [PAGE_SCRIPT]


def test_the_script_cannot_end_its_element_and_reaches_for_nothing():
    assert not re.search(r"</|<!--|https?:|fetch\(|XMLHttpRequest|innerHTML|eval\(|import\(", PAGE_SCRIPT)


@pytest.mark.slow
def test_nothing_of_the_page_is_blocked_but_a_smuggled_script_is(tmp_path):
    page = render(checkups.sick(), "now")
    dom, log = visit(page, tmp_path)
    assert "</html>" in dom
    assert blocked(log) == []
    smuggled = "<script>document.title = 'owned'</script><img src='file:///etc/hostname'></body>"
    dom, log = visit(page.replace("</body>", smuggled), tmp_path)
    assert "<title>owned</title>" not in dom
    assert len(blocked(log)) >= 2
    without = page.replace(META, "").replace("</body>", smuggled)
    assert "<title>owned</title>" in visit(without, tmp_path)[0], "it is the policy that stops it"
