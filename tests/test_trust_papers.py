"""Requirements with hashes, the bill of materials, and the threat model say what is true."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
REQUIREMENTS = sorted(ROOT.glob("requirements*.txt"))


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sbom, lock, check = script("sbom"), script("lock_hashes"), script("check_hashes")


# -- requirements ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_every_requirement_has_a_version_and_hashes(path):
    lines = [line for line in path.read_text().replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+(\s+--hash=sha256:[0-9a-f]{64})+", line), line[:60]


def test_a_package_is_pinned_in_one_file_only():
    """They are installed into one environment, some of them later: a second pin would replace the first."""
    files: dict[str, list[str]] = {}
    for path in REQUIREMENTS:
        for name in re.findall(r"^([A-Za-z0-9._-]+)==", path.read_text(), flags=re.MULTILINE):
            files.setdefault(lock.normalised(name), []).append(path.name)
    assert {name: names for name, names in files.items() if len(names) > 1} == {}
    assert {path.name for path in REQUIREMENTS} == set(lock.FILES)


def test_the_files_are_complete():
    """They are installed with --no-deps: what anything needs must be among them."""
    from packaging.requirements import Requirement

    pinned = sbom.pins()
    for name in pinned:
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            if name == "torch" and needed.name.startswith(("nvidia-", "cuda-", "triton")):
                continue  # its CUDA builds want these, its CPU builds do not; `make venv` lets pip add them
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                found = pinned.get(lock.normalised(needed.name))
                assert found is not None, f"{name} needs {text}"
                assert needed.specifier.contains(found[0], prereleases=True), f"{name} needs {text}"


def test_what_the_project_asks_for_is_pinned():
    from packaging.requirements import Requirement

    project, pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"], sbom.pins()
    extras = project["optional-dependencies"]
    scopes = {"required": project["dependencies"], "optional": [*extras["network"], *extras["onnx"]]}
    # pydicom is in the file of what is required, because it is small.
    scopes["optional"] = [*scopes["optional"], *(text for text in extras["dicom-out"] if "pydicom" not in text)]
    for scope, texts in scopes.items():
        for needed in map(Requirement, texts):
            version, found, _ = pinned[lock.normalised(needed.name)]
            assert found == scope, needed
            assert needed.specifier.contains(version), needed


INDEX = """<a href="https://x/numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl#sha256={a}">n</a>
<a href="https://x/numpy-2.4.6-cp312-cp312-macosx_14_0_arm64.whl#sha256={b}">n</a>
<a href="https://x/numpy-2.4.6-cp310-cp310-manylinux_2_28_x86_64.whl#sha256={c}">n</a>
<a href="https://x/numpy-2.4.6-cp311-cp311-musllinux_1_2_s390x.whl#sha256={d}">n</a>
<a href="https://x/numpy-2.4.6.tar.gz#sha256={e}">n</a>
<a href="https://x/numpy-2.4.60-cp311-cp311-manylinux_2_28_x86_64.whl#sha256={f}">n</a>""".format(
    **{letter: letter * 64 for letter in "abcdef"}
)


def test_hashes_are_those_of_wheels_that_we_may_install(tmp_path, monkeypatch):
    page = tmp_path / "index.html"
    page.write_text(INDEX)
    asked = []

    def answer(address: str, timeout: float):
        asked.append(address)
        return page.open("rb")

    monkeypatch.setattr(lock.urllib.request, "urlopen", answer)
    assert lock.from_index("https://index/simple", "Num_Py", "2.4.6") == set(), "another package"
    assert asked == ["https://index/simple/num-py/"]
    assert lock.from_index("https://index/simple", "numpy", "2.4.6") == {"a" * 64, "b" * 64}
    wheel = tmp_path / "numpy-2.4.6+cpu-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"wheel")
    text = lock.locked("# kept\nnumpy==2.4.6 \\\n    --hash=sha256:old\n", "https://index/simple", tmp_path)
    assert text.startswith("# kept\nnumpy==2.4.6 \\\n    --hash=sha256:")
    assert len(re.findall("--hash", text)) == 3
    assert "old" not in text
    page.write_text("\n".join(line for line in INDEX.splitlines() if ".whl" not in line))
    assert lock.from_index("https://index/simple", "numpy", "2.4.6") == {"e" * 64}, "a source where there is no wheel"


def test_a_wheel_with_another_hash_is_found_out():
    def report(name: str, sha: str) -> dict[str, object]:
        archive = {"hashes": {"sha256": sha}}
        return {
            "install": [
                {"metadata": {"name": name}, "download_info": {"url": f"https://x/{name}.whl", "archive_info": archive}}
            ]
        }

    requirements = f"# why\ntorch==2.13.0 \\\n    --hash=sha256:{'a' * 64} \\\n    --hash=sha256:{'b' * 64}\n"
    assert check.strangers(report("torch", "b" * 64), requirements) == []
    assert check.strangers(report("torch", "c" * 64), requirements) == ["https://x/torch.whl"]
    assert check.strangers(report("nvidia_cublas", "c" * 64), requirements) == []
    without = {"install": [{"metadata": {"name": "torch"}, "download_info": {"url": "u"}}]}
    assert check.strangers(without, requirements) == ["u"]


# -- bill of materials -----------------------------------------------------------------------------------------


def test_the_bill_names_everything_that_is_pinned_and_how_it_hangs_together():
    bill = sbom.bill()
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", bill["serialNumber"])
    components = {component["name"]: component for component in bill["components"]}
    vendored = components.pop("@niivue/niivue")
    assert {name: c["version"] for name, c in components.items()} == {n: f[0] for n, f in sbom.pins().items()}
    assert components["torch"]["scope"] == "required"
    assert components["nvflare"]["scope"] == "optional"
    assert components["pytest"]["scope"] == "excluded"
    references = {component["bom-ref"] for component in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    assert len(references) == len(components) + 2
    assert vendored["bom-ref"] in {
        r for e in bill["dependencies"] if "pkg:pypi/panorgan@" in e["ref"] for r in e["dependsOn"]
    }
    graph = {entry["ref"]: set(entry["dependsOn"]) for entry in bill["dependencies"]}
    assert graph.keys() == references
    assert set().union(*graph.values()) <= references
    torch = components["torch"]["bom-ref"]
    assert torch in graph[components["monai"]["bom-ref"]]
    assert torch in graph[bill["metadata"]["component"]["bom-ref"]]
    assert json.dumps(bill) == json.dumps(sbom.bill()), "the same environment, the same bytes"


def test_the_vendored_file_is_the_one_that_its_record_and_the_bill_name():
    (record_file,) = sbom.VENDORED
    record = json.loads(record_file.read_text())
    content = (record_file.parent / record["file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == record["sha256"]
    vendored = next(component for component in sbom.bill()["components"] if component["name"] == record["name"])
    assert vendored["hashes"][0]["content"] == record["sha256"]
    own = (record_file.parent / "niivue.LICENSE.txt").read_text()
    assert own.startswith("BSD 2-Clause License")
    parts = (record_file.parent / "niivue.parts.LICENSES.txt").read_text()
    for part in record["parts"]:
        assert f"{part['name']} ({part['licence']})" in parts
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    for file in record_file.parent.glob("*LICENSE*"):
        assert any(file.relative_to(ROOT).match(pattern) for pattern in patterns), file


def test_an_environment_that_differs_from_the_files_is_told(monkeypatch):
    versions = {name: facts[0] for name, facts in sbom.pins().items()}
    monkeypatch.setattr(sbom.metadata, "version", lambda name: versions[name])
    assert sbom.differing() == []
    versions["torch"] += "+cpu"
    assert sbom.differing() == []
    versions["numpy"] = "1.0"
    assert [text.split()[:2] for text in sbom.differing()] == [["numpy", "1.0"]]


# -- threat model ----------------------------------------------------------------------------------------------


def test_the_threat_model_speaks_of_everybody_and_its_links_lead_somewhere():
    text = (ROOT / "SECURITY.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == "Report a vulnerability"
    assert "What does not hold" in headings
    for who in ("curious coordinator", "malicious coordinator", "malicious site", "admin key", "kit", "on the wire"):
        assert who in text, who
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert link.startswith("https:") or (ROOT / link).exists(), link
