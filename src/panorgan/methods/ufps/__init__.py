"""UFPS: the method, and what only it uses. `method` is where to begin; it has the paper's equations in one table."""

from panorgan.methods.ufps.method import MEAN, UFPS, VARIANCE
from panorgan.methods.ufps.settings import UFPSConfig

__all__ = ["MEAN", "UFPS", "VARIANCE", "UFPSConfig"]
