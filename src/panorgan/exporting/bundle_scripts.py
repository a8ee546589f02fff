"""The folder `scripts` of a bundle: the modules of panorgan that prepare and decide, made to stand alone.

They are copied as they are, but for their imports, so that a bundle cannot drift from panorgan.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import panorgan
from panorgan.anatomy import Vocabulary, ancestors, catalogue, children
from panorgan.evaluation import postprocess
from panorgan.exporting import bundle_stand_ins, bundle_transforms
from panorgan.preparation import preprocess

_FILES: dict[str, ModuleType] = {
    "transforms": bundle_transforms,
    "preprocess": preprocess,
    "postprocess": postprocess,
    "stand_ins": bundle_stand_ins,
}
_NEW_PLACES = {
    "panorgan.preparation.preprocess": ".preprocess",
    "panorgan.evaluation.postprocess": ".postprocess",
    "panorgan.data.volume": ".stand_ins",
    "panorgan.preparation.plan": ".stand_ins",
    "panorgan.anatomy": ".stand_ins",
    "panorgan.errors": ".stand_ins",
}
_IMPORT = re.compile(r"^from (panorgan[.\w]*) import", flags=re.MULTILINE)


def write_scripts(folder: Path, vocabulary: Vocabulary) -> None:
    """Write the package `scripts`, and the facts about the model's organs that cleaning needs."""
    folder.mkdir(parents=True)
    first = (
        f'"""From panorgan {panorgan.__version__} (Apache-2.0), with other imports: the bundle needs no panorgan."""\n'
    )
    (folder / "__init__.py").write_text(first, encoding="utf-8")
    for name, module in _FILES.items():
        (folder / f"{name}.py").write_text(standing_alone(inspect.getsource(module)), encoding="utf-8")
    facts = ("name", "kind", "relation", "parent", "side", "one_piece")
    organs = [
        {fact: getattr(organ, fact) for fact in facts}
        for organ in catalogue().values()
        if organ.name in _relatives(vocabulary)
    ]
    text = json.dumps(organs, indent=1)
    (folder / bundle_stand_ins.ORGANS_FILE).write_text(text, encoding="utf-8")


def standing_alone(source: str) -> str:
    """The source of a module whose imports of panorgan lead to the files next to it."""
    return _IMPORT.sub(lambda found: f"from {_NEW_PLACES[found[1]]} import", source)


def _relatives(organs: Iterable[str]) -> set[str]:
    """The organs, what contains them, and the parts and contents of both."""
    family = {name for organ in organs for name in (organ, *ancestors(organ))}
    return family | {child for name in family for child in children(name)}
