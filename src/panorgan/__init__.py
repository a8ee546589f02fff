"""panorgan — hospitals that each label different organs train one model that segments them all."""

__version__ = "0.1.0"
