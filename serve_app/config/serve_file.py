"""A Ray Serve config file: its applications and HTTP options."""

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from serve_app.config.app_config import AppConfig, PoolSection
from serve_app.config.base import POOL_OF_DEPLOYMENT, AtLeastOne, FieldError, PoolName, Section, fault_in_words
from serve_app.config.scaling import ServeAutoscalingSection

HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
"""The environment variable by which Ray Serve has HAProxy in the place of its own proxy: "1" = it has."""


class HttpOptions(Section):
    """Address on which Ray Serve's proxy listens."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port to listen on."""


class DeploymentOverride(Section):
    """The number of replicas of one deployment, where Ray Serve changes it without a restart."""

    name: Literal["PrefillServer", "DecodeServer", "MonolithServer"]
    """The deployment: `PrefillServer`, `DecodeServer` or `MonolithServer`."""
    num_replicas: AtLeastOne | None = None
    """Replicas, in place of the pool's `replicas`."""
    autoscaling_config: ServeAutoscalingSection | None = None
    """In place of the pool's `autoscaling`."""

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> Self:
        if (self.num_replicas is None) == (self.autoscaling_config is None):
            raise FieldError("num_replicas", "or autoscaling_config must be set, and not both.")
        return self

    @property
    def pool_name(self) -> PoolName:
        """The pool whose replicas the deployment's are."""
        return POOL_OF_DEPLOYMENT[self.name]


class Application(Section):
    """One Ray Serve application."""

    name: Annotated[str, Field(min_length=1)] = "truespec"
    """Name of the application in Ray Serve."""
    route_prefix: Annotated[str, Field(pattern=r"^/")] = "/"
    """Path under which it is served."""
    import_path: Literal["serve_app.app:build_app"] = "serve_app.app:build_app"
    """The application's builder."""
    args: AppConfig
    """The application's own settings."""
    deployments: list[DeploymentOverride] = []
    """Numbers of replicas; unlike a change of `args`, a change here restarts no replica."""

    @model_validator(mode="after")
    def _is_one_to_ray(self) -> Self:
        prefix = self.route_prefix
        if prefix != "/" and prefix.endswith("/"):
            raise FieldError("route_prefix", f"must not end with /; got {prefix!r}, so remove it.")
        if "{" in prefix or "}" in prefix:
            raise FieldError("route_prefix", f"must be a literal path, without {{ and }}; got {prefix!r}.")
        names = [override.name for override in self.deployments]
        for number, override in enumerate(self.deployments):
            if override.pool_name not in self.args.pool_names:
                raise FieldError(
                    f"deployments[{number}].name",
                    f"is {override.name}, but topology {self.args.topology} has no such pool; remove it.",
                )
            if names.count(override.name) > 1:
                raise FieldError(f"deployments[{number}].name", f"is {override.name} twice; merge them.")
            try:
                self._overridden(override)
            except ValidationError as error:
                fault = error.errors(include_url=False)[0]
                field, scaling = str(fault["loc"][-1]), override.autoscaling_config
                target = field.removeprefix("target_")
                if scaling and scaling.policy and target in scaling.policy.policy_kwargs["targets"]:
                    field = f"policy.policy_kwargs.targets.{target}"
                place = f"deployments[{number}].autoscaling_config.{field}"
                raise FieldError(place, fault_in_words(fault)) from error
        return self

    @property
    def effective_args(self) -> AppConfig:
        """`args`, with the numbers of replicas that `deployments` overrides."""
        pools: dict[str, PoolSection] = {
            override.pool_name: self._overridden(override) for override in self.deployments
        }
        return self.args.model_copy(update={"pools": self.args.pools.model_copy(update=pools)})

    def _overridden(self, override: DeploymentOverride) -> PoolSection:
        pool = self.args.pool(override.pool_name)
        kept = {name: getattr(pool, name) for name in pool.model_fields_set - {"replicas", "autoscaling"}}
        scale = (
            {"autoscaling": override.autoscaling_config.as_ours()}
            if override.autoscaling_config is not None
            else {"replicas": override.num_replicas}
        )
        return PoolSection.model_validate(kept | scale)


class ServeFile(Section):
    """The whole file: the part of Ray Serve's config schema that `truespec serve` honours."""

    proxy_location: Literal["Disabled", "HeadOnly", "EveryNode"] = "HeadOnly"
    """Nodes with an HTTP proxy."""
    http_options: HttpOptions = HttpOptions()
    """Address on which the proxies listen."""
    applications: Annotated[list[Application], Field(min_length=1, max_length=1)]
    """The application; one."""

    @property
    def application(self) -> Application:
        """The one application of the file."""
        return self.applications[0]

    def with_args(self, args: AppConfig) -> "ServeFile":
        """The file with other settings of the application."""
        return self.model_copy(update={"applications": [self.application.model_copy(update={"args": args})]})
