"""What the vLLM engine is made of, piece by piece; `serve_app.backends.vllm_backend` puts them together."""
