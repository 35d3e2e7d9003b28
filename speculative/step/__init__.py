"""Runs a step: `executor` chooses how and measures it, `eager_step` drafts, runs the target and has `sampler` verify.

`prompt_scorer` scores known tokens. The room knows batches, not requests: what is scheduled and what is committed is
decided elsewhere.
"""
