"""Architectures that run through transformers' own forward pass, with Onward's weights, attention and KV cache.

transformers is an optional extra, imported when a model is first loaded through it.
"""

from onward.models.transformers.host import host
from onward.models.transformers.linears import library

__all__ = ["host", "library"]
