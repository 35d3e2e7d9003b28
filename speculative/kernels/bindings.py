"""The CPU kernels of this folder, called without copies."""

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUM_WAYS = 6
"""Ways to prefetch weights: of integers and of many products, then of 1 to 5 products for each weight."""

Uint64s = np.ndarray[Any, np.dtype[np.uint64]]
Float64s = np.ndarray[Any, np.dtype[np.float64]]


def _each(kind: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    """Fields of one type, one after another."""
    return [(name, kind) for name in names.split()]


class LinearStruct(ctypes.Structure):
    """`Linear` of kernels.h."""

    _fields_ = [*_each(c_void_p, "weight bias"), *_each(c_int64, "num_inputs num_outputs kind")]


class ScoresStruct(ctypes.Structure):
    """`Scores` of kernels.h."""

    _fields_ = [("window", c_int64), *_each(c_double, "scale cap")]


class LayerStruct(ctypes.Structure):
    """`Layer` of kernels.h."""

    _fields_ = [
        *_each(c_void_p, "input_norm mlp_norm head_norm"),
        *_each(LinearStruct, "qkv output gate_up down"),
        ("scores", ScoresStruct),
    ]


class DraftHeadStruct(ctypes.Structure):
    """`DraftHead` of kernels.h."""

    _fields_ = [
        ("embedding", c_void_p),
        *_each(c_int64, "embedding_is_bfloat16 residual_is_normed"),
        *_each(c_void_p, "token_norm hidden_norm"),
        ("layer", LayerStruct),
        ("norm", c_void_p),
        ("lm_head", LinearStruct),
        ("ids", c_void_p),
    ]


class ShapeStruct(ctypes.Structure):
    """`Shape` of kernels.h."""

    _fields_ = [
        *_each(c_int64, "hidden_size intermediate_size num_heads num_kv_heads head_dim num_slots cache_is_bfloat16"),
        ("rotary", c_void_p),
        ("eps", c_double),
    ]


class StepStruct(ctypes.Structure):
    """`Step` of kernels.h."""

    _fields_ = [
        *_each(c_int64, "num_rows num_spans"),
        *_each(c_void_p, "positions slots row_starts context context_starts"),
    ]


class DraftRoundStruct(ctypes.Structure):
    """`DraftRound` of kernels.h."""

    _fields_ = [
        ("num_entries", c_int64),
        *_each(c_void_p, "counts context context_starts seeds lengths"),
        ("purpose", c_int64),
        *_each(c_void_p, "temperature greedy"),
        ("num_filters", c_int64),
        *_each(c_void_p, "filtered log_min_p top_k top_p"),
    ]


class VerifyStruct(ctypes.Structure):
    """`VerifyStep` of vocabulary.cpp."""

    _fields_ = [
        *_each(c_int64, "num_rows num_entries size"),
        *_each(c_void_p, "p q"),
        ("width", c_int64),
        *_each(c_void_p, "ids columns drafts packed entries first_rows"),
    ]


class TermStruct(ctypes.Structure):
    """`TermRules` of vocabulary.cpp."""

    _fields_ = [
        ("stakes", c_void_p),
        ("num_stakes", c_int64),
        *_each(c_double, "least_residual least_spread equal rounding"),
    ]


_MIRRORED: dict[str, type[ctypes.Structure]] = {
    "Linear": LinearStruct,
    "Scores": ScoresStruct,
    "Layer": LayerStruct,
    "DraftHead": DraftHeadStruct,
    "Shape": ShapeStruct,
    "Step": StepStruct,
    "DraftRound": DraftRoundStruct,
    "VerifyStep": VerifyStruct,
    "TermRules": TermStruct,
}


class _Place(ctypes.Structure):
    """`Place` of kernels.h."""

    _fields_ = [("name", ctypes.c_char_p), ("bytes", c_int64)]


def misplaced_fields(library: ctypes.CDLL) -> list[str]:
    """Return where the structs of a compiled library and their mirrors here disagree; empty if they match."""
    compiled: dict[str, int] = {}
    for table in (library.truespec_places, library.truespec_vocabulary_places):
        table.restype = ctypes.POINTER(_Place)
        places, index = table(), 0
        while places[index].name is not None:
            compiled[places[index].name.decode()] = places[index].bytes
            index += 1
    mirrored = {name: ctypes.sizeof(struct) for name, struct in _MIRRORED.items()}
    for name, struct in _MIRRORED.items():
        mirrored |= {f"{name}.{field[0]}": getattr(struct, field[0]).offset for field in struct._fields_}
    return [
        f"{name}: {compiled.get(name)} in the kernels, {mirrored.get(name)} in bindings.py"
        for name in sorted(compiled.keys() | mirrored.keys())
        if compiled.get(name) != mirrored.get(name)
    ]


class _Pointer:
    """The type of an argument that points at a tensor's numbers, at a struct or an array of them, or at nothing."""

    @staticmethod
    def from_param(value: Any) -> Any:
        """Return where it lies, as ctypes asks for it."""
        if isinstance(value, Tensor):
            return c_void_p(value.data_ptr())
        return None if value is None else ctypes.byref(value)


class Kernels:
    """The functions of the compiled library. Tensors are float32 on the CPU unless said otherwise."""

    def __init__(self, library: ctypes.CDLL) -> None:
        if misplaced := misplaced_fields(library):
            raise RuntimeError(f"Structs of the kernels differ from their mirrors: {'; '.join(misplaced)}.")
        self.file: str = library._name  # whose name is a hash of source, compiler and processor
        pointer, number, real = _Pointer, c_int64, c_double

        def bound(name: str, *arguments: Any) -> Any:
            """A function of the library that returns nothing."""
            function = library[f"truespec_{name}"]
            function.argtypes, function.restype = arguments, None
            return function

        self._linear = bound("linear", pointer, number, pointer, number, pointer, real, pointer, number)
        self._attend = bound(
            "attend", *[pointer] * 3, *[number, pointer] * 3, number, *[number, real, real], pointer, number
        )
        self._layers = bound("layers", pointer, number, *[pointer] * 5, number, pointer, number)
        self._norm = bound("norm", number, number, pointer, number, pointer, real, pointer)
        self._attention = bound("attention", pointer, number, *[pointer] * 4, number, *[pointer] * 3, number)
        self._mlp = bound("mlp", *[pointer, number] * 3)
        self._draft_layer = bound("draft_layer", *[pointer] * 6, number, pointer, number)
        self._draft_round = bound("draft_round", *[pointer] * 5, number, *[pointer] * 3, number)
        self._distributions = bound("distributions", number, number, *[pointer] * 3)
        self._filter = bound("filter", number, number, *[pointer] * 5)
        self._verify = bound("verify", *[pointer] * 6)
        self._emitted = bound("emitted", *[pointer] * 4)
        self._round_probs = bound("round_probs", *[pointer] * 7)
        self._broken_rows = bound("broken_rows", *[pointer] * 5, real, pointer)
        self._terms = bound("terms", *[pointer] * 8)
        self._draw = bound("draw", number, number, *[pointer] * 3)
        self._uniforms = bound("uniforms", number, *[pointer] * 5)
        self._noise = bound("noise", number, number, *[pointer] * 3)
        self._choose = bound("choose", number, number, *[pointer] * 4, number, pointer, number)
        self._ways = (c_int64 * NUM_WAYS).in_dll(library, "truespec_ways")
        self._by_tiles = c_int64.in_dll(library, "truespec_by_tiles")
        self._attends_by_tiles = c_int64.in_dll(library, "truespec_attends_by_tiles")
        library.truespec_has_tiles.restype = library.truespec_permit_tiles.restype = c_int64
        self.has_tiles = bool(library.truespec_has_tiles())
        self._permit_tiles = library.truespec_permit_tiles

    def prefetch(self, ways: Sequence[int]) -> None:
        """Set how products ask for weights ahead of their use: `NUM_WAYS` ways of prefetch.py."""
        self._ways[:] = list(ways)

    def permit_tiles(self) -> bool:
        """Ask Linux for the registers of AMX, for all threads of this process; return whether it gives them."""
        return bool(self._permit_tiles())

    @property
    def by_tiles(self) -> bool:
        """Use of AMX tiles for products of bfloat16s; set it only where `permit_tiles` returned true."""
        return bool(self._by_tiles.value)

    @by_tiles.setter
    def by_tiles(self, by_tiles: bool) -> None:
        self._by_tiles.value = by_tiles

    @property
    def attends_by_tiles(self) -> bool:
        """Use of AMX tiles for attention over a cache in bfloat16; set it only where `permit_tiles` returned true."""
        return bool(self._attends_by_tiles.value)

    @attends_by_tiles.setter
    def attends_by_tiles(self, by_tiles: bool) -> None:
        self._attends_by_tiles.value = by_tiles

    @property
    def name(self) -> str:
        """Name of the arithmetic: kernels of one name round alike."""
        of_products = "-tiles" if self.by_tiles else ""
        return Path(self.file).stem + of_products + ("-tile-attention" if self.attends_by_tiles else "")

    def linear(self, linear: LinearStruct, rows: Tensor, norm: tuple[Tensor, float] | None = None) -> Tensor:
        """rows [N, num_inputs], each of them contiguous -> [N, num_outputs]; normed first if `norm` is given."""
        out = rows.new_empty((rows.shape[0], linear.num_outputs))
        weight, eps = norm or (None, 0.0)
        self._linear(linear, len(rows), rows, rows.stride(0), weight, eps, out, torch.get_num_threads())
        return out

    def norm(self, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The root-mean-square norm of rows [N, size], each of them contiguous."""
        out = rows.new_empty(rows.shape)
        self._norm(*rows.shape, rows, rows.stride(0), weight, eps, out)
        return out

    def attend(
        self,
        shape: ShapeStruct,
        step: StepStruct,
        cache: Tensor,
        layer: int,
        heads: tuple[Tensor, Tensor, Tensor],
        scores: tuple[int, float, float] = (0, 0.0, 0.0),
    ) -> Tensor:
        """Store key and value of one layer, then attend.

        Args:
            shape: of the model and its cache.
            step: where its rows lie.
            cache: [num_layers, 2, num_slots, num_kv_heads, head_dim], float32 or bfloat16.
            layer: which one.
            heads: query [N, num_heads, head_dim], key and value [N, num_kv_heads, head_dim]; rows may be apart.
            scores: window, scale and cap, as in `Scores` of kernels.h.

        Returns:
            [N, num_heads, head_dim].
        """
        attended = torch.empty(heads[0].shape)
        places = [place for part in heads for place in (part, part.stride(0))]
        self._attend(shape, step, cache, layer, *places, *scores, attended, torch.get_num_threads())
        return attended

    def attention(
        self,
        layer: LayerStruct,
        index: int,
        rows: Tensor,
        rotary: tuple[Tensor, Tensor],
        place: tuple[ShapeStruct, StepStruct, Tensor],
    ) -> Tensor:
        """Attention of one layer with its projections: rows [N, num_inputs] -> [N, hidden_size].

        Args:
            layer: its weights.
            index: its place in the cache.
            rows: what the projections read.
            rotary: two of [N, 1, head_dim], as `rotate` takes them.
            place: shape, step and cache of `attend`.
        """
        shape, step, cache = place
        out = rows.new_empty((rows.shape[0], shape.hidden_size))
        self._attention(layer, index, shape, step, cache, rows, rows.stride(0), *rotary, out, torch.get_num_threads())
        return out

    def mlp(self, layer: LayerStruct, rows: Tensor) -> Tensor:
        """SwiGLU of one layer: rows [N, hidden_size], each of them contiguous -> [N, hidden_size]."""
        out = rows.new_empty((rows.shape[0], layer.down.num_outputs))
        self._mlp(layer, len(rows), rows, rows.stride(0), out, torch.get_num_threads())
        return out

    def draft_layer(
        self, head: DraftHeadStruct, token_ids: Tensor, hidden: Tensor, place: tuple[ShapeStruct, StepStruct, Tensor]
    ) -> Tensor:
        """One layer of a draft head: token_ids [N] and hidden [N, hidden_size], each row contiguous -> the same size.

        Args:
            head: its weights.
            token_ids: int64.
            hidden: the hidden states that go with the tokens.
            place: shape, step (with positions) and cache of `attend`.
        """
        out = hidden.new_empty(hidden.shape)
        self._draft_layer(head, *place, token_ids, hidden, hidden.stride(0), out, torch.get_num_threads())
        return out

    def draft_round(
        self,
        head: DraftHeadStruct,
        draft_round: DraftRoundStruct,
        num_drafts: int,
        hidden: Tensor,
        place: tuple[ShapeStruct, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All drafts of a round, entry after entry: tokens and columns [D] int64, and the distributions [D, W] of their
        draws.

        Args:
            head: its weights.
            draft_round: what is drafted for which entry.
            num_drafts: D, of all entries.
            hidden: [E, hidden_size], each row contiguous; the first drafts are drawn from it.
            place: shape and cache of `attend`.
        """
        tokens, columns = (torch.empty(num_drafts, dtype=torch.int64) for _ in range(2))
        distributions = torch.empty((num_drafts, head.lm_head.num_outputs))
        made = tokens, columns, distributions
        self._draft_round(head, *place, draft_round, hidden, hidden.stride(0), *made, torch.get_num_threads())
        return made

    def distributions(self, logits: Tensor, greedy: Tensor) -> Tensor:
        """Logits [R, V] -> softmax of each row; where greedy [R] bool, all mass on the likeliest token."""
        logits = logits.contiguous()
        out = torch.empty_like(logits)
        self._distributions(*logits.shape, logits, greedy, out)
        return out

    def filter(self, logits: Tensor, rows: Tensor, log_min_p: Tensor, top_k: Tensor, top_p: Tensor) -> None:
        """Write -inf into logits [R, V], contiguous, where a filter drops a token.

        rows [F] int64; the filters of each, log_min_p and top_p [F] float32 and top_k [F] int64, are applied in the
        order min_p, top_k, top_p. -inf, V and 1 drop nothing. A row with a NaN is left unchanged.
        """
        self._filter(len(rows), logits.shape[1], logits, rows, log_min_p, top_k, top_p)

    def draw(self, distributions: Tensor, uniforms: Tensor) -> Tensor:
        """One token [R] int64 of each distribution [R, V], which need not be normalised; uniforms are [R] float64."""
        tokens = torch.empty(len(distributions), dtype=torch.int64)
        self._draw(*distributions.shape, distributions.contiguous(), uniforms.contiguous(), tokens)
        return tokens

    def verify(
        self, step: VerifyStruct, accept_uniforms: Tensor, sample_uniforms: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Token-wise verification: accepted drafts [E] int64, the token behind them [E] int64, their chances [E].

        Args:
            step: what is verified.
            accept uniforms, finals: [R] float64.
        """
        counts, tokens = (torch.empty(step.num_entries, dtype=torch.int64) for _ in range(2))
        expected = torch.empty(step.num_entries)
        self._verify(step, accept_uniforms.contiguous(), sample_uniforms.contiguous(), counts, tokens, expected)
        return counts, tokens, expected

    def emitted(self, step: VerifyStruct, num_accepted: Tensor, token_ids: Tensor) -> Tensor:
        """Implement `emitted_at_rows` of `DistributionOps`: [R] int64."""
        out = torch.empty(step.num_rows, dtype=torch.int64)
        self._emitted(step, num_accepted.contiguous(), token_ids.contiguous(), out)
        return out

    def round_probs(
        self, step: VerifyStruct, num_accepted: Tensor, token_ids: Tensor, column_of: Tensor | None, *, places: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Implement `VocabularyOps.round_probs`; column_of: [V] int32, of each token, None where it is the token."""
        of_drafts, of_last = (torch.empty(n, dtype=torch.float64) for n in (step.num_rows, step.num_entries))
        before = torch.empty_like(of_drafts) if places else None
        decided = num_accepted.contiguous(), token_ids.contiguous()
        self._round_probs(step, *decided, column_of, of_drafts, of_last, before)
        return of_drafts, of_last, before

    def broken_rows(
        self,
        step: VerifyStruct,
        num_accepted: Tensor,
        emitted: Tensor,
        highest: Tensor,
        outside: Tensor,
        mass_rounding: float,
    ) -> Tensor:
        """Implement `broken_rows` of selfcheck/invariants.py: [R] int64. mass_rounding: of the mass of a draft's
        distribution."""
        out = torch.empty(step.num_rows, dtype=torch.int64)
        found = [part.contiguous() for part in (num_accepted, emitted, highest, outside)]
        self._broken_rows(step, *found, mass_rounding, out)
        return out

    def terms(
        self,
        step: VerifyStruct,
        num_accepted: Tensor,
        emitted: Tensor,
        counted: Tensor,
        rules: TermStruct,
        num_checks: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The terms of the self-checks of token-wise verification: sums [C, stakes + 4], what was achievable, and rows
        [3, R], as in `Terms`.

        Args:
            step: what was verified.
            num_accepted: [E] int64. emitted: [R] int64. counted: [E] bool.
            rules: the stakes, and what counts.
            num_checks: C; 8 for sampled drafts, 4 for deterministic ones."""
        sums = torch.zeros((num_checks, rules.num_stakes + 4), dtype=torch.float64)
        achievable, rows = torch.empty((), dtype=torch.float64), torch.empty((3, step.num_rows), dtype=torch.float64)
        decided = num_accepted.contiguous(), emitted.contiguous(), counted.contiguous()
        self._terms(step, *decided, rules, sums, achievable, rows)
        return sums, achievable, rows

    def noise(self, seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        """The uniforms [R, vocab_size] float64 behind `gumbel` of rng.py; seeds and positions are [R] int64."""
        out = torch.empty((len(seeds), vocab_size), dtype=torch.float64)
        self._noise(*out.shape, seeds.contiguous(), positions.contiguous(), out)
        return out

    def choose(self, probs: Tensor, ids: Tensor | None, seeds: Tensor, positions: Tensor, count: int = 1) -> Tensor:
        """The columns of distributions [R, W] float32 with the largest log p + noise, the largest first.

        Args:
            probs: need not be normalised.
            ids: [W] int64, the tokens of the columns; None where they are the columns.
            seeds: [R] int64, as for `gumbel` of rng.py. positions: the same.
            count: columns to return.

        Returns:
            [R, count] int64; 0 where fewer columns than that have mass.
        """
        columns, keys = (
            torch.empty((len(probs), count), dtype=torch.int64),
            (seeds.contiguous(), positions.contiguous()),
        )
        self._choose(*probs.shape, probs.contiguous(), ids, *keys, count, columns, torch.get_num_threads())
        return columns.clamp_(min=0)

    def uniforms(self, seeds: Uint64s, rounds: Uint64s, offsets: Uint64s, purposes: Uint64s) -> Float64s:
        """Implement `uniforms` of rng.py for contiguous arrays [R]."""
        out = np.empty(len(seeds), np.float64)
        # An array's own `ctypes` takes twice as long as a tensor.
        self._uniforms(len(seeds), *map(torch.from_numpy, (seeds, rounds, offsets, purposes, out)))
        return out

    def layers(
        self,
        layers: "ctypes.Array[LayerStruct]",
        shape: ShapeStruct,
        step: StepStruct,
        cache: Tensor,
        hidden: Tensor,
        captures: Sequence[int],
    ) -> Tensor:
        """Run all layers, in place on hidden [N, hidden_size]; what enters the layers of `captures`, ascending, as
        [N, len(captures) * hidden_size]."""
        features = hidden.new_empty((len(hidden), len(captures) * shape.hidden_size))
        captured = (c_int64 * len(captures))(*captures), len(captures)
        self._layers(layers, len(layers), shape, step, cache, hidden, *captured, features, torch.get_num_threads())
        return features
