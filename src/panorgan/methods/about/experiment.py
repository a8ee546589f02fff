"""A method as an experiment file: that of its paper where there is one, or the method on generated hospitals."""

from __future__ import annotations

from importlib.resources import files

from panorgan.methods.about.metadata import describe
from panorgan.methods.about.words import as_yaml
from panorgan.methods.base import Method

_START = """# {title} on generated hospitals, with every setting of its own (`panorgan methods {name}` explains them).
#   panorgan train {name}.yaml
# With your own data, replace `phantom` by your sites; the small numbers of `network` and `training` suit two CPU cores.
name: {name}
vocabulary: [liver, spleen, kidney_left, kidney_right, pancreas, aorta, stomach]

phantom: {{}}

method:
  name: {name}
{settings}
plan: {{spacing_mm: [6, 6, 6], window_hu: [-160, 240]}}

network: {{features: [8, 16, 32, 64]{dimensions}}}

training:
  rounds: 50
  local_steps: 5
  validate_every: 10
  overlap: 0.25
  sampling: {{patch_size: {patch}, batch_size: 2}}
  optimizer: {{learning_rate: 0.02}}
"""


def experiment_text(method: type[Method]) -> str:
    """The file as text, with comments."""
    own = files("panorgan.methods.about") / "paper" / f"{method.name}.yaml"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    description = describe(method)
    settings = "".join(f"  {field.name}: {as_yaml(field.default)}\n" for field in description.own_fields)
    flat = method.recipe.get("network.dimensions") == 2
    return _START.format(
        name=description.name,
        title=description.title,
        settings=settings,
        dimensions=", dimensions: 2" if flat else "",
        patch=[40, 40, 1] if flat else [40, 40, 32],
    )
