"""Deployment on several machines: replicas of a server behind an ingress that retries on another when one is lost.

Modules that need Ray are imported on first use (extra `onward[cluster]`).
"""

from typing import TYPE_CHECKING, Any

from onward.cluster.ingress import RetryOptions
from onward.cluster.options import DeployOptions

if TYPE_CHECKING:
    from onward.cluster.deployment import build_app

__all__ = ["DeployOptions", "RetryOptions", "build_app"]


def __getattr__(name: str) -> Any:
    if name != "build_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onward.cluster.deployment import build_app

    return build_app
