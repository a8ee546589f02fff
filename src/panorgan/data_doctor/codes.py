"""Every kind of finding: severity, title and meaning. Severities are decided only here."""

from __future__ import annotations

from typing import NamedTuple

from panorgan.data_doctor.findings import Finding, Severity

_ERROR, _WARNING, _NOTE = Severity.error, Severity.warning, Severity.note


class Code(NamedTuple):
    """What a code stands for."""

    severity: Severity
    title: str
    meaning: str


CODES: dict[str, Code] = {
    # the folder
    "folder-missing": Code(_ERROR, "folder not found", "The data folder does not exist."),
    "no-layout": Code(_ERROR, "unknown layout", "The folder fits no layout that panorgan reads."),
    "several-layouts": Code(_ERROR, "layout unclear", "The folder fits several layouts; say which."),
    "folder-unreadable": Code(_ERROR, "description unreadable", "dataset.json or a table cannot be understood."),
    "no-scans": Code(_ERROR, "no scans", "The layout fits, but no scan is named as it asks."),
    "unknown-name": Code(_ERROR, "unknown label name", "A label's name is no organ of the catalogue."),
    "near-name": Code(_WARNING, "misspelt mask name", "A mask file has nearly the name of an organ; it is not used."),
    "unused-masks": Code(_NOTE, "masks not used", "Mask files of structures that panorgan does not know."),
    "ignore-label": Code(_ERROR, "ignore label", "The label marks voxels as unknown, which is not supported."),
    "same-id-twice": Code(_ERROR, "one id, two names", "Two labels are declared with the same ids."),
    "channels-unused": Code(_WARNING, "channels not used", "Several channels are declared; only the first is used."),
    "unknown-channel": Code(_ERROR, "unknown channel", "The experiment names a channel that the folder does not have."),
    "labels-unusable": Code(_ERROR, "labels do not fit", "The experiment asks for what is not labelled so."),
    "nothing-annotated": Code(_ERROR, "nothing annotated", "The site annotates nothing of the vocabulary."),
    "never-annotated": Code(_WARNING, "declared, never drawn", "A declared structure is empty in every case."),
    "few-patients": Code(_WARNING, "few patients", "A structure is annotated in fewer than four patients."),
    "orphan-label": Code(_WARNING, "label without image", "A label file belongs to no scan, so it is never read."),
    "unread-volumes": Code(_WARNING, "volumes not read", "NIfTI, MetaImage or NRRD files in a DICOM tree."),
    "unlabelled": Code(_NOTE, "image without label", "A scan has no label, its siblings have: it is not used."),
    # files
    "image-missing": Code(_ERROR, "image missing", "A scan that the folder lists is not there."),
    "channel-missing": Code(_ERROR, "channel missing", "A case lacks a channel (a sequence) that it must have."),
    "channel-twice": Code(_WARNING, "one channel twice", "Two channels of a case hold the same voxels."),
    "label-missing": Code(_ERROR, "label missing", "A label file that the folder promises is not there."),
    "file-unreadable": Code(_ERROR, "unreadable file", "A file is damaged, cut off, or not what its name says."),
    "too-large": Code(_ERROR, "larger than the memory", "By its header, a scan cannot fit into this machine's memory."),
    "not-greyscale": Code(_ERROR, "not greyscale", "Voxels hold colours or complex numbers."),
    "not-3d": Code(_ERROR, "not a 3D file", "A file holds a time series, several channels, or a single line."),
    "singleton-axis": Code(_NOTE, "needless axis", "A fourth axis of length one; read as 3D."),
    "not-finite": Code(_ERROR, "NaN or infinity", "A scan holds values that are not finite numbers."),
    "constant-image": Code(_ERROR, "constant image", "Every voxel of a scan has the same value."),
    # geometry
    "bad-affine": Code(_ERROR, "no geometry", "The affine is singular or not finite."),
    "sheared": Code(_ERROR, "sheared axes", "The axes of a scan do not stand at right angles: a tilted gantry."),
    "implausible-spacing": Code(_ERROR, "impossible voxel size", "The voxel size cannot be in millimetres."),
    "forms-disagree": Code(_WARNING, "qform ≠ sform", "The header gives two places; programs choose differently."),
    "no-orientation": Code(_WARNING, "orientation unknown", "The header does not tell left from right."),
    "shape-mismatch": Code(_ERROR, "shapes differ", "Image and label have different numbers of voxels."),
    "spacing-mismatch": Code(_ERROR, "spacings differ", "Image and label have different voxel sizes."),
    "direction-mismatch": Code(_ERROR, "directions differ", "The axes of image and label point elsewhere."),
    "origin-mismatch": Code(_ERROR, "origins differ", "The label is shifted against its image."),
    "grid-mismatch": Code(_ERROR, "grids differ", "Image and label do not lie on the same voxels."),
    "frame-of-reference": Code(_ERROR, "another frame", "A DICOM-SEG has another frame of reference than its scan."),
    "channel-elsewhere": Code(_ERROR, "channel elsewhere", "A channel does not lie where the first channel does."),
    "channel-resampled": Code(_NOTE, "channel resampled", "A channel has other voxels than the first one."),
    "spacing-outlier": Code(_WARNING, "unusual voxel size", "The voxel size is far from that of the other cases."),
    # intensities
    "one-slice": Code(_WARNING, "a single slice", "A scan is one slice: a scout view, or a volume that was cut."),
    "repeated-slices": Code(_WARNING, "repeated slices", "Slices are the same, or empty where something is labelled."),
    "hu-lost": Code(_ERROR, "no Hounsfield units", "A CT was stored as 8-bit or normalised grey values."),
    "hu-clipped": Code(_WARNING, "already windowed", "A CT was clipped to a display window before it was stored."),
    "hu-offset": Code(_ERROR, "wrong HU offset", "A CT's rescale intercept was not applied, or was applied twice."),
    "hu-scale": Code(_ERROR, "wrong HU scale", "A CT's rescale slope is wrong: air is not near −1000 HU."),
    "hu-overflow": Code(_ERROR, "beyond 16 bits", "A CT holds values that no scanner gives: wrong sign, or wrapped."),
    "hu-organ": Code(_WARNING, "unusual organ HU", "The organ's median is outside of what radiology knows."),
    "intensity-outlier": Code(_WARNING, "unusual intensity", "The organ is far brighter or darker than elsewhere."),
    "modality-mismatch": Code(_ERROR, "not the declared modality", "Declared as CT without CT values, or MR with HU."),
    "mixed-modality": Code(_WARNING, "CT and MR mixed", "Some scans of the folder look like CT, others like MR."),
    # label values
    "label-not-whole": Code(_ERROR, "labels not whole", "Label values were interpolated between whole numbers."),
    "label-nearly-whole": Code(_WARNING, "labels nearly whole", "Label values went through floating point."),
    "stray-label": Code(_ERROR, "undeclared label id", "A label file holds ids that nothing names."),
    "negative-label": Code(_ERROR, "negative label id", "A label file holds ids below zero."),
    # masks
    "empty-mask": Code(_WARNING, "empty mask", "Annotated but empty: absent, or not annotated?"),
    "tiny-mask": Code(_WARNING, "tiny mask", "A mask is smaller than the organ can be."),
    "huge-mask": Code(_WARNING, "huge mask", "A mask is larger than the organ can be, or fills the scan."),
    "overlapping-masks": Code(_ERROR, "overlapping masks", "A voxel belongs to two organs that exclude each other."),
    "mask-not-binary": Code(_WARNING, "mask not yes or no", "A mask file holds other values than zero and one more."),
    "label-misplaced": Code(_WARNING, "label elsewhere", "The label fits its image far better mirrored or shifted."),
    "mask-in-air": Code(_WARNING, "mask in air", "Much of a mask of a solid organ lies in air."),
    "wrong-side": Code(_ERROR, "wrong body side", "Left and right are swapped in the label or the header."),
    "wrong-order": Code(_ERROR, "upside down", "Organs lie head to foot or front to back the wrong way round."),
    "body-turned": Code(_WARNING, "header turns the body", "Spine, table or lungs of a CT lie where they cannot."),
    "odd-place": Code(_WARNING, "organ out of place", "One organ lies on the wrong side of others: a transplant?"),
    "far-piece": Code(_WARNING, "far second piece", "An organ that is one piece has a second one far away."),
    "specks": Code(_WARNING, "many specks", "A mask consists of a great many pieces."),
    # the experiment
    "experiment-refused": Code(_ERROR, "training would refuse", "The folders are fine, the experiment file is not."),
    # over cases
    "duplicate-scan": Code(_WARNING, "scan twice", "Two cases hold the same voxels."),
    "duplicate-across-splits": Code(_ERROR, "scan in two splits", "The same voxels are trained on and tested on."),
    "same-label-twice": Code(_WARNING, "label twice", "Two different scans have the very same label."),
    "patient-across-splits": Code(_ERROR, "patient in two splits", "One patient is trained on and tested on."),
}  # fmt: skip

