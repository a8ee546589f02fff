"""Organs by name: what they are called, what they belong to, and the vocabulary a federation segments."""

from panorgan.anatomy.catalogue import Organ, ancestors, catalogue, children, find_organ
from panorgan.anatomy.own_organs import OwnOrgan, declare_finished, declare_organs
from panorgan.anatomy.vocabulary import Vocabulary

__all__ = [
    "Organ",
    "OwnOrgan",
    "Vocabulary",
    "ancestors",
    "catalogue",
    "children",
    "declare_finished",
    "declare_organs",
    "find_organ",
]
