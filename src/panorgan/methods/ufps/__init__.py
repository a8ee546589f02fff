"""UFPS and the modules that only it uses. Start with `method`, whose table maps the paper's equations to code."""

from panorgan.methods.ufps.method import MEAN, UFPS, VARIANCE
from panorgan.methods.ufps.settings import UFPSConfig

__all__ = ["MEAN", "UFPS", "VARIANCE", "UFPSConfig"]
