"""Replicas and their ingress as deployments of Ray Serve."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from onward.cluster.channels import ChanneledReplicas
from onward.cluster.deploy_options import DeployOptions
from onward.cluster.ingress import Ingress
from onward.cluster.ray_replicas import RayReplicas
from onward.cluster.repeats import Repeats
from onward.cluster.replica import Replica
from onward.cluster.retries import RetryOptions
from onward.server import Settings, log_to_stderr

REPLICA, INGRESS = "Replica", "Ingress"
# The most requests that an engine holds, waiting ones too: it says itself when it takes no more.
_ONGOING = 4096

# How soon Ray looks at what replicas report, and how long more of it has to last until there are more of them.
_SCALING = {
    "policy": {"policy_function": "onward.cluster.scaling:wanted_replicas"},
    "metrics_interval_s": 2.0,
    "look_back_period_s": 10.0,
    "upscale_delay_s": 10.0,
}


def ingress_of(handle: Any, options: DeployOptions) -> Ingress:
    """The ingress of replicas. handle: of theirs."""
    settings = Settings(**options.settings)
    return Ingress(
        ChanneledReplicas(RayReplicas(handle)),
        RetryOptions(**options.retries),
        settings.max_body,
        settings.max_requests,
        Repeats(settings.idempotency_seconds),
        settings.body_seconds,
        settings.access_log,
        settings.log_prompts,
    )


@serve.ingress()
class RayIngress:
    """An ingress as a deployment. handle: of the replicas."""

    def __init__(self, handle: Any, options: Mapping[str, Any]) -> None:
        log_to_stderr()
        self._ingress = ingress_of(handle, DeployOptions.of(options))

    def __serve_build_asgi_app__(self) -> Any:
        return self._ingress


def replicas_of(options: DeployOptions) -> Any:
    """The replicas as a Serve application without an ingress."""
    common: dict[str, Any] = {"name": REPLICA, "ray_actor_options": {"num_cpus": options.cpus}, **_life(options)}
    count: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        scaling = {"min_replicas": options.replicas, "max_replicas": options.max_replicas}
        count = {"autoscaling_config": scaling | _SCALING}
    router = RequestRouterConfig(
        request_router_class="onward.cluster.ray_router.PrefixRouter",
        request_router_kwargs={"affinity": options.affinity},
    )
    return serve.deployment(request_router_config=router, **common, **count)(Replica).bind(asdict(options))


def application(options: DeployOptions) -> Any:
    """The whole as a Serve application, behind Ray's own proxies: `ray.serve.run` runs it."""
    ingress = serve.deployment(name=INGRESS, ray_actor_options={"num_cpus": 0.1}, num_replicas=1, **_life(options))
    return ingress(RayIngress).bind(replicas_of(options), asdict(options))


def _life(options: DeployOptions) -> dict[str, Any]:
    return {
        "max_ongoing_requests": _ONGOING,
        "graceful_shutdown_timeout_s": Settings(**options.settings).drain,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
    }


def build_app(args: Mapping[str, Any]) -> Any:
    """For `serve run onward.cluster:build_app source=demo replicas=2`, and for `serve build` and `serve deploy`.

    Raises:
        RequestError: an unknown argument, or a value outside its range.
    """
    return application(DeployOptions.of(args))
