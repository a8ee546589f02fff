"""Attention lands on the places of the scan that it belongs to: tokens, voxels, slices, by hand."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import pytest
import torch
from fediod_pieces import SMALL

from panorgan.anatomy import Vocabulary
from panorgan.data.case import Case, MaskFiles
from panorgan.methods.fediod.attention_on_scans import ScanPatch, choose_slices, look, on_plane, patches_of, seen_from
from panorgan.methods.fediod.inter_organ import InterOrganNetwork, InterOrganSettings
from panorgan.networks import UNetSettings
from panorgan.preparation.plan import Plan


def patch_of(size: tuple[int, int, int], across: int = 2, level: int = 0, **masks: torch.Tensor) -> ScanPatch:
    return ScanPatch(torch.zeros(size), masks, across, level, (1.0, 1.0, 1.0))


def box(shape: tuple[int, int, int], *bounds: tuple[int, int]) -> np.ndarray:
    mask = np.zeros(shape, dtype=bool)
    mask[tuple(slice(*bound) for bound in bounds)] = True
    return mask


# -- from tokens to the picture ----------------------------------------------------------------------------------------


def test_one_token_lands_on_its_place():
    """2 × 3 tokens, counted row by row: token 4 is row 1, column 1. A few points each, linear between centres."""
    found = torch.zeros(6)
    found[4] = 6.0
    plane = on_plane(found.unflatten(0, (2, 3)), patch_of((16, 24, 1)))
    assert plane.shape == (8, 12), "four points per token"
    # Points lie at -1.5, -0.5, 0.5 and 1.5 quarters of a cell from its centre; linear weights along an axis by hand.
    along_rows = torch.tensor([0, 0, 1, 3, 5, 7, 8, 8]) / 8
    along_columns = torch.tensor([0, 0, 1, 3, 5, 7, 7, 5, 3, 1, 0, 0]) / 8
    torch.testing.assert_close(plane, 6 * along_rows[:, None] * along_columns[None])


@pytest.mark.parametrize(("across", "size"), [(0, (1, 16, 24)), (1, (16, 1, 24)), (2, (16, 24, 1))])
def test_slices_across_any_axis_keep_the_order_of_the_others(across, size):
    found = torch.arange(6.0).unflatten(0, (2, 3))
    plane = on_plane(found, patch_of(size, across))
    torch.testing.assert_close(plane, on_plane(found, patch_of((16, 24, 1))))
    assert [plane[corner].item() for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1))] == [0, 2, 3, 5]


def test_a_volume_shows_its_level():
    """Tokens 2 × 2 × 2 with all attention in the upper half: level 0 lies in the lower, level 7 in the upper cell."""
    found = torch.zeros(2, 2, 2)
    found[:, :, 1] = 2.0
    assert on_plane(found, patch_of((8, 8, 8), level=0)).unique().tolist() == [0.0]
    assert on_plane(found, patch_of((8, 8, 8), level=7)).unique().tolist() == [2.0]


# -- from an organ -----------------------------------------------------------------------------------------------------


def test_an_organ_looks_with_the_rows_of_its_tokens():
    """A mask that covers token 0 wholly and half of token 1: two thirds of row 0, one third of row 1, times 4."""
    attention = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.1, 0.7], [1, 0, 0, 0], [0, 1, 0, 0]])
    mask = torch.zeros(4, 4)
    mask[:2, :2] = 1  # token (0, 0)
    mask[:2, 2] = 1  # the left half of token (0, 1)
    expected = 4 * torch.tensor([[0.9, 0.7], [0.5, 0.9]]) / 3
    torch.testing.assert_close(seen_from(attention, (2, 2), mask), expected)
    assert float(expected.mean()) == pytest.approx(1)


def test_a_network_is_asked_for_its_own_attention():
    torch.manual_seed(0)
    network = InterOrganNetwork(
        Vocabulary(["liver"]), UNetSettings(dimensions=2, features=(4, 8)), None, InterOrganSettings(**SMALL)
    ).eval()
    image, mask = torch.rand(8, 12, 1), torch.zeros(8, 12, 1)
    mask[2:4, 10:12] = 1  # exactly token (1, 5) of 4 × 6
    looks = look(network, ScanPatch(image, {"liver": mask}, 2, 0, (1.0, 1.0, 1.0)))
    mean = network.attention(image[None, None, :, :, 0]).detach()
    torch.testing.assert_close(looks.received, mean.sum(1).unflatten(1, (4, 6))[0])
    torch.testing.assert_close(looks.from_organ["liver"], 24 * mean[0, 1 * 6 + 5].unflatten(0, (4, 6)))


@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "none"])
def test_even_attention_is_one_everywhere(gate):
    network = InterOrganNetwork(
        Vocabulary(["liver"]), UNetSettings(dimensions=2, features=(4, 8)), None, InterOrganSettings(**SMALL, gate=gate)
    ).eval()
    with torch.no_grad():
        for layer in network.transformer.layers:
            for head in layer.heads:
                head.query.zero_()
    looks = look(network, patch_of((8, 8, 1), liver=torch.ones(8, 8, 1)))
    for found in (looks.received, looks.from_organ["liver"]):
        torch.testing.assert_close(found, torch.ones(4, 4))


# -- which slices, which patch -----------------------------------------------------------------------------------------


def test_slices_that_show_organs_at_their_largest():
    shape = (10, 10, 12)
    together = {
        "liver": box(shape, (0, 5), (0, 5), (2, 8)),
        "spleen": box(shape, (7, 9), (7, 9), (5, 10)),
        "nothing": np.zeros(shape, bool),
    }
    assert choose_slices(together, 2, 2) == [(5, ("liver", "spleen"))], "one slice shows both, the first such"
    apart = {"liver": box(shape, (0, 5), (0, 5), (0, 3)), "spleen": box(shape, (7, 9), (7, 9), (9, 12))}
    assert choose_slices(apart, 2, 2) == [(0, ("liver",)), (9, ("spleen",))]
    assert choose_slices(apart, 2, 1) == [(0, ("liver",))]
    assert choose_slices({}, 2, 2) == []


def written(folder, image: np.ndarray, **masks: np.ndarray) -> Case:
    affine = np.eye(4)  # RAS, 1 mm: the plan's grid is the scan's
    nib.save(nib.Nifti1Image(image.astype(np.float32), affine), folder / "image.nii.gz")
    for name, mask in masks.items():
        nib.save(nib.Nifti1Image(mask.astype(np.uint8), affine), folder / f"{name}.nii.gz")
    files = MaskFiles({name: (folder / f"{name}.nii.gz",) for name in masks})
    return Case("c", "c", "s", folder / "image.nii.gz", tuple(masks), files)


PLAN = Plan(spacing_mm=(1, 1, 1), window_hu=(-100, 100))


def test_the_patch_lies_around_the_organs(tmp_path):
    image = np.zeros((40, 20, 6))
    image[30, 10, 4] = 100
    organ = box(image.shape, (28, 34), (8, 12), (4, 5))
    (patch,) = patches_of(written(tmp_path, image, liver=organ), PLAN, (8, 16, 1))
    # Middle (31, 10): rows 27 to 34, columns 2 to 17.
    assert patch.plane(patch.image).shape == (8, 16)
    assert (patch.image[:, :, 0] == 1).nonzero().tolist() == [[3, 8]]
    assert patch.masks["liver"][:, :, 0].nonzero()[[0, -1]].tolist() == [[1, 6], [6, 9]]


def test_a_small_scan_lies_in_the_middle_of_its_patch(tmp_path):
    image = np.zeros((4, 6, 3))
    organ = box(image.shape, (0, 4), (0, 6), (1, 2))
    (patch,) = patches_of(written(tmp_path, image, liver=organ), PLAN, (8, 8, 8))
    assert (patch.across, patch.level) == (2, 3), "the scan's level 1, two below which the patch begins"
    assert (patch.image > -1).nonzero()[[0, -1]].tolist() == [[2, 1, 2], [5, 6, 4]]
    assert patch.plane(patch.masks["liver"]).sum() == 24


def test_where_not_all_organs_fit_the_largest_is_shown(tmp_path):
    image = np.zeros((40, 8, 2))
    masks = {"liver": box(image.shape, (0, 6), (0, 6), (0, 2)), "spleen": box(image.shape, (36, 39), (0, 4), (0, 2))}
    (patch,) = patches_of(written(tmp_path, image, **masks), PLAN, (8, 8, 1))
    assert tuple(patch.masks) == ("liver",)
