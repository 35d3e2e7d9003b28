"""A dense decoder of the Llama family, for inference."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculative.model.config import ModelConfig
from speculative.model.layers import Attend, Attention, DecoderLayer, Linear, RMSNorm, Rotary, nan_parameter


class Decoder(nn.Module):
    """Token ids in, hidden states out; attention over the cache is the caller's.

    All parameters start as NaN; fill them through `checkpoint_slots`.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config, self.dtype, self.device = config, dtype, device
        self.embedding = nan_parameter(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        layers = [DecoderLayer(config, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embedding
        self.rotary = Rotary(config, device=device)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, [N, hidden_size], of N packed tokens.

        `input_ids` and `positions` are int64 [N]; `attend` is called once a layer, in order. Positions count from 0
        within a sequence and stay below `config.max_position_embeddings`.
        """
        return self.run(input_ids, positions, attend)[0]

    def run(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, capture: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """As forward, and beside it the features a hidden-state drafter reads.

        Returns:
            hidden [N, hidden_size], and features [N, len(capture) * hidden_size]: the hidden states that enter the
            layers of `capture`, side by side.
        """
        rotary = self.rotary(positions, self.dtype)
        hidden = functional.embedding(input_ids, self.embedding)
        features = [hidden[:, :0]]
        for index, layer in enumerate(self.layers):
            if index in capture:
                features.append(hidden)
            hidden = layer(hidden, rotary, attend, index)
        return self.norm(hidden), torch.cat(features, dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] float32."""
        return self.lm_head(hidden).float()  # type: ignore[no-any-return]

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Where the tensors of a Hugging Face checkpoint go: name, and the view of a parameter to copy it into."""
        slots: dict[str, Tensor] = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = self.lm_head.weight
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            slots |= {f"model.layers.{index}.{name}": slot for name, slot in _layer_slots(layer).items()}
        return slots


def _layer_slots(layer: DecoderLayer) -> dict[str, Tensor]:
    attention, mlp = layer.attention, layer.mlp
    return {
        "input_layernorm.weight": layer.input_norm.weight,
        "post_attention_layernorm.weight": layer.mlp_norm.weight,
        **_linear_slots(
            attention.qkv_proj, {f"self_attn.{x}_proj": n for x, n in zip("qkv", attention.sizes, strict=True)}
        ),
        **_linear_slots(attention.o_proj, {"self_attn.o_proj": attention.o_proj.weight.shape[0]}),
        **_linear_slots(mlp.gate_up_proj, {"mlp.gate_proj": mlp.size, "mlp.up_proj": mlp.size}),
        **_linear_slots(mlp.down_proj, {"mlp.down_proj": mlp.down_proj.weight.shape[0]}),
        **_head_norm_slots(attention),
    }


def _linear_slots(linear: Linear, num_rows: dict[str, int]) -> dict[str, Tensor]:
    """The projections that share one weight, row block after row block."""
    names, sizes = list(num_rows), list(num_rows.values())
    slots = {f"{name}.weight": rows for name, rows in zip(names, linear.weight.split(sizes), strict=True)}
    if linear.bias is not None:
        slots |= {f"{name}.bias": rows for name, rows in zip(names, linear.bias.split(sizes), strict=True)}
    return slots


def _head_norm_slots(attention: Attention) -> dict[str, Tensor]:
    """The checkpoint has one row for all heads: copying broadcasts it."""
    if attention.qk_norm is None:
        return {}
    query, key = attention.qk_norm.weight.split((attention.num_heads, attention.num_kv_heads))
    return {"self_attn.q_norm.weight": query, "self_attn.k_norm.weight": key}
