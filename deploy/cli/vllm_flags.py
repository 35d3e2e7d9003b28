"""vLLM's flags: those that our command lines take as settings, and for each other one where its setting is.

docs/from-vllm.md shows the same table (`make generated`).
"""

from collections.abc import Iterable, Mapping

from serve_app.backends.vllm_parts.settings import OWN_ARGUMENTS

PAGE = "docs/from-vllm.md"
ARGS = "applications[0].args"

TAKEN: Mapping[str, str] = {
    "--host": "http_options.host",
    "--port": "http_options.port",
    "--api-key": f"{ARGS}.access.keys_file",
    "--served-model-name": f"{ARGS}.model.name",
    "--revision": f"{ARGS}.model.source",
    "--max-model-len": f"{ARGS}.engine.max_model_len",
    "--quantization": f"{ARGS}.engine.quantization",
}
"""The setting that each flag which is taken changes, beside a model or a file."""

_ROWS = {
    "--model": "the first argument, MODEL",
    "--config": "the first argument, a file of truespec's settings; one of vLLM's flags is not read",
    "--dtype": "`engine.dtype`: `bfloat16` (the default) or `float32`",
    "--tensor-parallel-size": "`--engine vllm --gpus N`; our engine computes each replica on one device",
    "--data-parallel-size": "`--gpus N`, a replica on each, or `pools.*.replicas`",
    "--pipeline-parallel-size": "`--engine vllm`, `vllm.engine_args.pipeline_parallel_size` and `pools.*.num_gpus`",
    "--gpu-memory-utilization": "`pools.*.num_gpus`, below 1 a part of the memory, or `engine.kv_cache_tokens`; "
    "with `--engine vllm` it is `vllm.engine_args.gpu_memory_utilization`",
    "--device": "`--gpus N`; 0 is the CPU",
    "--headless --nnodes --node-rank --data-parallel-address": "none: `--address` is that of a Ray cluster of nodes",
    "--enforce-eager": "`engine.cuda_graphs: false`; with `--engine vllm` it is `vllm.engine_args.enforce_eager`",
    "--speculative-config --speculative-model --num-speculative-tokens": "`--drafter`, or the section `drafter`: "
    "`kind`, `model`, `num_draft_tokens`, `ngram_max`, `ngram_min`",
    "--kv-transfer-config": "`topology: disaggregated`, `handoff.transport`",
    "--lora-modules --enable-lora": "`--engine vllm` and `vllm.lora_modules`",
    "--generation-config --override-generation-config": "none: what a request leaves out is OpenAI's default, "
    "temperature 1 without a filter; send what the model's `generation_config.json` recommends",
    "--max-logprobs": "none: a request may ask for 20 a token",
    "--default-chat-template-kwargs": "none: a request has `chat_template_kwargs`",
    "--task --runner --convert": "none: models are served that write text",
    "--guided-decoding-backend --structured-outputs-config": "none: structured answers need no setting",
    "--seed": "none: a request with `seed` can be repeated, one without has a random one",
    "--tokenizer --hf-config-path": "none: tokenizer and `config.json` are those of the model's folder",
    "--tokenizer-mode --skip-tokenizer-init": "none: the tokenizer is read as `tokenizer.json` has it",
    "--tokenizer-revision": "`--revision`, which is for all files",
    "--load-format": "none: our engine reads safetensors; with `--engine vllm` it is `vllm.engine_args.load_format`",
    "--download-dir": "the variable `HF_HUB_CACHE`",
    "--hf-token": "the variable `HF_TOKEN`",
    "--chat-template": "`model.chat_template`",
    "--enable-auto-tool-choice --tool-call-parser": "found from the chat template (docs/tools.md); with "
    "`--engine vllm` also `vllm.tool_parser`",
    "--reasoning-parser --enable-reasoning": "`--engine vllm` and `vllm.reasoning_parser`; our engine leaves reasoning "
    "in the text",
    "--enable-chunked-prefill --enable-prompt-tokens-details --enable-request-id-headers": "always on",
    "--async-scheduling --scheduling-policy --stream-interval --num-scheduler-steps --preemption-mode "
    "--max-num-partial-prefills --long-prefill-token-threshold --max-seq-len-to-capture": "none: the engine decides",
    "--api-server-count": "`pools.router.replicas`",
    "--root-path": "`applications[0].route_prefix`",
    "--allowed-origins --allowed-methods --allowed-headers --allow-credentials": "`access.cors_origins`",
    "--ssl-keyfile --ssl-certfile --ssl-ca-certs": "none: put a proxy with TLS before it (docs/security.md)",
    "--uds": "none: it listens on `--host` and `--port`",
    "--otlp-traces-endpoint": "`observability.traces_endpoint`",
    "--uvicorn-log-level --disable-uvicorn-access-log --enable-log-requests --disable-log-requests --disable-log-stats "
    "--max-log-len --enable-log-outputs": "`observability.log_level`",
}
_ENGINE_ONLY = (
    "all2all-backend attention-backend calculate-kv-scales code-revision compilation-config config-format "
    "cpu-offload-gb cudagraph-capture-sizes decode-context-parallel-size disable-custom-all-reduce "
    "disable-sliding-window distributed-executor-backend enable-dbo enable-eplb enable-expert-parallel "
    "enable-sleep-mode hf-overrides kv-cache-dtype kv-cache-memory-bytes kv-offloading-size limit-mm-per-prompt "
    "lora-dtype max-loras max-lora-rank mm-processor-kwargs model-impl model-loader-extra-config "
    "prefix-caching-hash-algo rope-scaling rope-theta swap-space trust-remote-code"
)
_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-asc": "--api-server-count",
    "-sc": "--speculative-config",
    "-O": "--compilation-config",
    "-cc": "--compilation-config",
    "-dcp": "--decode-context-parallel-size",
    "-ep": "--enable-expert-parallel",
}


def rows() -> dict[str, str]:
    """Return where each flag of vLLM's is set here, or why it is not; flags of one answer are one row."""
    found = {
        flag: f"the same, of `truespec serve`, or `{setting.removeprefix(f'{ARGS}.')}`"
        for flag, setting in TAKEN.items()
    }
    named = {flag for flags in (*found, *_ROWS) for flag in flags.split()}
    for name, setting in OWN_ARGUMENTS.items():
        flag = f"--{name.replace('_', '-')}"
        if setting is not None and flag not in named:
            found[flag] = f"`{setting}`"
    engine_only = " ".join(f"--{name}" for name in _ENGINE_ONLY.split())
    return found | _ROWS | {engine_only: "`--engine vllm` and `vllm.engine_args`, with underscores"}


def flag_of(word: str) -> str:
    """Return the flag of a word of a command line: without its value, and with hyphens."""
    return word.partition("=")[0].partition(".")[0].replace("_", "-")


def explained(words: Iterable[str]) -> str:
    """Return what to do instead of each flag of vLLM's among some words; empty where there is none."""
    said = {}
    for word in words:
        name = _SHORT.get(flag_of(word)) or _SHORT.get(word[:2]) or flag_of(word)
        names = {name, name.replace("--no-", "--", 1)}
        for here in (here for flags, here in rows().items() if names.intersection(flags.split())):
            said[name] = f"{word.partition('=')[0]} is a flag of vLLM's. Here it is {here}."
    how = "Settings are given by --set NAME=VALUE, or in a file, which `truespec config show MODEL` writes."
    return "\n".join(said.values()) + f" {how} {PAGE} has all flags." if said else ""
