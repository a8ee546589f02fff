"""What a phantom federation consists of: its sites, their scanners and patients, and who labels what."""

from __future__ import annotations

from functools import cache
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from panorgan.anatomy import catalogue, children, find_organ
from panorgan.errors import AnatomyError, ConfigError, did_you_mean
from panorgan.phantom.tissue import Phase
from panorgan.settings import Settings

Kernel = Literal["soft", "standard", "sharp"]
Millimetres = tuple[float, float, float]

ORGANS: tuple[str, ...] = (
    "liver",
    "spleen",
    "kidney_left",
    "kidney_right",
    "pancreas",
    "gallbladder",
    "stomach",
    "duodenum",
    "aorta",
    "inferior_vena_cava",
    "portal_and_splenic_vein",
    "oesophagus",
    "colon",
    "lung_left",
    "lung_right",
)
"""Structures drawn in every patient; their masks never overlap."""

TUMOURS: tuple[str, ...] = ("liver_tumour", "kidney_tumour", "pancreas_tumour")
"""Lesions, drawn on request inside their organs."""

DEFAULT_ORGANS = ("liver", "spleen", "kidney_left", "kidney_right", "pancreas", "aorta", "stomach")


@cache
def drawable() -> dict[str, tuple[str, ...]]:
    """Every name the phantom can label, with the drawn structures it stands for (several for a union)."""
    single = {name: (name,) for name in (*ORGANS, *TUMOURS)}
    parts = {name: children(name, "part") for name in catalogue() if name not in single}
    return single | {name: found for name, found in parts.items() if found and set(found) <= set(ORGANS)}


