"""A CUDA device without a GPU: tensors that say `cuda:0`, hold CPU memory, and keep the rules of a CUDA device.

- A device tensor and a host tensor with dimensions may not meet in an operation.
- What makes the host wait for the device is counted, by place; while a graph is captured it raises.
- `torch.cuda.graph` records the operations of the Python that runs under it, once. A replay executes them again on the
  same memory. Whatever another graph of its pool may have written over is garbage by then: a graph's temporaries
  always, its results once an earlier graph was replayed.
- Triton's launchers run as they are, up to the launch: a kernel takes tensors of the device, and launching it makes the
  host wait for nothing. The numbers are plain torch's, of one opaque operation. Where Triton does not interpret, a
  launch goes on to `JITFunction.run`, which `launches_compiled` has compile the kernel.
- A buffer that is copied to or from without blocking is the host's again when an event behind its copy was waited for.
  Until then what comes from the device is garbage, pinned or not, and what goes there may not change.
- A stream works only once it has waited for what other streams were given before. Copies of another stream than the
  default one, and what it was given behind the first, are made as late as they may be: when somebody waits for them, or
  has asked for their event before. Nobody has to wait for those who does not need them.
- Where it has a limit of memory, all tensors outside of graphs count, and none may go before a late copy of it.

It does not see numerics or 32-bit offsets.
"""

import itertools
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from speculative.config import LogprobsMode
from speculative.gpu import memory
from speculative.gpu.capture import side_stream
from speculative.gpu.graph_step import GraphStep
from speculative.gpu.operators import CapturedVocabularyOps, GraphOperators
from speculative.gpu.packed_attention import PackedRows, sending_packed
from speculative.gpu.paged_attention import AttendPaged, AttentionSizes, PagedRows
from speculative.gpu.row_drafts import DraftBuffers
from speculative.gpu.row_edits import EditFields
from speculative.gpu.row_judge import Layout, RowFields, RowJudge, SampledFrom
from speculative.kernels.chosen import ChosenKernels
from speculative.model.attention import CacheAttention
from speculative.model.config import PLAIN, ScoreRule
from speculative.model.fp8 import Rows, ScaledRows, quantize_rows
from speculative.model.layers import Attend, Attention, LayerOps, RMSNorm, Rotation
from speculative.model.rotary import Rotary, rotate
from speculative.sampling.draft_probs import columns_of
from speculative.step.vocabulary_ops import VocabularyOps
from tests.support.torch_operators import TorchAttend, TorchDrafts, TorchJudge, attend_packed, torch_edit, torch_floors

DEVICE = torch.device("cuda:0")
GARBAGE_ID = 2**40 + 7
_PROPERTIES = SimpleNamespace(name="a pretended device", major=9, minor=0, total_memory=2**40)

