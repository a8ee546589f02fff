"""One file is one published system: its config, what runs at a site, what runs at the server."""
