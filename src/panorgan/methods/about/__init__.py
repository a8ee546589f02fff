"""Descriptions of methods: texts, settings, and what leaves a site."""
