"""How a body lies, seen from the CT alone: every wrong header of a clear torso, and silence about everything else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from panorgan.data.volume import Volume, read_volume
from panorgan.data_doctor import plausible
from panorgan.data_doctor.body_orientation import check_orientation, look_at_body
from panorgan.data_doctor.findings import StructureFacts
from panorgan.data_doctor.geometry import to_ras
from panorgan.data_doctor.organ_positions import axes_in_order
from panorgan.phantom import PhantomConfig, PhantomSite, write_federation

DATA = Path(__file__).parents[3] / "shared" / "data"
AP, HF, LR = 1, 2, 0
SITES = {
    "ordinary": {"spacing_mm": (4.5, 4.5, 5)},
    "thick": {"spacing_mm": (2.5, 2.5, 8), "orientation": "RAS", "kernel": "sharp", "noise_hu": 25},
    "no_table": {"spacing_mm": (4, 4, 4), "table": False, "size": 0.85, "fatness": 0.1},
}


@pytest.fixture(scope="module")
def torsos(tmp_path_factory) -> dict[str, Volume]:
    """A scan of each site, in RAS order."""
    return _scans(tmp_path_factory.mktemp("torsos"), SITES)


def _scans(folder: Path, sites: dict[str, dict]) -> dict[str, Volume]:
    made = tuple(PhantomSite(name=name, annotated=("liver",), cases=1, **about) for name, about in sites.items())
    folders = write_federation(PhantomConfig(sites=made, seed=4), folder)
    return {name: to_ras(read_volume(next((folders[name] / "imagesTr").iterdir()))) for name in sites}


def headers(image: Volume) -> Iterator[tuple[tuple[int, ...], set[int], Volume]]:
    """The scan under all 48 headers that exchange or turn axes: order, turned axes, and what a reader would see."""
    for order in itertools.permutations(range(3)):
        for signs in itertools.product((1, -1), repeat=3):
            voxels = image.voxels.transpose(order)[tuple(slice(None, None, sign) for sign in signs)]
            spacing = [image.spacing[axis] for axis in order]
            turned = {axis for axis, sign in enumerate(signs) if sign < 0}
            yield order, turned, Volume(np.ascontiguousarray(voxels), np.diag([*spacing, 1.0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SITES)
def test_wrong_headers_are_found_and_right_ones_are_not(torsos, name):
    for order, turned, seen in headers(torsos[name]):
        problem = check_orientation(seen)
        if order != (0, 1, 2):
            assert problem is not None, (order, turned)
            assert "axes are exchanged" in problem.what
        elif AP in turned:
            assert problem is not None, turned
            assert problem.code == "body-turned"
            assert "front and back" in problem.what
        elif not turned - {LR}:
            assert problem is None, problem


def test_the_table_makes_it_sure(torsos):
    ordinary, bare = (_turned(torsos[name], AP) for name in ("ordinary", "no_table"))
    assert "almost surely" in check_orientation(ordinary).what
    assert look_at_body(ordinary).table
    assert "probably" in check_orientation(bare).what
    assert not look_at_body(bare).table


def _turned(image: Volume, *axes: int) -> Volume:
    return Volume(np.flip(image.voxels, axes).copy(), image.affine)


def test_lungs_tell_head_from_foot(torsos):
    """The scan goes from the lungs' bases far into the abdomen."""
    assert look_at_body(torsos["ordinary"]).head == (2, 1)
    problem = check_orientation(_turned(torsos["ordinary"], HF))
    assert "head and foot are exchanged" in problem.what
    both = check_orientation(_turned(torsos["ordinary"], AP, HF))
    assert "front and back and head and foot" in both.what


def test_lungs_at_the_lower_end_of_a_neck_say_nothing(torsos):
    """Without a wide body beyond the lungs, their end may be either."""
    image = torsos["ordinary"]
    x, y, _ = np.indices(image.voxels.shape)
    tissue = image.voxels[:, :, :8] > -300
    middle = [int(np.median(place)) for place in np.nonzero(tissue)[:2]]
    outside = np.hypot(x - middle[0], y - middle[1]) * 4.5 > 80
    outside[:, :, 12:] = False  # the lower 6 cm
    neck = Volume(np.where(outside, -1000, image.voxels), image.affine)
    assert look_at_body(neck) is not None
    assert look_at_body(neck).head is None


