"""Paired probes of a server: what must not change an answer, and what an answer must not do, whatever its weights.

They know no weights. Each answer that they get is also judged by the watch's referee. In reading order: `trial`,
`desk`, `pairs`, `limits`, `numbers`.
"""
