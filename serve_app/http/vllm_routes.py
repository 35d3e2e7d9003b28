"""The routes that vLLM's server has beside OpenAI's: evaluators, load generators and trainers ask there."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from serve_app.backends.base import PauseMode
from serve_app.cluster.desired_state import Outcome, WeightsRef
from serve_app.errors import UnsupportedParameter
from serve_app.http.access.request_gate import Gate
from serve_app.http.admin import WeightsService
from serve_app.http.body import read_order, read_wire
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.off_loop import off_loop
from serve_app.openai.tokens.tokenization import DetokenizeRequest, TokenizeRequest
from serve_app.openai.wire import Wire
from serve_app.versions import version_of
from speculative.errors import InvalidRequest, RequestTimeout

T = TypeVar("T", TokenizeRequest, DetokenizeRequest)

_PATH = Annotated[str, Field(min_length=1)]
_NO_NCCL = (
    "tensors are not taken over NCCL; save the checkpoint where every replica can read it and send its folder as "
    "update_info.path, or push tensors through Ray with deploy.rl.push_weights."
)


class InitTransfer(Wire):
    """POST /init_weight_transfer_engine. Weights come as folders, so there is nothing to set up."""

    init_info: dict[str, Any] = Field(default_factory=dict)
    """Empty, or `backend: folder`. A process group of NCCL is refused."""

    def check_together(self) -> None:
        """Refuse what would wait for a trainer's process group. Raises UnsupportedParameter: `init_info` names one."""
        backend = self.init_info.get("backend")
        other = next((name for name in self.init_info if name != "backend"), None)
        if other is not None or backend not in (None, "folder"):
            name = f"init_info.{other or 'backend'}"[:100]
            raise UnsupportedParameter(name, f"{name}: {_NO_NCCL}")


class StartUpdate(Wire):
    """POST /start_weight_update."""

    is_checkpoint_format: bool | None = None
    """Only `true` is served."""

    def check_together(self) -> None:
        """Refuse weights in an engine's own layout. Raises UnsupportedParameter: they are not to come as a
        checkpoint."""
        if self.is_checkpoint_format is False:
            raise UnsupportedParameter(
                "is_checkpoint_format", "is_checkpoint_format: weights are read as a checkpoint; send true."
            )


class UpdateInfo(Wire):
    """The place of new weights; the other fields are those of vLLM's NCCL transfer, which is refused."""

    path: _PATH | None = None
    """A checkpoint that every replica can read."""
    drafter_path: _PATH | None = None
    """The drafter's checkpoint."""
    names: list[Any] | None = None
    """Refused: tensors are not taken over NCCL."""
    dtype_names: list[Any] | None = None
    """Refused, like `names`."""
    shapes: list[Any] | None = None
    """Refused, like `names`."""
    packed: bool | None = None
    """Refused, like `names`."""


class UpdateOrder(Wire):
    """POST /update_weights, as vLLM has it (`update_info`) or as prime-rl has it (`weight_dir`)."""

    update_info: UpdateInfo | None = None
    """`path` of the checkpoint and `drafter_path`, which every replica can read."""
    weight_dir: _PATH | None = None
    """prime-rl's form: the checkpoint, served at once."""

    def check_together(self) -> None:
        """Check fields against each other.

        Raises:
            UnsupportedParameter: tensors are announced.
            InvalidRequest: there is no folder, or there are two.
        """
        info = self.update_info or UpdateInfo()
        if info.names is not None or info.shapes is not None:
            raise UnsupportedParameter("update_info.names", f"update_info.names: {_NO_NCCL}")
        if (info.path is None) == (self.weight_dir is None):
            raise InvalidRequest(
                "update_info.path", "Send the folder of the weights as update_info.path or weight_dir."
            )

    @property
    def ref(self) -> WeightsRef:
        """The weights that are named, without a version; the coordinator numbers them."""
        info = self.update_info or UpdateInfo()
        return WeightsRef(0, "", info.path or self.weight_dir, info.drafter_path)


class FinishUpdate(Wire):
    """POST /finish_weight_update."""

    weight_version: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/+=-]{1,128}$")] | None = None
    """The weights' name. Default: `update-1` and so on."""


