"""The parts of the vLLM engine; `serve_app.backends.vllm_backend` puts them together."""
