"""Organs by name: what they are called, what they belong to, and the vocabulary a federation segments."""

from panorgan.anatomy.catalogue import Organ, ancestors, catalogue, children, find_organ
from panorgan.anatomy.vocabulary import Vocabulary

__all__ = ["Organ", "Vocabulary", "ancestors", "catalogue", "children", "find_organ"]