def canonical_names(names: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The names as the anatomy spells them; refuses what cannot be drawn or cannot share one label map."""
    found = tuple(_canonical_name(name, where) for name in names)
    if len(set(found)) < len(found):
        raise ConfigError("An organ is listed twice.", code="organ-twice", where=where, fix="list it once")
    structures = [part for name in found for part in drawable()[name]]
    for name in found:
        shared = [part for part in drawable()[name] if structures.count(part) > 1 and part != name]
        if shared:
            raise ConfigError(
                f"{name!r} and its part {shared[0]!r} cannot share one label map.",
                code="union-with-part",
                where=where,
                fix=f"list either {name!r} or its parts",
            )
    return found


def _canonical_name(name: str, where: str) -> str:
    try:
        found = find_organ(name).name
    except AnatomyError:
        found = name
    if found not in drawable():
        raise ConfigError(
            f"The phantom cannot draw {name!r}.",
            code="not-drawable",
            where=where,
            why=did_you_mean(name, drawable()),
            fix="choose from: " + ", ".join(drawable()),
        )
    return found


class PhantomSite(Settings):
    """One hospital: its labels, its scanner and its patients."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    annotated: tuple[str, ...] = ()
    cases: int = Field(default=14, ge=1)
    external: bool = False
    joins_at: int | None = Field(default=None, ge=2)
    """First round, counted over the whole run, in which the site takes part; from the first when left out."""
    # the scanner
    phases: tuple[Phase, ...] = Field(default=("portal",), min_length=1)
    """Contrast phases in use; case i gets the i-th of them, in turn."""
    noise_hu: float = Field(default=12.0, ge=0)
    kernel: Kernel = "standard"
    spacing_mm: Millimetres = (4.5, 4.5, 5.0)
    """Voxel size from right to left, front to back and foot to head."""
    orientation: str = "LPS"
    """Directions in which the stored axes grow, as nibabel writes them."""
    field_of_view_mm: Millimetres | None = None
    """This site's own field of view; the federation's when left out."""
    round_view_mm: float | None = Field(default=None, gt=0)
    """Diameter of the reconstructed circle; voxels outside it hold padding."""
    offset_hu: float = 0.0
    table: bool = True
    # the patients
    size: float = Field(default=1.0, gt=0.6, lt=1.5)
    size_spread: float = Field(default=0.04, ge=0, le=0.1)
    fatness: float = Field(default=0.4, ge=0, le=1)
    fatness_spread: float = Field(default=0.15, ge=0, le=0.5)
    age: float = Field(default=58.0, ge=18, le=95)

    @field_validator("annotated")
    @classmethod
    def _canonical_names(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        return canonical_names(names, f"phantom site {info.data.get('name', '?')!r}, annotated")

    @model_validator(mode="after")
    def _check(self) -> PhantomSite:
        where = f"phantom site {self.name!r}"
        axes = {"L": 0, "R": 0, "P": 1, "A": 1, "S": 2, "I": 2}
        if len(self.orientation) != 3 or {axes.get(code, 3) for code in self.orientation} != {0, 1, 2}:
            raise ConfigError(
                f"{self.orientation!r} is not an orientation.",
                code="bad-orientation",
                where=where,
                fix="name one direction per axis, such as RAS, LPS or PIR",
            )
        if min(self.spacing_mm) <= 0 or min(self.field_of_view_mm or self.spacing_mm) <= 0:
            raise ConfigError(
                "Voxel size and field of view must be positive.",
                code="size-not-positive",
                where=where,
                fix="give millimetres above 0",
            )
        if not self.external and not self.annotated:
            raise ConfigError(
                "A training site labels no organ.",
                code="nothing-annotated",
                where=where,
                fix="list its organs under `annotated`, or mark the site `external: true`",
            )
        if self.external and self.joins_at is not None:
            raise ConfigError(
                "An external site never joins.",
                code="external-site-joins",
                where=where,
                fix="leave out `joins_at`, or `external: true`",
            )
        return self


DEFAULT_SITES: tuple[PhantomSite, ...] = (
    PhantomSite(
        name="north",
        annotated=("liver", "stomach"),
        phases=("portal", "native"),
        noise_hu=14,
        kernel="soft",
        spacing_mm=(4.5, 4.5, 5.0),
        orientation="RAS",
        size=1.03,
        fatness=0.5,
        age=62,
    ),
    PhantomSite(
        name="east",
        annotated=("spleen", "kidney_left", "kidney_right"),
        phases=("arterial", "portal"),
        noise_hu=21,
        kernel="sharp",
        spacing_mm=(4.2, 4.2, 4.5),
        orientation="LPS",
        round_view_mm=352,
        offset_hu=-3,
        size=0.97,
        fatness=0.3,
        age=52,
    ),
    PhantomSite(
        name="south",
        annotated=("pancreas", "aorta"),
        phases=("portal", "arterial"),
        noise_hu=18,
        kernel="standard",
        spacing_mm=(4.6, 4.6, 4.0),
        orientation="LAS",
        field_of_view_mm=(346, 300, 236),
        offset_hu=4,
        size=0.98,
        fatness=0.38,
        age=66,
    ),
    PhantomSite(
        name="island",
        cases=5,
        external=True,
        phases=("portal", "arterial", "native"),
        noise_hu=19,
        kernel="standard",
        spacing_mm=(4.4, 4.4, 5.0),
        orientation="RAS",
        round_view_mm=372,
        offset_hu=2,
        size=1.01,
        fatness=0.42,
        age=55,
    ),
)
"""Three training sites that share no organ, and an external one with another scanner."""


class PhantomConfig(Settings):
    """A federation of generated abdominal CT scans."""

    seed: int = Field(default=0, ge=0)
    organs: tuple[str, ...] = Field(default=DEFAULT_ORGANS, min_length=1)
    """The vocabulary; the withheld labels hold all of it."""
    sites: tuple[PhantomSite, ...] = Field(default=DEFAULT_SITES, min_length=1)
    field_of_view_mm: Millimetres = (364.0, 320.0, 240.0)
    """Extent of the scan from right to left, front to back and foot to head."""
    tumours: bool = False
    """Give every patient lesions in the liver, one kidney and the pancreas."""

    @field_validator("organs")
    @classmethod
    def _canonical_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return canonical_names(names, "phantom organs")

    @model_validator(mode="after")
    def _check(self) -> PhantomConfig:
        names = [site.name for site in self.sites]
        if len(set(names)) < len(names):
            raise ConfigError(
                "Two phantom sites have the same name.",
                code="site-name-twice",
                where=", ".join(sorted(names)),
                fix="name every site differently",
            )
        if min(self.field_of_view_mm) <= 0:
            raise ConfigError(
                "The field of view must be positive.",
                code="size-not-positive",
                where="phantom field_of_view_mm",
                fix="give millimetres above 0",
            )
        used = set(self.organs).union(*(site.annotated for site in self.sites))
        lesions = sorted(used & set(TUMOURS))
        if lesions and not self.tumours:
            raise ConfigError(
                f"{', '.join(lesions)} is to be labelled, but the phantoms have no tumours.",
                code="tumours-off",
                where="phantom tumours",
                fix="set `tumours: true` in the phantom section",
            )
        return self
