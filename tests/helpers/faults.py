"""Every seeded fault: each damages a copy of a clean phantom folder in one known way, for the doctor to find."""

from __future__ import annotations

import faults_of_channels
import faults_of_content
import faults_of_folders
import faults_of_geometry
from fault_bench import FAULTS, SITE, Bench, Fault, load, save, write_clean_folder

__all__ = [
    "FAULTS",
    "SITE",
    "Bench",
    "Fault",
    "faults_of_channels",
    "faults_of_content",
    "faults_of_folders",
    "faults_of_geometry",
    "load",
    "save",
    "write_clean_folder",
]
