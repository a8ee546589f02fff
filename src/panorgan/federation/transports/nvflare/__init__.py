"""NVFlare as panorgan's network engine: the only folder that knows it. `engine.py` implements the interface."""
