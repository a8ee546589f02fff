"""Faults that lie between cases, and faults of whole folders."""

from __future__ import annotations

import shutil
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
from fault_bench import Bench, Where, fault, load, save
from scipy import ndimage

from panorgan.anatomy import Vocabulary


def _copy_case(bench: Bench, name: str = "copy") -> tuple[str, str]:
    shutil.copy(bench.image, bench.image_of(name))
    # Another reader drew this one: the labels are not the same, the scan is.
    shutil.copy(bench.label, bench.label_of(name))
    bench.edit(bench.label_of(name), lambda v: np.where(ndimage.binary_erosion(v > 0), v, 0))
    return bench.case, name


@fault("duplicate-scan")
def same_scan_twice(bench: Bench) -> Where:
    return _copy_case(bench)


@fault("duplicate-scan")
def same_scan_stored_otherwise(bench: Bench) -> Where:
    """Other axes, another type and another compression: still the same scan."""
    names = _copy_case(bench)
    for path, kind in ((bench.image_of("copy"), np.float32), (bench.label_of("copy"), np.uint8)):
        voxels, affine = load(path)
        turned = nib.as_closest_canonical(nib.Nifti1Image(voxels.astype(kind), affine))
        save(path, np.asanyarray(turned.dataobj), np.asarray(turned.affine))
    return names


@fault("duplicate-across-splits")
def same_scan_in_train_and_test(bench: Bench) -> Where:
    names = _copy_case(bench)
    splits = dict.fromkeys(bench.cases, "train") | {"copy": "test"}
    bench.source = replace(bench.source, splits=splits)
    return names


@fault("duplicate-across-splits")
def training_scan_among_the_test_images(bench: Bench) -> Where:
    (bench.folder / "imagesTs").mkdir()
    shutil.copy(bench.image, bench.folder / "imagesTs" / "unseen_0000.nii.gz")
    return bench.case, "unseen"


@fault("patient-across-splits")
def patient_in_two_splits(bench: Bench) -> Where:
    bench.as_table(**{bench.case: "anna", bench.other: "anna"})
    splits = dict.fromkeys(bench.cases, "train") | {bench.case: "test"}
    bench.source = replace(bench.source, splits=splits)
    return bench.case, bench.other


@fault("same-label-twice")
def label_of_another_patient(bench: Bench) -> Where:
    shutil.copy(bench.label_of(bench.other), bench.label)
    return bench.case, bench.other


@fault("few-patients")
def few_patients(bench: Bench) -> Where:
    for case in bench.cases[int(bench.rng.integers(1, 4)) :]:
        bench.image_of(case).unlink()
        bench.label_of(case).unlink()
    return ""


@fault("unknown-name")
def unknown_name(bench: Bench) -> Where:
    bench.describe(labels={"Leberchen" if name == "liver" else name: number for name, number in bench.ids.items()})
    return ""


@fault("folder-missing")
def missing_folder(bench: Bench) -> Where:
    bench.source = replace(bench.source, folder=bench.folder / "nowhere")
    return ""


@fault("no-layout")
def no_layout(bench: Bench) -> Where:
    (bench.folder / "dataset.json").unlink()
    return ""


@fault("several-layouts")
def several_layouts(bench: Bench) -> Where:
    (bench.folder / "cases.csv").write_text("case,image,label,annotated\n")
    return ""


@fault("folder-unreadable")
def broken_description(bench: Bench) -> Where:
    path = bench.folder / "dataset.json"
    path.write_text(path.read_text()[: int(bench.rng.integers(5, 60))])
    return ""


@fault("no-scans")
def no_scans(bench: Bench) -> Where:
    for path in [*bench.folder.glob("imagesTr/*"), *bench.folder.glob("labelsTr/*")]:
        path.unlink()
    return ""


@fault("nothing-annotated")
def nothing_of_the_vocabulary(bench: Bench) -> Where:
    bench.source = replace(bench.source, vocabulary=Vocabulary(["hippocampus", "aorta"]))
    return ""


@fault("labels-unusable")
def asked_for_what_is_not_there(bench: Bench) -> Where:
    bench.source = replace(bench.source, vocabulary=Vocabulary(["liver", "aorta"]), restrict=("liver", "aorta"))
    return ""


@fault("ignore-label")
def label_to_be_ignored(bench: Bench) -> Where:
    bench.describe(labels=bench.ids | {"ignore": 16})
    bench.edit(bench.label, lambda v: np.where(np.arange(v.shape[0])[:, None, None] < 3, 16, v))
    return ""


@fault("same-id-twice", "overlapping-masks")
def one_id_for_two_names(bench: Bench) -> Where:
    bench.describe(labels=bench.ids | {"aorta": bench.ids["liver"]})
    return ("", *bench.cases)


@fault("nothing-annotated")
def nothing_declared(bench: Bench) -> Where:
    bench.describe(labels={})
    return ""


@fault("unused-masks")
def masks_of_other_structures(bench: Bench) -> Where:
    masks = bench.as_mask_files() / bench.case / "segmentations"
    for name in ("zygomatic_arch", "auditory_canal_left", "tooth_11"):
        shutil.copy(masks / "liver.nii.gz", masks / f"{name}.nii.gz")
    return ""


@fault("near-name")
def misspelt_mask_file(bench: Bench) -> Where:
    tree = bench.as_mask_files()
    for masks in tree.glob("*/segmentations"):
        (masks / "spleen.nii.gz").rename(masks / "splen.nii.gz")
    return ""


@fault("hu-offset")
def dicom_ct_without_its_rescale(bench: Bench) -> Where:
    tree = bench.as_dicom()
    from dicom_files import change

    for path in (tree / "ct").iterdir():
        change(path, RescaleIntercept=0)
    return "ct"


@fault("frame-of-reference")
def segmentation_in_another_frame(bench: Bench) -> Where:
    pydicom = pytest.importorskip("pydicom")
    bench.as_dicom(FrameOfReferenceUID=pydicom.uid.generate_uid())
    return ""


@fault("unread-volumes")
def label_map_under_another_name_in_a_dicom_tree(bench: Bench) -> Where:
    tree = bench.as_dicom()
    shutil.copy(bench.label, tree / "drawn_by_anna.nii.gz")
    return ""


@fault("orphan-label")
def segmentation_of_an_absent_series(bench: Bench) -> Where:
    """It must not hide the series that is there."""
    tree = bench.as_dicom()
    from dicom_files import change

    shutil.copy(tree / "seg.dcm", tree / "other.dcm")
    reference = pytest.importorskip("pydicom").Dataset()
    reference.SeriesInstanceUID = "1.2.3.4.5"
    change(tree / "other.dcm", PatientID="nobody", FrameOfReferenceUID="1.2.3", ReferencedSeriesSequence=[reference])
    return ""


@fault("hu-offset")
def table_says_ct(bench: Bench) -> Where:
    bench.as_table(modality="CT")
    bench.edit(bench.image, lambda v: v + 1024)
    return bench.case


@fault("hu-offset")
def plan_says_ct(bench: Bench) -> Where:
    bench.as_table()
    bench.source = replace(bench.source, modality="CT")
    bench.edit(bench.image, lambda v: v + 1024)
    return bench.case