@dataclass(frozen=True, slots=True)
class VllmRoutes:
    """The objects that the routes answer from."""

    settings: dict[str, Any]  # those of the engine that clients of vLLM read, by vLLM's names
    weights: WeightsService  # of the service


def add_vllm_routes(app: FastAPI, front_end: FrontEnd, gate: Gate, routes: VllmRoutes | None) -> None:
    """Add the routes; without `routes` those that need no replica but this."""
    _add_tokenization(app, front_end, gate)

    @app.get("/version")
    async def show_version() -> Response:
        return JSONResponse({"version": version_of("truespec")})

    if routes is not None:
        _add_weight_transfer(app, routes)


def _add_tokenization(app: FastAPI, front_end: FrontEnd, gate: Gate) -> None:
    async def answer(request: Request, kind: type[T], work: Callable[[T], dict[str, Any]]) -> Response:
        with gate.place(request.state.caller):  # a body may hold as much work as one that asks for tokens
            wire = await read_wire(request, kind, front_end.limits.max_body_bytes)
            if wire.model is not None:
                front_end.model(wire.model)
            return await off_loop(wire, lambda: JSONResponse(work(wire)))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await answer(request, TokenizeRequest, front_end.tokenization.tokenize)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await answer(request, DetokenizeRequest, front_end.tokenization.detokenize)

    @app.get("/tokenizer_info")
    async def show_tokenizer() -> Response:
        return JSONResponse(front_end.tokenization.info())


def _add_weight_transfer(app: FastAPI, routes: VllmRoutes) -> None:
    weights = routes.weights

    @app.get("/server_info")
    async def show_server(config_format: Literal["text", "json"] = "text") -> Response:
        config = routes.settings if config_format == "json" else json.dumps(routes.settings)
        return JSONResponse({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    @app.get("/get_world_size")
    async def show_world_size() -> Response:
        return JSONResponse({"world_size": len(await weights.statuses())})

    @app.post("/init_weight_transfer_engine")
    async def begin(request: Request) -> Response:
        await read_order(request, InitTransfer)
        return JSONResponse({"message": "Weight transfer initialized"})

    @app.post("/start_weight_update")
    async def start(request: Request) -> Response:
        await read_order(request, StartUpdate)
        await weights.stage(None)
        return JSONResponse({"message": "Weight update started"})

    @app.post("/update_weights")
    async def update(request: Request) -> Response:
        wire = await read_order(request, UpdateOrder)
        if wire.weight_dir is None:
            await weights.stage(wire.ref)
        else:  # prime-rl sends nothing to finish it
            await _complete(weights.update(wire.ref), "updated")
        return JSONResponse({"message": "Weights updated"})

    @app.post("/finish_weight_update")
    async def finish(request: Request) -> Response:
        wire = await read_order(request, FinishUpdate)
        await _complete(weights.finish(wire.weight_version or ""), "updated")
        return JSONResponse({"message": "Weight update finished"})

    @app.get("/weight_info")
    async def show_version() -> Response:
        versions = sorted({one["weight_version"] for one in await weights.statuses()})
        return JSONResponse({"weight_version": versions[0] if len(versions) == 1 else None})

    @app.post("/reset_prefix_cache")
    async def reset_cache() -> Response:
        return JSONResponse({"success": (await weights.reset_caches()).complete})

    @app.post("/pause")
    async def pause(mode: PauseMode = PauseMode.ABORT, clear_cache: bool = True) -> Response:
        await _complete(weights.pause(mode), "paused")
        if clear_cache:
            await _complete(weights.reset_caches(), "emptied")
        return JSONResponse({"status": "paused"})

    @app.post("/resume")
    async def resume() -> Response:
        await _complete(weights.resume(), "resumed")
        return JSONResponse({"status": "resumed"})

    @app.get("/is_paused")
    async def show_pause() -> Response:
        statuses = await weights.statuses()
        return JSONResponse({"is_paused": bool(statuses) and all(one["paused"] for one in statuses)})


async def _complete(work: Awaitable[Outcome], done: str) -> None:
    """Wait for what every replica is to do. Raises RequestTimeout: not every replica has done it in time."""
    outcome = await work
    if not outcome.complete:
        raise RequestTimeout(
            f"Not every replica is {done} yet; they continue. GET /admin/weights shows where each stands."
        )
