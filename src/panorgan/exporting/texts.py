"""What the files of an export say to people."""

from __future__ import annotations

from panorgan.workflows.model_bundle import Model

LICENCE = """\
The files in `scripts` are from panorgan, licensed under the Apache License, Version 2.0:
https://www.apache.org/licenses/LICENSE-2.0

The weights in `models` were trained by a federation of hospitals. Their licence is for these to choose; until they
state it here, no permission to use or to pass on the weights is given by this file. The licences of the training data,
as far as they are stated, are in `docs/README.md`.
"""


def bundle_readme(model: Model) -> str:
    """How to run a bundle."""
    files = "a folder of NIfTI files"
    if model.input_channels > 1:
        order = ", ".join(model.channels)
        files += (
            f" with the channels {order} in this order: one 4-D file for each scan, or `<case>_0000`, `<case>_0001`, …"
        )
        files += " on one grid"
    return f"""\
# {model.card["name"]}: a MONAI Bundle

Needs MONAI with `pytorch-ignite`, `nibabel`, `scipy` and `fire`; not panorgan. In this folder:

```sh
python -m monai.bundle run inference --config_file configs/inference.json --dataset_dir SCANS --output_dir LABELS
```

`SCANS` is {files}. For every scan there is `LABELS/<name>_seg.nii.gz` on the scan's own grid; the
integers are `label_classes` in `configs/metadata.json`. From another folder, add `--bundle_root` with the path of this
one. The network expects windows of the size in `configs/inference.json` and answers with probabilities.
"""