_WAITS = {
    *("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "is_nonzero"),
    *("nonzero", "masked_select", "equal", "allclose", "unique", "bincount"),
}
_OF_THE_SHAPE = {
    *("size", "dim", "stride", "is_contiguous", "storage_offset", "numel", "element_size", "__len__"),
    *("is_floating_point", "is_complex", "data_ptr", "untyped_storage", "ndimension", "nelement"),
}
_FACTORIES = (torch.zeros, torch.ones, torch.full, torch.arange, torch.empty, torch.eye)
_VIEWS = {
    *("view", "select", "slice", "unsqueeze", "squeeze", "expand", "transpose", "permute", "split", "unbind", "t"),
    *("split_with_sizes", "alias", "detach", "as_strided", "_unsafe_view", "lift_fresh", "diagonal", "_reshape_alias"),
    *("empty", "empty_like", "new_empty", "empty_strided", "unfold", "view_as", "reshape", "narrow", "unflatten"),
    *("flatten", "movedim", "_local_scalar_dense", "is_same_size", "contiguous", "chunk", "T", "numpy_T"),
}
_FUSED_ON_A_GPU = {"rms_norm"}
_FILLED_EARLY = "a host buffer was filled again before its copy was done"


class DeviceTensor(Tensor):
    """Says it lies on `DEVICE`; `held` is the CPU tensor with its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "DeviceTensor":
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=DEVICE,
        )  # fmt: skip

    def __init__(self, held: Tensor) -> None:
        self.held = held
        current = PretendedCuda.current
        if current is not None and current.capturing is not None:
            current.capturing.made.append((weakref.ref(self), held))
        elif current is not None and current.memory is not None:
            current.take(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was not caught")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert PretendedCuda.current is not None, "a device tensor outlived its device"
        return PretendedCuda.current.call(func, args, kwargs or {})


class _Recording:
    """What `torch.cuda.CUDAGraph` is here: operations, and the tensors that they write."""

    def __init__(self, device: "PretendedCuda") -> None:
        self._device = device
        self.number = 0
        self.pool: Any = None
        self.num_nodes = 0
        self.operations: list[tuple[Callable[..., Any], Any, Any, list[tuple[Tensor, bool]]]] = []
        self.made: list[tuple[weakref.ref[DeviceTensor], Tensor]] = []
        self.temporaries: list[Tensor] = []
        self.results: list[Tensor] = []
        self.own = dict[int, int]()  # bytes of what it allocated, by storage
        self.most_bytes = 0  # of it at once

    def hold(self, outputs: list[tuple[Tensor, bool]]) -> None:
        """Count what an operation has just allocated beside what is still in use."""
        new = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor, is_given in outputs if not is_given}
        self.own |= new
        self.made = [(wrapper, held) for wrapper, held in self.made if wrapper() is not None]
        used = {_storage(held) for _, held in self.made} | new.keys()
        self.most_bytes = max(self.most_bytes, sum(self.own.get(storage, 0) for storage in used))

    def end(self) -> None:
        """What somebody still holds is a result; the memory of the rest is the pool's again. Nothing has run yet."""
        alive = {_storage(held) for wrapper, held in self.made if wrapper() is not None}
        own = {_storage(t): t for *_, outputs in self.operations for t, is_given in outputs if not is_given}
        self.results = [tensor for storage, tensor in own.items() if storage in alive]
        self.temporaries = [tensor for storage, tensor in own.items() if storage not in alive]
        self.made = []
        _spoil(self.results + self.temporaries)

    def replay(self) -> None:
        device = self._device
        device.num_replays += 1
        device.go_on()
        assert device.capturing is None, "a graph is replayed while another is captured"
        device.order()
        for other in device.graphs[self.number :]:
            if other.pool == self.pool:
                _spoil(other.results)
        with torch._C.DisableTorchFunction():
            for func, args, kwargs, outputs in self.operations:
                for (tensor, is_given), computed in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                    if not is_given and tensor is not computed:
                        tensor.copy_(computed)
        _spoil(self.temporaries)


class _CountLaunches(TorchDispatchMode):
    """Counts what a GPU would launch: operations that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.split("::")[1], kwargs or {}
        if name not in _FUSED_ON_A_GPU:
            with self:  # inference mode hands composites on in one piece
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        only_views = not name.endswith("_") and all(_storage(tensor) in given for tensor in _tensors(out))
        self.count += not (name in _VIEWS or only_views)
        return out


class PretendedCuda(TorchFunctionMode):
    """The device, while it is entered.

    waits: (what made the host wait, where) -> how often. num_replays: of graphs.
    num_copied: values that came to the host, while it waited.
    num_dry: how often the host has waited for all that the device was given; dry_s: its own time from there to the next
    graph, in which a GPU would stand still.
    num_launches: outside of graphs, while `counts_launches`; so are the nodes of graphs.
    num_beside: copies, and what is behind them, of other streams than the default one.
    graphs: in the order of their captures; when they are first needed, and all that the product captures before the
    first request only if `capture_beforehand`, which takes a second or two.
    memory: bytes that it has; None = as many as anybody asks for. taken: of tensors that are alive.
    """

    current: "PretendedCuda | None" = None

    def __init__(
        self, *, count_launches: bool = False, capture_beforehand: bool = False, memory: int | None = None
    ) -> None:
        super().__init__()
        self.memory, self.taken = memory, 0
        self._holders: Counter[int] = Counter()  # tensors of each storage
        self._captures_beforehand = capture_beforehand
        self.counts_launches = count_launches
        self.graphs: list[_Recording] = []
        self.capturing: _Recording | None = None
        self.streams = [_Stream()]  # the default one, and all that were made
        self.stream = self.streams[0]
        self._pinned: dict[int, Tensor] = {}
        self._pools = itertools.count(1)
        self.downloads: list[tuple[Tensor, Tensor]] = []  # on their way to the host, where garbage is until then
        self.uploads: dict[int, tuple[Tensor, Tensor]] = {}  # from pinned memory, by address: it, and what was sent
        self._sent_once: list[tuple[Tensor, Tensor]] = []  # from pinned memory to a new tensor
        self.workers = list[Worker]()  # threads beside engines
        self._in_launcher = False
        self._patches = ExitStack()
        self.clear()

    def clear(self) -> None:
        """Count from here on."""
        self.waits: Counter[tuple[str, str]] = Counter()
        self.num_launches = 0
        self.num_replays = 0
        self.num_copied = 0
        self.num_beside = 0
        self.num_dry, self.dry_s = 0, 0.0
        self._dry_since: float | None = None

    def run_dry(self) -> None:
        """The host has waited for all that the device was given."""
        if self._dry_since is None:
            self.num_dry += 1
            self._dry_since = time.thread_time()

    def go_on(self) -> None:
        """A graph is launched."""
        if self._dry_since is not None:
            self.dry_s += time.thread_time() - self._dry_since
            self._dry_since = None

    def __enter__(self) -> "PretendedCuda":
        PretendedCuda.current = self
        if not self._captures_beforehand:
            self._patches.enter_context(mock.patch.object(GraphStep, "capture_all"))
        for name, value in self._stand_ins().items():
            self._patches.enter_context(mock.patch(name, value))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()
        PretendedCuda.current = None
        side_stream.cache_clear()
        memory._claims.clear()

    def _stand_ins(self) -> dict[str, Any]:
        def make_stream(device: int) -> _Stream:
            del device
            self.streams.append(_Stream())
            return self.streams[-1]

        @contextmanager
        def use_stream(stream: _Stream) -> Iterator[None]:
            self.stream, before = stream, self.stream
            try:
                yield
            finally:
                self.stream = before

        def current_stream(device: Any = None) -> Any:
            return SimpleNamespace(stream=self.stream, wait_stream=self.stream.wait_stream, device=device)

        return {
            "torch.cuda.is_available": lambda: True,
            "torch.cuda.mem_get_info": lambda *_: ((self.memory or 2**40) - self.taken, self.memory or 2**40),
            "torch.cuda.host_memory_stats": Counter,
            "speculative.gpu.memory._STEADY_S": 0,
            "torch.cuda.memory_reserved": lambda *_: 0,
            "torch.cuda.memory_allocated": lambda *_: 0,
            "torch.cuda.empty_cache": lambda: None,
            "torch.cuda.Event": lambda **_: _Event(self),
            "torch.cuda.Stream": make_stream,
            "torch.cuda.current_stream": current_stream,
            "torch.cuda.stream": use_stream,
            "torch.cuda.current_device": lambda: 0,
            "torch.cuda.set_device": lambda device: None,
            "torch.cuda.get_device_capability": lambda *_: (9, 0),
            "torch.cuda.get_device_properties": lambda *_: _PROPERTIES,
            "torch.cuda.device": nullcontext,
            "torch.cuda.synchronize": self._synchronize,
            "speculative.gpu.handoff_copies.ThreadPoolExecutor": self._make_worker,
            "torch.cuda.graph_pool_handle": lambda: (0, next(self._pools)),
            "torch.cuda.CUDAGraph": lambda: _Recording(self),
            "torch.cuda.graph": self._capture,
            "speculative.gpu.operators.GraphOperators.on": lambda *_: self._operators(),
        } | self._launches()

    def _launches(self) -> dict[str, Any]:
        """In the place of those of Triton, which has kernels of two types."""
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        compile_kernel = JITFunction.run

        def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            del warmup
            self._check_launch(kernel, args, options)
            self.num_launches += 1
            if isinstance(kernel, JITFunction):
                with torch._C.DisableTorchFunction():
                    compile_kernel(kernel, *_held(list(args)), grid=grid, warmup=True, **options)

        return {f"{one.__module__}.{one.__name__}.run": launch for one in (InterpretedFunction, JITFunction)}

    def _check_launch(self, kernel: Any, args: Any, options: Any) -> None:
        name, constants = kernel.fn.__name__, {key: one for key, one in options.items() if key in kernel.arg_names}
        given = dict(zip(kernel.arg_names, args, strict=False)) | constants
        assert given.keys() == set(kernel.arg_names), f"{name} was launched without all of its arguments, or with more"
        tensors = {key: one for key, one in given.items() if isinstance(one, Tensor)}
        assert all(isinstance(one, DeviceTensor) for one in tensors.values()), f"{name} was given a host tensor"
        if not any("stride" in key for key in given):
            scattered = [key for key, one in tensors.items() if not one.is_contiguous()]
            assert not scattered, f"{name} knows no strides, and was given {scattered} with some"
        num_warps = options.get("num_warps", 4)
        assert num_warps in (1, 2, 4, 8, 16, 32), f"{name} has {num_warps} warps, no power of 2 up to 32"

    def kernels(self, launch: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        """Run a launcher, and return what `function` computes from the same arguments."""
        self._in_launcher = True
        try:
            launch(*args)
        finally:
            self._in_launcher = False
        return self._opaque(function, *args)

    def _operators(self) -> GraphOperators:
        """Triton's launchers, with torch's numbers."""
        from speculative.gpu.triton_filters import triton_floors

        of_triton = GraphOperators.by_triton(ChosenKernels())
        return GraphOperators(
            attend=lambda sizes: _PagedAttention(self, sizes, of_triton.attend(sizes)),
            attend_packed=self._attend_packed,
            prepare=lambda block_size, first: sending_packed(block_size, first, self._attend_packed),
            layers=_LayerOps(self),
            edit=self._edit_logits,
            vocabulary=CapturedVocabularyOps(partial(self.kernels, triton_floors, torch_floors)),
            sample_drafts=self._sample_drafts,
            judge=lambda mode: _RowJudge(self, mode, of_triton.judge(mode)),
        )

    def _attend_packed(
        self, query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scores: ScoreRule = PLAIN
    ) -> Tensor:
        from speculative.gpu.triton_prompts import triton_attend_packed

        assert rows.blocks.dtype == rows.spans.dtype == torch.int32
        assert rows.spans.is_contiguous() and keys.stride() == values.stride()

        given = (query, keys, values, rows, scores)
        return self.kernels(triton_attend_packed, attend_packed, *given)  # type: ignore[no-any-return]

    def _sample_drafts(self, *given: Any) -> None:
        from speculative.gpu.triton_drafts import triton_drafts

        logits, fields, offset, _, _, drafts = given
        assert all(tensor.is_contiguous() for tensor in (*fields, *drafts))
        assert fields.uniforms.shape == fields.noise_positions.shape == (len(fields.uniforms), len(logits))
        dtypes = dict.fromkeys(("top_k", "seeds", "noise_positions"), torch.int64) | {"uniforms": torch.float64}
        dtypes |= dict.fromkeys(("greedy", "coupled"), torch.bool)
        for name, tensor in fields._asdict().items():
            assert tensor.dtype == dtypes.get(name, torch.float32), name
        assert drafts.probs.dtype == torch.float32 and drafts.mass_before.dtype == torch.float64
        assert drafts.tokens.dtype == drafts.columns.dtype == torch.int64 and offset < len(fields.uniforms)

        def write(*given: Any) -> DraftBuffers:
            TorchDrafts(CapturedVocabularyOps(torch_floors))(*given)
            return given[-1]  # type: ignore[no-any-return]

        self.kernels(triton_drafts, write, *given)

    def _edit_logits(self, logits: Tensor, rows: RowFields, edits: EditFields, max_drafts: int) -> Tensor:
        from speculative.gpu.triton_edits import triton_edit

        assert all(tensor.is_contiguous() for tensor in (*rows, *edits))

        return self.kernels(triton_edit, torch_edit, logits, rows, edits, max_drafts)  # type: ignore[no-any-return]

    @property
    def pool_bytes(self) -> dict[Any, int]:
        """Most of the device's memory that graphs have held, by pool: results of those before, and all of one."""
        results, most = Counter[Any](), Counter[Any]()
        for graph in self.graphs:
            most[graph.pool] = max(most[graph.pool], results[graph.pool] + graph.most_bytes)
            results[graph.pool] += sum(graph.own[storage] for storage in set(map(_storage, graph.results)))
        return most

    @contextmanager
    def _capture(self, graph: _Recording, pool: Any = None, **_: Any) -> Iterator[None]:
        assert self.capturing is None, "one capture at a time"
        graph.pool = pool or (0, next(self._pools))  # as torch does
        for stream in self.streams:  # torch waits for all of them
            self.stream.wait_stream(stream)
        self.capturing, before = graph, self.num_launches
        try:
            yield
        finally:
            self.capturing = None
        graph.num_nodes, self.num_launches = self.num_launches - before, before
        self.graphs.append(graph)
        graph.number = len(self.graphs)
        graph.end()

    # -- operations ---------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(issubclass(one, DeviceTensor) for one in types):
            return self.call(func, args, kwargs)
        pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device") if func.__name__ != "to" else _device_and_dtype(args, kwargs)[0]
        if device is not None and torch.device(device).type == "cuda":
            return self._make(func, args, kwargs)
        out = func(*args, **kwargs)
        if pinned:
            self._pinned[out.data_ptr()] = out
        return out

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor on the device, from nothing or from the host."""
        if func.__name__ == "to":
            is_async = kwargs.get("non_blocking", False) and args[0].data_ptr() in self._pinned
            if not is_async:
                self._wait("upload from pageable memory")
            else:
                self._sent_once.append((args[0], args[0].clone()))
            _, dtype = _device_and_dtype(args, kwargs)
            return DeviceTensor(args[0].to(dtype or args[0].dtype, copy=True))
        if func in (torch.tensor, torch.as_tensor):
            self._wait("upload of a host constant")
        elif func not in _FACTORIES and not func.__name__.endswith("_like"):
            raise NotImplementedError(f"{func} on {DEVICE}")
        return self._run(func, args, kwargs | {"device": "cpu"})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ATTRIBUTES:
                return _ATTRIBUTES[name](func, args)
            if name in _OF_THE_SHAPE:
                return func(args[0].held, *args[1:], **kwargs)
            if name in ("to", "cuda", "type_as"):
                return self._move(args, kwargs)
            if name in ("__getitem__", "__setitem__"):
                self._check_index(name, args)
            elif name == "copy_":
                self._check_copy(args, kwargs)
            elif name == "_scaled_mm":
                _check_fp8_product(*map(_held, args), **kwargs)
            else:
                self._check_devices(name, args, kwargs)
            stays = name == "copy_" and all(isinstance(tensor, DeviceTensor) for tensor in args[:2])
            if name in ("cpu", "copy_") and not stays:
                return self._copy(name, args, kwargs)
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        held_args, held_kwargs = _held(list(args)), _held(kwargs)
        name = func.__name__
        if self.stream.lags and ("out" in kwargs or (name.endswith("_") and not name.endswith("__"))):
            self.num_launches += self.counts_launches
            self._do_late(lambda: func(*held_args, **held_kwargs), *_tensors((args, kwargs)))
            return kwargs.get("out", args[0])
        counter = _CountLaunches() if self.counts_launches else None
        with counter or nullcontext():
            out = func(*held_args, **held_kwargs)
        self._record(func, held_args, held_kwargs, out, counter.count if counter else 0)
        if out is None or not isinstance(out, Tensor | tuple | list) or func.__name__ == "tolist":
            return out
        for given in _tensors((args, kwargs)):
            if isinstance(given, DeviceTensor) and given.held is out:
                return given  # in place, or nothing to do
        return _on_device(out)

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, launches: int) -> None:
        self.order()
        self.num_launches += launches
        if self.capturing is None:
            return
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        outputs = [(tensor, _storage(tensor) in given) for tensor in _tensors(out)]
        self.capturing.hold(outputs)
        if not self._in_launcher:
            self.capturing.operations.append((func, args, kwargs, outputs))

    def _copy(self, name: str, args: Any, kwargs: Any) -> Tensor:
        self.order()
        if name == "cpu":
            self.num_copied += args[0].numel()
            return args[0].held.clone()  # type: ignore[no-any-return]
        host = args[1] if isinstance(args[0], DeviceTensor) else args[0]
        if self.stream is not self.streams[0] and self._is_async(host, kwargs):
            return self._copy_late(*args[:2])
        if not isinstance(args[0], DeviceTensor) and kwargs.get("non_blocking", False):
            return self._download(args[0], args[1].held.clone())
        _held(args[0]).copy_(_held(args[1]))
        if isinstance(args[0], DeviceTensor) and self._is_async(args[1], kwargs):
            host = args[1].data_ptr()
            assert host not in self.uploads, "a host buffer is sent again, and nobody waited for its last copy"
            self.uploads[host] = (args[1], args[1].clone())
        return args[0]  # type: ignore[no-any-return]

    def _copy_late(self, to: Tensor, source: Tensor) -> Tensor:
        self.stream.lags = True
        if isinstance(source, DeviceTensor):
            _spoil([to])
            held = source.held
            self._do_late(lambda: self.downloads.append((to, held.clone())) or self.downloads[-1], source)
            return to
        held, sent = _held(to), source.clone()

        def upload() -> None:
            assert torch.equal(source, sent), _FILLED_EARLY
            held.copy_(sent)

        self._do_late(upload, to)
        return to

    def _do_late(self, work: Callable[[], Any], *given: Any) -> None:
        self.order()
        self.num_beside += 1
        given = given if self.memory is not None else ()
        places = [_storage(one.held) for one in given if isinstance(one, DeviceTensor)]

        def do() -> Any:
            assert all(self._holders[place] for place in places), "memory was given back before it was copied"
            return work()

        self.stream.late.append(_Late(do))

    def _download(self, host: Tensor, copied: Tensor) -> Tensor:
        """Begin a copy to the host."""
        self.downloads.append((host, copied))
        _spoil([host])
        return host

    def _opaque(self, function: Callable[..., Any], *args: Any) -> Any:
        held = _held(list(args))
        with torch._C.DisableTorchFunction():
            out = function(*held)
        self._record(function, held, {}, out, launches=0)
        return _on_device(out)

    def _move(self, args: Any, kwargs: Any) -> Tensor:
        tensor = args[0]
        device, dtype = _device_and_dtype(args, kwargs)
        if not isinstance(tensor, DeviceTensor):  # `host.type_as(device tensor)`
            return self._make(torch.Tensor.to, (tensor, device, dtype), {})  # type: ignore[no-any-return]
        if device is not None and device.type == "cpu":
            if kwargs.get("non_blocking", False) or any(one is True for one in args[1:]):
                self.order()
                copied = tensor.held.to(dtype or tensor.dtype, copy=True)
                return self._download(torch.empty_like(copied), copied)  # which torch pins
            self._wait("copy to the host")
            self.num_copied += tensor.numel()
            return tensor.held.to(dtype or tensor.dtype, copy=True)
        if dtype is None or dtype == tensor.dtype:
            return tensor
        return self._run(torch.Tensor.to, (tensor, dtype), {})  # type: ignore[no-any-return]

    # -- rules --------------------------------------------------------------------------------------------------

    def order(self) -> None:
        """The current stream works."""
        if self.capturing is None:
            others = [one for one in self.streams if one is not self.stream and not one.lags]
            late = [one for one in others if one.work > self.stream.seen.get(one, 0)]
            assert not late, "a stream works while another does, and has not waited for it"
            self.stream.work += 1

    def take(self, tensor: DeviceTensor) -> None:
        """Count a tensor's memory until the last one that shares it is gone."""
        storage = tensor.held.untyped_storage()
        where, size = storage.data_ptr(), storage.nbytes()
        self._holders[where] += 1
        weakref.finalize(tensor, self._give_back, where, size)
        self.taken += size if self._holders[where] == 1 else 0
        if self.memory is not None and self.taken > self.memory:
            raise torch.OutOfMemoryError(f"{DEVICE} has {self.memory} bytes, and {self.taken} were taken")

    def _give_back(self, where: int, size: int) -> None:
        self._holders[where] -= 1
        self.taken -= 0 if self._holders[where] else size

    def _wait(self, what: str) -> None:
        frame = sys._getframe()
        while frame is not None and ("/speculative/" not in (file := frame.f_code.co_filename) or "/tests/" in file):
            frame = frame.f_back  # type: ignore[assignment]
        where = f"{frame.f_code.co_filename.rsplit('/speculative/')[-1]}:{frame.f_code.co_name}" if frame else "a test"
        if self.capturing is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what} in {where}")
        self.waits[what, where] += 1
        self._check_sent()
        if what != "late copy":
            self.run_dry()

    def _check_devices(self, name: str, args: Any, kwargs: Any) -> None:
        on_host = [t for t in _tensors((args, kwargs)) if not isinstance(t, DeviceTensor)]
        if any(tensor.dim() for tensor in on_host):
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {name} got {DEVICE} and host tensors of "
                f"{[tuple(tensor.shape) for tensor in on_host]}"
            )
        if name in ("numpy", "__array__"):
            raise TypeError(f"can't convert {DEVICE} device type tensor to numpy; use Tensor.cpu() first")
        from_tensor = name == "repeat_interleave" and "output_size" not in kwargs and isinstance(args[-1], Tensor)
        if name in _WAITS or from_tensor or (name == "where" and len(args) == 1):
            self._wait(name)

    def _check_index(self, name: str, args: Any) -> None:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not isinstance(args[0], DeviceTensor):
            raise RuntimeError("indices should be on the same device as the indexed tensor (cpu)")
        for part in parts:
            if isinstance(part, DeviceTensor) and part.dtype in (torch.bool, torch.uint8):
                self._wait("boolean mask as an index")
            elif isinstance(part, list | np.ndarray) or (
                isinstance(part, Tensor) and not isinstance(part, DeviceTensor) and part.dim() > 0
            ):
                self._wait("host index into a device tensor")
        value = args[2] if name == "__setitem__" else None
        if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) and value.dim() > 0:
            self._wait("host value stored in a device tensor")

    def _check_copy(self, args: Any, kwargs: Any) -> None:
        to, source = args[0], args[1]
        if not isinstance(to, DeviceTensor):
            if not self._is_async(to, kwargs):
                self._wait("copy to the host")
        elif not isinstance(source, DeviceTensor):
            if not self._is_async(source, kwargs):
                self._wait("upload from pageable memory")
            else:
                assert self.capturing is None, "an upload within a graph"

    def _is_async(self, host: Tensor, kwargs: Any) -> bool:
        return bool(kwargs.get("non_blocking", False)) and host.data_ptr() in self._pinned

    def _check_sent(self) -> None:
        with torch._C.DisableTorchFunction():
            sent, self._sent_once = self._sent_once, []
            assert all(torch.equal(host, copied) for host, copied in sent), _FILLED_EARLY

    def _synchronize(self, *_: Any) -> None:
        for stream in self.streams:
            stream.carry_out()
        self.finish(self.downloads, [*self.uploads.values()])

    def _make_worker(self, *_: Any) -> "Worker":
        self.workers.append(Worker())
        return self.workers[-1]

    def finish(
        self, downloads: list[tuple[Tensor, Tensor]], uploads: list[tuple[Tensor, Tensor]], *, waits: bool = True
    ) -> None:
        """The host waits for copies to and from pinned memory, or sees that they are done."""
        for host, sent in uploads:
            if self.uploads.get(host.data_ptr(), (None, None))[1] is not sent:
                continue  # somebody waited for it before
            with torch._C.DisableTorchFunction():
                assert torch.equal(host, sent), _FILLED_EARLY
            del self.uploads[host.data_ptr()]
        unfinished = [one for one in self.downloads if any(one is other for other in downloads)]
        self._check_sent()
        if unfinished and waits:
            self._wait("late copy")
        for host, copied in unfinished:
            host.copy_(copied)
        self.downloads = [one for one in self.downloads if not any(one is other for other in unfinished)]


