"""The page about methods: everything is on it, and its links lead somewhere."""

from __future__ import annotations

import re

import pytest

from panorgan.methods import registry
from panorgan.methods.about.metadata import as_yaml, describe
from panorgan.methods.base import Method
from panorgan.methods.registry import methods, register
from panorgan.report.method_words import describe_method
from panorgan.report.methods_page import method_section, methods_page, paper_link


@pytest.fixture(scope="module")
def page() -> str:
    return methods_page()


def test_every_method_has_a_row_and_a_section(page):
    rows = re.findall(r"^\| \[`(\w+)`\]\(#([\w-]+)\)", page, flags=re.MULTILINE)
    headings = re.findall(r"^## (.*\(`(\w+)`\))$", page, flags=re.MULTILINE)
    assert sorted(name for name, _ in rows) == [name for _, name in headings] == list(methods())
    # As GitHub and most others make an anchor of a heading.
    anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading, _ in headings]
    assert dict(rows) == dict(zip([name for _, name in headings], anchors, strict=True))


@pytest.mark.parametrize("name", methods())
def test_a_section_holds_everything(name):
    described = describe(methods()[name])
    section = method_section(described)
    assert all(equation in section for pair in described.equations.items() for equation in pair)
    for field in described.own_fields:
        cells = (f"`{field.name}`", field.type, f"`{as_yaml(field.default)}`", field.paper or "–", field.meaning)
        assert f"| {' | '.join(cells)} |" in section
    assert all(f"- `{pattern}`: {sentence}" in section for pattern, sentence in described.tensors.items())
    if described.pooled:
        assert "this is not a federation" in section
    else:
        assert all(f"- number `{pattern}`: {words}\n" in section for pattern, words in described.numbers.items())
        assert all(f"| {s.stage} | {s.rounds} | {s.words} |" in section for s in described.sent)


def test_sections_by_example(page):
    assert "[arXiv:1812.06127](https://arxiv.org/abs/1812.06127)" in page
    assert "model. arXiv:1812.06127" not in page, "the reference is not repeated"
    flkd = next(line for line in page.splitlines() if line.startswith("| [`flkd`]"))
    assert flkd.endswith("| a head per organ | pretrain, exchange | 1.00 + 1.00 once in pretrain | |")
    segviz = next(line for line in page.splitlines() if line.startswith("| [`segviz`]"))
    assert segviz.endswith("| a task block per organ | finetune (optional) | 1.00 | |")
    assert "finetune, every round: the task blocks of its own organs, no other weights (< 0.01)" in page
    assert paper_link("no link") == "no link"


def test_the_page_is_about_methods_of_panorgan_only(monkeypatch, page):
    """Other installed methods do not change the page."""
    monkeypatch.setattr(registry, "_registered", dict(methods()))
    register("elsewhere")(type("Elsewhere", (Method,), {"__module__": "another_package", "__doc__": "Not ours."}))
    assert "elsewhere" in methods()
    assert methods_page() == page
    assert "Not ours." in method_section(describe(methods()["elsewhere"]))


def test_a_report_uses_the_same_words():
    words = describe_method("solo")
    assert (words.title, words.pooled) == ("Solo", False)
    assert words.explanation.startswith("every site trains alone")
    assert describe_method("no_longer_installed").title == "no_longer_installed"


def test_numbers_of_a_method_are_told_in_its_own_words():
    """Also where every method sends them."""
    own = {"loss": "how badly it went", "agreement/*": "how alike the heads predict"}
    section = method_section(describe(type("Agreeing", (Method,), {"name": "agreeing", "numbers": own})))
    assert "- number `loss`: how badly it went\n- number `agreement/*`: how alike the heads predict\n" in section
    assert "mean loss of the round" not in section
