"""The shape of a model in the terms of this engine, read from a checkpoint's config.json by its family."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.config_file import FIX, SLIDING, ConfigFile, brief
from speculative.model.end_tokens import Json, end_tokens, read_if_there, read_json, stated_ids
from speculative.model.families import FAMILIES
from speculative.model.rotary import Rope, rope_of, rope_settings
from speculative.state.kv_cache import KVShape


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """A layer's rule for the products of query and key.

    window: positions that a row sees, itself among them; None = all. cap: c of c tanh(score / c). scale: multiplier of
    the products; None = 1 / sqrt(head_dim).
    """

    window: int | None = None
    cap: float | None = None
    scale: float | None = None

    @property
    def numbers(self) -> tuple[int, float, float]:
        """Window, scale and cap as our CPU kernels take them; 0 = none."""
        return self.window or 0, self.scale or 0.0, self.cap or 0.0


PLAIN = ScoreRule()


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The differences between the layers of a model. rope: None = not rotated."""

    rope: Rope | None
    scores: ScoreRule = PLAIN


@dataclass(frozen=True, slots=True)
class Form:
    """The differences of a model from Llama; the defaults are Llama's.

    norms: whether they stand before attention and MLP, behind, or both. norm_adds_one: their weights are 1 + w, applied
    in float32. wide_qk_norm: norms of query and key are of all heads together. gate: the MLP's activation. logit_cap: c
    of c tanh(logit / c). The rest multiplies embeddings, what a layer adds to the residual, and logits.
    """

    norms: Literal["before", "behind", "both"] = "before"
    norm_adds_one: bool = False
    wide_qk_norm: bool = False
    gate: Literal["silu", "gelu_tanh"] = "silu"
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a layer's tensors, behind `model.layers.N.` in a checkpoint.

    Several names are of rows of one matrix. Norms stand in the order in which they are applied.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")

    @property
    def matrices(self) -> tuple[str, ...]:
        """All but norms."""
        return (*self.qkv, self.output, *self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a dense decoder.

    Biases: `qkv_bias` stands on the query, key and value projections, `o_bias` on the attention's output, `mlp_bias` on
    all three of the MLP. `qk_norm` is an RMSNorm of queries and keys, of every head unless `form` says otherwise.
    `kinds`: of all layers, where they are not plain attention with `rope`.
    """

    architecture: str  # the class name in transformers
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    kinds: tuple[LayerKind, ...] = ()
    form: Form = Form()
    names: TensorNames = TensorNames()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_shape(self) -> KVShape:
        """Shape of its cache."""
        return KVShape(self.num_layers, self.num_kv_heads, self.head_dim)

    @property
    def has_llama_shape(self) -> bool:
        """Return whether fused layers compute it, on CPUs and in captured steps; others run by torch's operators."""
        rotated_alike = all(kind.rope == self.rope for kind in self.kinds)
        return self.form == Form() and rotated_alike and 2 * len(self.rope.frequencies) == self.head_dim

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return self.kinds or (LayerKind(self.rope),) * self.num_layers

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read config.json, and the end tokens that it and the other files name (`end_tokens`).

        Raises:
            ConfigError: config.json is missing, damaged or contradicts itself.
            UnsupportedModel: the model needs something this engine does not do.
        """
        model, generation = cls.from_json(read_json(folder / "config.json")), folder / "generation_config.json"
        begins = stated_ids(read_if_there(generation), "bos_token_id", str(generation))
        begin = next(iter(begins), model.bos_token_id)
        return replace(model, bos_token_id=begin, eos_token_ids=tuple(end_tokens(folder)))

    @classmethod
    def from_json(cls, config: Json) -> "ModelConfig":
        """Read the content of a config.json; raises what `from_folder` raises."""
        architectures, model_type = config.get("architectures") or [], config.get("model_type")
        if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in FAMILIES:
            found = brief(architectures) if architectures else f"none (model_type {model_type!r})"
            known = ", ".join(sorted(FAMILIES))
            raise UnsupportedModel(f"config.json: `architectures` is {found}; this engine runs {known}. Or {FIX}.")
        architecture = str(architectures[0])
        family = import_module(f"speculative.model.families.{FAMILIES[architecture]}")
        own = family.MODEL_TYPE
        if model_type not in (None, own):
            raise UnsupportedModel(
                f"config.json: `architectures` is {architecture}, whose `model_type` is {own!r}, and `model_type` is "
                f"{model_type!r}; correct the one that is wrong, or {FIX}."
            )
        file = ConfigFile(config)
        model: ModelConfig = family.read(file)
        file.refuse_unknown()
        if model.num_heads % model.num_kv_heads != 0:
            raise ConfigError(
                f"config.json: `num_attention_heads` ({model.num_heads}) is no multiple of "
                f"`num_key_value_heads` ({model.num_kv_heads}); take the file from its source."
            )
        return replace(model, architecture=architecture)

    @classmethod
    def of_family(
        cls,
        file: ConfigFile,
        *,
        rope: Rope | None = None,
        theta: float = 10000.0,
        scores: ScoreRule = PLAIN,
        eps: float = 1e-6,
        tied: bool = False,
        **own: Any,
    ) -> "ModelConfig":
        """Read what all families have in common.

        Args:
            file: a config.json.
            rope: rotary settings, where the family reads them by itself.
            theta: where they name none.
            scores: of all layers.
            eps: `rms_norm_eps` where the file is silent.
            tied: `tie_word_embeddings` where the file is silent.
            own: fields that the family has read by itself.
        """
        head_dim = own.pop("head_dim", None) or file.head_dim
        rope = rope or rope_of(rope_settings(file), file, head_dim, theta=theta)
        model = cls(
            architecture="",
            vocab_size=file.size("vocab_size"),
            hidden_size=file.size("hidden_size"),
            intermediate_size=own.pop("intermediate_size", None) or file.size("intermediate_size"),
            num_layers=file.size("num_hidden_layers"),
            num_heads=file.heads,
            num_kv_heads=own.pop("num_kv_heads", None) or file.size("num_key_value_heads", file.heads),
            head_dim=head_dim,
            rms_norm_eps=file.number("rms_norm_eps", eps),
            rope=rope,
            max_position_embeddings=int(min(file.size("max_position_embeddings"), rope.most_positions)),
            tie_word_embeddings=file.flag("tie_word_embeddings", tied),
            bos_token_id=next(iter(stated_ids(file.content, "bos_token_id", "config.json")), None),
            eos_token_ids=stated_ids(file.content, "eos_token_id", "config.json"),
            **own,
        )
        return model.with_kinds([LayerKind(rope, scores)] * model.num_layers)

    def with_kinds(self, kinds: Iterable[LayerKind]) -> "ModelConfig":
        """The same model with layers of these kinds."""
        kinds = tuple(kinds)
        return replace(self, kinds=() if set(kinds) == {LayerKind(self.rope)} else kinds)


def windowed(
    model: ModelConfig, types: Sequence[str], window: int | None, ropes: Mapping[str, Rope] | None = None
) -> ModelConfig:
    """The model with a window in its sliding layers, and with the rotation of each type where there are several."""
    return model.with_kinds(
        LayerKind(
            kind.rope if ropes is None else ropes[layer_type],
            replace(kind.scores, window=window) if layer_type == SLIDING else kind.scores,
        )
        for kind, layer_type in zip(model.layer_kinds, types, strict=True)
    )
