"""What of ours runs in the processes of vLLM's workers."""

from typing import Any

import numpy as np

from speculative.selfcheck.watch import SamplerWatch


class WorkerExtension:
    """Methods that vLLM's worker gets besides its own, through its argument `worker_extension_cls`."""

    model_runner: Any
    _watch: SamplerWatch

    def keep_draws_of_chunks(self) -> None:
        """Sample behind a chunk of a prompt without the request's generator.

        What is sampled there is thrown away. vLLM draws it from the request's own numbers all the same, and then winds
        the generator back, which one on the CPU cannot do: it raises, and the engine is lost.
        """
        runner = self.model_runner
        sample_tokens = runner.sample_tokens

        def sampling(*args: Any, **kwargs: Any) -> Any:
            batch = runner.input_batch
            thrown_away = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
            hidden = {row: batch.generators.pop(row) for row in thrown_away if row in batch.generators}
            try:
                return sample_tokens(*args, **kwargs)
            finally:
                batch.generators.update(hidden)

        runner.sample_tokens = sampling

    def cache_layout(self) -> str:
        """How the bytes of a block are to be understood."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return str(get_kv_transfer_group().layout)

    def watch_sampler(self, share: float) -> None:
        """Take the terms of the self-checks of that share of the steps."""
        from vllm.v1.sample import rejection_sampler

        batch = self.model_runner.input_batch
        self._watch = SamplerWatch(share, lambda: batch.req_ids)
        rejection_sampler.rejection_sample = self._watch.around(rejection_sampler.rejection_sample)

    def take_terms(self) -> list[tuple[list[str], list[list[float]], float]]:
        """The terms of the steps since the last call, as `HostTerms` has them."""
        return [(list(terms.checks), terms.sums.tolist(), terms.achievable) for terms in self._watch.take()]
