"""Model families, one a file: what config.json of an architecture means, and how its layers differ from Llama's.

A file has `MODEL_TYPE`, as config.json names it, and `read`, which makes a `ModelConfig` of a `ConfigFile` with the
defaults of the configuration class in transformers. Here stands which file is of which architecture.
"""

FAMILIES = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite4",
    "LlamaForCausalLM": "llama",
    "MinistralForCausalLM": "ministral",
    "MistralForCausalLM": "mistral",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}
