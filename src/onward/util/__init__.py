"""Helpers for all layers: validation, files, processes and text input."""