class _Late:
    """Work of a stream that is done when somebody waits for it; copies to the host are then still to be awaited."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.do: Callable[[], Any] | None = work
        self.copy: tuple[Tensor, Tensor] | None = None

    def carry_out(self) -> None:
        if self.do is not None:
            do, self.do = self.do, None
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                done = do()
            self.copy = done if isinstance(done, tuple) else None


class _Stream:
    """Stand in for `torch.cuda.Stream`.

    work: pieces that it was given. seen: how many of each other stream's lie before its next one.
    lags: it has copied beside the default stream. late: what it has still to do.
    """

    device = DEVICE

    def __init__(self) -> None:
        self.work = 0
        self.seen: dict[_Stream, int] = {}
        self.lags = False
        self.late = list[_Late]()

    def wait_stream(self, other: Any) -> None:
        """Let what comes next lie behind all that another one was given."""
        other = getattr(other, "stream", other)
        other.carry_out()
        for stream, work in {**other.seen, other: other.work}.items():
            self.seen[stream] = max(work, self.seen.get(stream, 0))

    def carry_out(self) -> None:
        late, self.late = self.late, []
        for one in late:
            one.carry_out()


class _Event:
    """What `torch.cuda.Event` is here."""

    def __init__(self, device: PretendedCuda) -> None:
        self._device = device
        self._work = 0
        self._downloads: list[tuple[Tensor, Tensor]] = []
        self._uploads: list[tuple[Tensor, Tensor]] = []
        self._late = list[_Late]()
        self._was_asked = False

    def record(self, stream: Any) -> None:
        """All copies so far lie before it."""
        assert stream.device == DEVICE, "recorded where the copy was not made"
        self._work = stream.stream.work if stream.stream is self._device.streams[0] else -1
        self._downloads, self._uploads = list(self._device.downloads), list(self._device.uploads.values())
        self._late, self._was_asked = list(stream.stream.late), False

    def synchronize(self, *, waits: bool = True) -> None:
        for one in self._late:
            one.carry_out()
        copies = [one.copy for one in self._late if one.copy is not None]
        self._device.finish(self._downloads + copies, self._uploads, waits=waits)
        if waits and self._work == self._device.streams[0].work:
            self._device.run_dry()

    def query(self) -> bool:
        """Not when it is asked for the first time, where it has work before it that nobody has waited for."""
        was_asked, self._was_asked = self._was_asked, True
        if not was_asked and any(one.do is not None for one in self._late):
            return False
        self.synchronize(waits=False)
        return True


class Worker:
    """A `ThreadPoolExecutor` that works when it is given work, or `by_hand`."""

    def __init__(self) -> None:
        self.by_hand = False
        self.given = list[tuple[Future[Any], Callable[[], Any]]]()

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.given.append((future, partial(function, *args, **kwargs)))
        if not self.by_hand:
            self.work()
        return future

    def work(self, most: int = sys.maxsize) -> int:
        """Do so much of what was given, and return how much there was."""
        given, self.given = self.given[:most], self.given[most:]
        for future, function in given:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
        return len(given)


class _PagedAttention:
    """`TritonAttend`."""

    def __init__(self, device: PretendedCuda, sizes: AttentionSizes, of_triton: AttendPaged) -> None:
        self._device, self._attend, self._of_triton = device, TorchAttend(sizes.block_size), of_triton

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scores: ScoreRule = PLAIN
    ) -> Tensor:
        starts = () if rows.starts is None else (rows.starts,)
        given = (query, keys, values, rows.slots, rows.visible, rows.blocks, *starts)
        assert all(own.dtype == torch.int32 and own.is_contiguous() for own in starts)
        assert rows.blocks.dtype == rows.visible.dtype == torch.int64
        assert rows.blocks.is_contiguous() and rows.visible.is_contiguous() and keys.stride() == values.stride()

        def attend(query: Tensor, keys: Tensor, values: Tensor, *places: Tensor) -> Tensor:
            slots, visible, blocks, *own = places
            given = PagedRows(slots, visible, blocks, rows.first, own[0] if own else None)
            return self._attend(query, keys, values, given, scores)

        return self._device.kernels(  # type: ignore[no-any-return]
            lambda *_: self._of_triton(query, keys, values, rows, scores), attend, *given
        )


class _RowJudge:
    """`TritonJudge`."""

    def __init__(self, device: PretendedCuda, mode: LogprobsMode, of_triton: RowJudge) -> None:
        self._device, self._judge, self._of_triton = device, TorchJudge(VocabularyOps(), mode), of_triton

    def __call__(self, logits: Tensor, rows: RowFields, sampled: SampledFrom | None) -> tuple[Tensor, Layout]:
        given = [tensor for tensor in (*rows, *(sampled or ())) if tensor is not None]
        assert all(tensor.is_contiguous() for tensor in given)
        dtypes = dict.fromkeys(("temperature", "log_min_p", "top_p"), torch.float32)
        dtypes |= dict.fromkeys(("greedy", "counted", "coupled", "checked", "reported"), torch.bool)
        dtypes |= dict.fromkeys(("accept_uniforms", "sample_uniforms"), torch.float64)
        for name, tensor in rows._asdict().items():
            assert tensor.dtype == dtypes.get(name, torch.int64), name
        if sampled is not None:
            assert sampled.probs.dtype == torch.float32 and sampled.places.dtype == torch.int64
            assert (sampled.columns is None) == (sampled.ids is None)
            assert sampled.columns is None or sampled.columns.dtype == torch.int32
        layouts = list[Layout]()

        def judge(*given: Any) -> Tensor:
            own = given[-1]
            if own is not None and own.ids is not None:  # torch's numbers are made without the columns
                columns = columns_of.__wrapped__(own.ids, len(own.columns))
                assert torch.equal(own.columns, columns), "the kernel reads columns of other ids"
            vector, layout = self._judge(*given)
            layouts.append(layout)
            return vector

        return self._device.kernels(self._of_triton, judge, logits, rows, sampled), layouts[-1]


class _LayerOps:
    """`TritonLayerOps`."""

    def __init__(self, device: PretendedCuda) -> None:
        from speculative.gpu.triton_layers import TritonLayerOps

        self._device, self._torch, self._of_triton = device, LayerOps(), TritonLayerOps()

    def add_norm(self, hidden: Tensor, update: Tensor, norm: RMSNorm) -> tuple[Tensor, Rows]:

        def add_norm(hidden: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Rows]:
            added = hidden + update
            normed = functional.rms_norm(added, norm.shape, weight, norm.eps)
            return added, quantize_rows(normed) if norm.feeds_fp8 else normed

        return self._device.kernels(  # type: ignore[no-any-return]
            lambda *_: self._of_triton.add_norm(hidden, update, norm), add_norm, hidden, update, norm.weight
        )

    def gate(self, gate_up: Tensor, *, feeds_fp8: bool = False) -> Rows:

        def gate(gate_up: Tensor) -> Rows:
            gated = self._torch.gate(gate_up)
            return quantize_rows(gated) if feeds_fp8 else gated

        launch = partial(self._of_triton.gate, feeds_fp8=feeds_fp8)
        return self._device.kernels(launch, gate, gate_up)  # type: ignore[no-any-return]

    def quantize(self, rows: Tensor) -> ScaledRows:
        return self._device.kernels(self._of_triton.quantize, quantize_rows, rows)  # type: ignore[no-any-return]

    def rotation(self, rotary: Rotary, positions: Tensor, like: Tensor) -> Rotation:
        return rotary.table, positions

    def attend(self, heads: Tensor, attention: Attention, rotation: Rotation, attend: Attend, layer: int) -> Tensor:
        from speculative.gpu.triton_layers import rotate_and_store as launch

        assert isinstance(attend, CacheAttention)
        num_heads, norm = attention.num_heads, attention.qk_norm
        stored = attend.cache.data[layer]

        def rotate_and_store(
            heads: Tensor, table: Tensor, positions: Tensor, slots: Tensor, stored: Tensor, *weight: Tensor
        ) -> Tensor:
            query_key, value = heads[:, : -attention.num_kv_heads], heads[:, -attention.num_kv_heads :]
            if norm is not None:
                query_key = functional.rms_norm(query_key, norm.shape, None, norm.eps) * weight[0]
            cos, sin = table[positions].to(heads.dtype).unsqueeze(1).unbind(2)
            query_key = rotate(query_key, torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
            stored[0].index_copy_(0, slots, query_key[:, num_heads:].to(stored.dtype))
            stored[1].index_copy_(0, slots, value.to(stored.dtype))
            return query_key[:, :num_heads].contiguous()

        weights = () if norm is None else (norm.weight,)
        query = self._device.kernels(
            lambda *_: launch(heads, attention, rotation, attend.slots, *stored.unbind(0)),
            rotate_and_store,
            *(heads, *rotation, attend.slots, stored, *weights),
        )
        return attend.attend_stored(layer, query, attention.scores)


def _check_fp8_product(
    rows: Tensor, weight: Tensor, of_rows: Tensor, of_weight: Tensor, bias: Any = None, out_dtype: Any = None
) -> None:
    """Check what torch 2.9 to 2.13 requires of scales by row on CUDA, and not on a CPU."""
    del bias
    assert out_dtype == torch.bfloat16, "FP8 products give bfloat16"
    assert rows.dtype == weight.dtype == torch.float8_e4m3fn and of_rows.dtype == of_weight.dtype == torch.float32
    assert rows.stride(1) == weight.stride(0) == 1, "FP8 rows are contiguous, and weights are transposed"
    assert all(size % 16 == 0 for size in weight.shape), "FP8 sizes are multiples of 16"
    assert of_rows.shape == (len(rows), 1) and of_weight.shape == (1, weight.shape[1]), "FP8 scales are of rows"
    assert of_rows.stride(0) == of_weight.stride(1) == 1, "FP8 scales are contiguous"


# -- tensors --------------------------------------------------------------------------------------------------------


def _attribute(func: Any, args: Any) -> Any:
    """A property of a device tensor."""
    name = func.__self__.__name__
    fixed = {"device": DEVICE, "is_cuda": True, "is_cpu": False, "grad": None, "grad_fn": None, "requires_grad": False}
    if name in fixed:
        return fixed[name]
    value = func(args[0].held)
    return DeviceTensor(value) if isinstance(value, Tensor) else value


_ATTRIBUTES: dict[str, Callable[[Any, Any], Any]] = {
    "__get__": _attribute,
    "__set__": lambda func, args: None,
    "requires_grad_": lambda func, args: args[0],
    "detach": lambda func, args: DeviceTensor(args[0].held),
    "__hash__": lambda func, args: id(args[0]),
    "__iter__": lambda func, args: iter([DeviceTensor(row) for row in args[0].held.unbind(0)]),
    "__repr__": lambda func, args: f"DeviceTensor({args[0].held!r})",
    "is_pinned": lambda func, args: False,
}


def _device_and_dtype(args: Any, kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """What `Tensor.to` was asked for."""
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    for one in (*args[1:], kwargs.get("device"), kwargs.get("dtype")):
        if isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, torch.device | str):
            device = torch.device(one)
        elif isinstance(one, Tensor):
            device, dtype = one.device, one.dtype
    return device, dtype


def _tensors(value: Any) -> list[Tensor]:
    """All within it, in order."""
    found: list[Tensor] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            waiting.extend(reversed(one))
        elif isinstance(one, dict):
            waiting.extend(reversed(one.values()))
    return found


def _held(value: Any) -> Any:
    """With what device tensors hold, and with the CPU in the place of the device."""
    if isinstance(value, DeviceTensor):
        return value.held
    if isinstance(value, torch.device | str):
        return torch.device("cpu") if str(value).startswith("cuda") else value
    if isinstance(value, dict):
        return {name: _held(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return _like(value, [_held(one) for one in value])
    return value


def _on_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        return DeviceTensor(value)
    if not isinstance(value, list | tuple):
        return value
    return _like(value, [_on_device(one) for one in value])


def _like(value: Any, parts: list[Any]) -> Any:
    """A list or tuple of the same type; a `torch.return_types` takes a sequence, as a tuple does."""
    return value._make(parts) if hasattr(value, "_make") else type(value)(parts)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spoil(tensors: list[Tensor]) -> None:
    """What a pool leaves in memory that it gave to somebody else."""
    with torch._C.DisableTorchFunction(), torch.inference_mode():
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            else:
                tensor.fill_(GARBAGE_ID if tensor.dtype == torch.int64 else 1)
