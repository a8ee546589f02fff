"""The adapter to NVFlare, the only place that knows it. NVFlare does connection, identity, TLS and job hand-over."""
