"""Procedurally generated abdominal CT: a federation of sites without a single patient."""

from panorgan.cases.phantom.case import PhantomCase, generate_case
from panorgan.cases.phantom.config import PhantomConfig, PhantomSite, default_sites, drawable
from panorgan.cases.phantom.write import site_folders, withheld_folder, write_federation

__all__ = [
    "PhantomCase",
    "PhantomConfig",
    "PhantomSite",
    "default_sites",
    "drawable",
    "generate_case",
    "site_folders",
    "withheld_folder",
    "write_federation",
]