def test_a_patient_on_the_belly_gives_no_answer(torsos):
    """The table is at the front and the spine at the back: nothing to say, whatever the header."""
    image = torsos["no_table"]
    voxels = image.voxels.copy()
    front = np.flatnonzero((voxels > -300).any(axis=(0, 2)))[-1]
    voxels[10:-10, front + 3 : front + 6] = -100
    prone = Volume(voxels, image.affine)
    assert look_at_body(image) is not None
    assert look_at_body(prone) is None
    assert look_at_body(_turned(prone, AP)) is None


@pytest.mark.slow
def test_random_crops_raise_no_false_alarm(torsos):
    """Cut off anywhere, the body may look as if it went on at its sides."""
    random = np.random.default_rng(0)
    for image in torsos.values():
        size = np.array(image.voxels.shape)
        for _ in range(40):
            cut = random.uniform(0, 0.45, (2, 3)) * (random.random((2, 3)) < 0.6)
            low, high = (cut[0] * size).astype(int), (size - cut[1] * size).astype(int)
            part = image.voxels[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
            assert check_orientation(Volume(part.copy(), image.affine)) is None, (low, high)


def test_organs_know_better(torsos):
    turned = _turned(torsos["ordinary"], AP)
    assert check_orientation(turned, confirmed={1}) is None
    assert check_orientation(turned, confirmed={2}) is not None


@pytest.mark.parametrize(("behind", "axes"), [(-40.0, {1}), (40.0, set())])
def test_organs_in_order_name_their_axis(behind, axes):
    first, second = plausible.IN_FRONT[0]
    facts = {
        name: StructureFacts(name, 1000, 10.0, (0.0, y, 0.0), 1, 1.0, 40.0)
        for name, y in ((first, 0.0), (second, behind))
    }
    assert axes_in_order(facts) == axes


def crops(image: Volume) -> Iterator[tuple[str, Volume]]:
    """Parts in which the body is not whole."""
    x, y, z = image.voxels.shape
    yield "the middle", Volume(image.voxels[x // 4 : -x // 4, y // 4 : -y // 4].copy(), image.affine)
    yield "the back", Volume(image.voxels[:, : y // 2].copy(), image.affine)
    yield "the front", Volume(image.voxels[:, y // 2 :].copy(), image.affine)
    yield "one side", Volume(image.voxels[: x // 2].copy(), image.affine)
    yield "few slices", Volume(image.voxels[:, :, : z // 6].copy(), image.affine)
    yield "a sliver", Volume(image.voxels[:, :, :3].copy(), image.affine)


def others() -> Iterator[tuple[str, Volume]]:
    """Other things than torsos."""
    limb = np.full((60, 60, 80), -1000, np.int16)
    place = np.hypot(*(np.indices(limb.shape)[:2] - 30))
    limb[place < 18], limb[place < 5] = 40, 800
    yield "a limb", Volume(limb, np.diag([3.0, 3, 3, 1]))
    yield "noise", Volume(np.random.default_rng(0).normal(0, 500, (60, 60, 60)), np.diag([4.0, 4, 4, 1]))
    yield "nothing", Volume(np.full((40, 40, 40), -1000), np.diag([4.0, 4, 4, 1]))


def test_parts_of_a_torso_raise_no_false_alarm(torsos):
    for name, part in crops(torsos["ordinary"]):
        assert check_orientation(part) is None, name
        assert check_orientation(_turned(part, LR)) is None, name


@pytest.mark.parametrize(("name", "image"), list(others()), ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_no_torso_gives_no_answer(name, image):
    assert [look_at_body(seen) for *_, seen in headers(image)] == [None] * 48


def test_hips_are_not_taken_for_a_spine():
    """Two femoral heads, and the pubis in front of a small sacrum."""
    voxels = np.full((120, 90, 40), -1000, np.int16)
    x, y, _ = np.indices(voxels.shape)
    voxels[np.hypot((x - 60) / 1.4, y - 45) < 35] = 40
    for side in (30, 90):
        voxels[np.hypot(x - side, y - 45) < 9] = 500
    voxels[np.hypot(x - 60, y - 70) < 5] = 400
    hips = Volume(voxels, np.diag([3.0, 3, 4, 1]))
    assert look_at_body(hips) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["example_ct.nii.gz", "example_ct_sm.nii.gz"])
def test_real_scans(name):
    path = DATA / "totalsegmentator_examples" / name
    if not path.exists():
        pytest.skip("needs ../shared/data/totalsegmentator_examples")
    for order, turned, seen in headers(to_ras(read_volume(path))):
        problem = check_orientation(seen)
        assert (problem is not None) == (order != (0, 1, 2) or AP in turned), (order, turned)
