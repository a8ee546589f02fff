"""Procedurally generated abdominal CT: a federation of sites without a single patient."""

from panorgan.phantom.case import PhantomCase, generate_case
from panorgan.phantom.config import DEFAULT_SITES, PhantomConfig, PhantomSite, drawable
from panorgan.phantom.write import recipe, site_folders, withheld_folder, write_federation

__all__ = [
    "DEFAULT_SITES",
    "PhantomCase",
    "PhantomConfig",
    "PhantomSite",
    "drawable",
    "generate_case",
    "recipe",
    "site_folders",
    "withheld_folder",
    "write_federation",
]
