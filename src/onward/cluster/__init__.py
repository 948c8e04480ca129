"""Beyond one machine: replicas of a server behind an ingress that goes on elsewhere when one is lost.

What needs Ray is imported where it is used (extra `onward[cluster]`).
"""

from typing import TYPE_CHECKING, Any

from onward.cluster.ingress import RetryOptions

if TYPE_CHECKING:
    from onward.cluster.deployment import build_app
    from onward.cluster.options import DeployOptions

__all__ = ["DeployOptions", "RetryOptions", "build_app"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onward.cluster import deployment
    from onward.cluster import options as deploy_options

    return getattr(deploy_options if name == "DeployOptions" else deployment, name)
