"""Models of transformers inside Onward: their own forward over our weights, attention, experts and caches.

transformers is an extra, and is imported when a model is first loaded through it.
"""

from onward.models.transformers.host import host
from onward.models.transformers.step import library

__all__ = ["host", "library"]
