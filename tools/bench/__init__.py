"""`python -m tools.bench`: engines side by side in one run, on the same model, prompts and sampling."""
