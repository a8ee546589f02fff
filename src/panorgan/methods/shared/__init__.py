"""Pieces that several methods are built from."""
