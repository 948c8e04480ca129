"""Conversions of a checkpoint into each peer's own format; each module is run in its peer's environment."""