_FILE_UNREADABLE = (
    "no-dicom-series",
    "several-dicom-series",
    "slice-without-position",
    "several-multiframe-files",
    "slices-differ",
    "slices-not-parallel",
    "tilted-gantry",
    "slices-shifted",
    "uneven-slices",
    "multiframe-unclear",
    "no-voxels",
)
_FOLDER_UNREADABLE = (
    "case-named-twice",
    "several-scans-fit",
    "segmentation-without-scan",
    "label-names-unreadable",
    "labels-without-names",
    "contours-only",
    "dataset-json-unreadable",
    "table-unreadable",
    "row-unreadable",
)
FINDING_OF = {
    **dict.fromkeys(_FILE_UNREADABLE, "file-unreadable"),
    **dict.fromkeys(_FOLDER_UNREADABLE, "folder-unreadable"),
    "several-series-fit": "labels-unusable",
    "labels-in-several-places": "labels-unusable",
    "contours-off-slices": "grid-mismatch",
    "contours-skip-slices": "labels-unusable",
}
"""Reading errors with different codes that are one kind of finding for the user who fixes the folder."""


def finding(
    code: str, site: str, case: str, what: str, why: str = "", fix: str = "", file: object = "", structure: str = ""
) -> Finding:
    """A finding of a documented kind, with its severity."""
    return Finding(code, CODES[code].severity, site, case, what, why, fix, str(file), structure)
