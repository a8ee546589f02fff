"""`panorgan export`: a delivered model for other people's software."""

from __future__ import annotations

import json
from pathlib import Path

from panorgan import export
from panorgan.cli.console import say

_NEXT = {
    "bundle": "In that folder: python -m monai.bundle run inference --config_file configs/inference.json "
    "--dataset_dir SCANS --output_dir LABELS",
    "onnx": "model.json next to model.onnx describes its input and output.",
    "nnunet": "nnUNetv2_predict_from_modelfolder -m {folder} -f 0 --disable_tta -i SCANS -o LABELS",
}


def export_model(run: Path, to: str, out: Path | None, as_json: bool) -> None:
    """Write it, and say how well it agrees with the model."""
    found = export(run, to, out)
    if as_json:
        say(json.dumps({"to": found.to, "folder": str(found.folder), "check": dict(found.check)}))
        return
    say(f"Written: {found.folder}")
    if found.check:
        say(
            f"Checked: probabilities differ by {found.check['max_difference']:.2g} at most; "
            f"{found.check['decided_otherwise']} of {found.check['voxels']} voxels get another label."
        )
    else:
        say("Not checked: panorgan cannot run it. See docs/export.md for differences in nnU-Net.")
    say(_NEXT[found.to].format(folder=found.folder))
