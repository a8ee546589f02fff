"""Every class of the large public data sets has a name that the catalogue finds."""

import pytest

from panorgan.anatomy import Vocabulary, catalogue, find_organ

SIDED = [
    "humerus",
    "scapula",
    "clavicula",
    "femur",
    "hip",
    "gluteus_maximus",
    "gluteus_medius",
    "gluteus_minimus",
    "autochthon",
    "iliopsoas",
    "iliac_artery",
    "iliac_vena",
]
BOTH_SIDES = [f"{name}_{side}" for name in SIDED for side in ("left", "right")]
TOTALSEGMENTATOR_CT = [
    "spleen",
    "kidney_right",
    "kidney_left",
    "gallbladder",
    "liver",
    "stomach",
    "pancreas",
    "adrenal_gland_right",
    "adrenal_gland_left",
    "lung_upper_lobe_left",
    "lung_lower_lobe_left",
    "lung_upper_lobe_right",
    "lung_middle_lobe_right",
    "lung_lower_lobe_right",
    "esophagus",
    "trachea",
    "thyroid_gland",
    "small_bowel",
    "duodenum",
    "colon",
    "urinary_bladder",
    "prostate",
    "kidney_cyst_left",
    "kidney_cyst_right",
    "sacrum",
    "vertebrae_S1",
    "heart",
    "aorta",
    "pulmonary_vein",
    "brachiocephalic_trunk",
    "subclavian_artery_right",
    "subclavian_artery_left",
    "common_carotid_artery_right",
    "common_carotid_artery_left",
    "brachiocephalic_vein_left",
    "brachiocephalic_vein_right",
    "atrial_appendage_left",
    "superior_vena_cava",
    "inferior_vena_cava",
    "portal_vein_and_splenic_vein",
    "spinal_cord",
    "brain",
    "skull",
    "sternum",
    "costal_cartilages",
]
TOTALSEGMENTATOR_CT += [
    f"vertebrae_{part}{n}" for part, last in (("C", 7), ("T", 12), ("L", 5)) for n in range(1, last + 1)
]
TOTALSEGMENTATOR_CT += [f"rib_{side}_{n}" for side in ("left", "right") for n in range(1, 13)] + BOTH_SIDES
TOTALSEGMENTATOR_MR = [
    "spleen",
    "kidney_right",
    "kidney_left",
    "gallbladder",
    "liver",
    "stomach",
    "pancreas",
    "adrenal_gland_right",
    "adrenal_gland_left",
    "lung_left",
    "lung_right",
    "esophagus",
    "small_bowel",
    "duodenum",
    "colon",
    "urinary_bladder",
    "prostate",
    "sacrum",
    "vertebrae",
    "intervertebral_discs",
    "spinal_cord",
    "heart",
    "aorta",
    "inferior_vena_cava",
    "portal_vein_and_splenic_vein",
    "brain",
    *BOTH_SIDES,
]
THIGH = ["quadriceps_femoris", "thigh_medial_compartment", "thigh_posterior_compartment", "sartorius"]
DATA_SETS = {
    "TotalSegmentator CT": (117, TOTALSEGMENTATOR_CT),
    "TotalSegmentator MR": (50, TOTALSEGMENTATOR_MR),
    "TotalSegmentator MR, first release": (
        10,
        [f"{n}_{s}" for n in THIGH for s in ("left", "right")] + ["tibia", "fibula"],
    ),
    "AMOS": (
        15,
        [
            "spleen",
            "right kidney",
            "left kidney",
            "gall bladder",
            "esophagus",
            "liver",
            "stomach",
            "arota",
            "postcava",
            "pancreas",
            "right adrenal gland",
            "left adrenal gland",
            "duodenum",
            "bladder",
            "prostate/uterus",
        ],
    ),
    "BTCV": (
        13,
        [
            "spleen",
            "right kidney",
            "left kidney",
            "gallbladder",
            "esophagus",
            "liver",
            "stomach",
            "aorta",
            "inferior vena cava",
            "portal vein and splenic vein",
            "pancreas",
            "right adrenal gland",
            "left adrenal gland",
        ],
    ),
    "FLARE": (
        13,
        [
            "liver",
            "right kidney",
            "spleen",
            "pancreas",
            "aorta",
            "IVC",
            "RAG",
            "LAG",
            "gallbladder",
            "esophagus",
            "stomach",
            "duodenum",
            "left kidney",
        ],
    ),
    "MSD 1, BraTS": (3, ["edema", "non-enhancing tumor", "enhancing tumour"]),
    "BraTS regions": (3, ["whole tumor", "tumor core", "enhancing tumor"]),
    "BraTS 2023": (4, ["NETC", "SNFH", "enhancing tissue", "resection cavity"]),
    "MSD 2": (1, ["left atrium"]),
    "MSD 4": (2, ["Anterior", "Posterior"]),
    "MSD 5": (2, ["PZ", "TZ"]),
    "MSD 9": (1, ["spleen"]),
    "MSD 10": (1, ["colon cancer primaries"]),
}
# Tasks 3, 6, 7 and 8 say "cancer", "Tumour" and "Vessel", of the organ that the task is about.
MSD_BARE = {"liver": "cancer", "lung": "cancer", "pancreas": "cancer", "hepatic": "vessel"}


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_every_class_is_found(data_set: str) -> None:
    count, names = DATA_SETS[data_set]
    assert len(names) == count
    found = [find_organ(name).name for name in names]
    assert len(set(found)) == count
    assert set(found) <= set(catalogue())


@pytest.mark.parametrize("organ", MSD_BARE)
def test_a_bare_word_is_found_with_its_organ(organ: str) -> None:
    inner = find_organ(f"{organ} {MSD_BARE[organ]}")
    assert inner.relation == "inside"


@pytest.mark.parametrize(
    ("vocabulary", "annotated", "members"),
    [
        (["brain_tumour_oedema", "brain_tumour_enhancing", "brain_tumour_non_enhancing"], "tumor core", 2),
        (["brain_tumour_oedema", "brain_tumour_enhancing", "brain_tumour_non_enhancing"], "whole tumor", 3),
        (["prostate", "uterus"], "prostate/uterus", 2),
        (["prostate_peripheral_zone", "prostate_transition_zone"], "prostate", 2),
        (["femur_left", "femur_right"], "femur", 2),
        (["spine", "vertebra_l1", "vertebra_l2"], "vertebrae", 3),
    ],
)
def test_sites_may_annotate_the_whole(vocabulary: list[str], annotated: str, members: int) -> None:
    assert len(Vocabulary(vocabulary).members(annotated)) == members


def test_a_site_with_all_vertebrae_may_join_one_that_labels_the_spine() -> None:
    """As before the catalogue knew vertebrae: they are left out, not refused."""
    vertebrae = [name for name in TOTALSEGMENTATOR_CT if name.startswith("vertebrae")]
    assert Vocabulary(["spine", "liver"]).resolve([*vertebrae, "liver"], ignore_unknown=True) == ("liver",)
