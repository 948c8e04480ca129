"""Small helpers for every layer: checks, files, processes and text input."""
