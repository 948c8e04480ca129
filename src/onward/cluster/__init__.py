"""Beyond one machine: replicas of a server behind an ingress that goes on elsewhere when one is lost.

What needs Ray is imported where it is used (extra `onward[cluster]`).
"""

from onward.cluster.retries import RetryOptions

__all__ = ["RetryOptions"]
