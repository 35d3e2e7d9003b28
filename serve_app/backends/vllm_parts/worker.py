"""Our code in vLLM's worker processes."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from serve_app.backends.vllm_parts.cpu_layouts import other_than_sent, reload_in_same_layout
from serve_app.backends.vllm_parts.settings import TERMS
from speculative.selfcheck.sampler_watch import SamplerWatch
from speculative.selfcheck.vllm_draws import samples_so


class WorkerExtension:
    """Methods added to vLLM's worker, through its argument `worker_extension_cls`."""

    model_runner: Any
    reload_weights: Callable[..., None]  # the worker's own
    _watch: SamplerWatch

    def keep_draws_of_chunks(self) -> None:
        """Sample after a chunk of a prompt without the request's generator.

        That sample is discarded. vLLM still draws it from the request's own generator and then rewinds that, which a
        CPU generator cannot do: it raises, and the engine is lost.
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

    def keep_adapters_apart(self) -> None:
        """Keep adapters from affecting requests that have none.

        In a step with both, the CPU's kernels look up the weights of tokens without an adapter at -1, and take those of
        the last adapter slot. Zeros in place of such tokens contribute nothing with any weights.
        """
        from vllm.lora.punica_wrapper import punica_cpu

        shrink = punica_cpu.sgmv_shrink  # the first of the two products; its zeros stay zeros in the second

        def shrinking(
            inputs: Any, weights: Any, output: Any, starts: Any, lengths: Any, slots: Any, *rest: Any
        ) -> None:
            adapted = (slots >= 0).repeat_interleave(lengths).unsqueeze(1)  # [tokens, 1]
            shrink(inputs.where(adapted, 0), weights, output, starts, lengths, slots, *rest)

        punica_cpu.sgmv_shrink = shrinking

    def keep_raw_logprobs(self) -> None:
        """Apply structured-output masks after the point where raw logprobs are taken.

        vLLM masks the logits before, and so reports 0 for a forced token, however unlikely it was for the model.
        Requests with a structure draft nothing here: each has one row, in batch order.
        """
        from vllm.v1.worker import gpu_model_runner

        sampler = self.model_runner.sampler
        mask, process = gpu_model_runner.apply_grammar_bitmask, sampler.apply_logits_processors
        due: list[tuple[Any, Any]] = []

        def put_off(scheduled: Any, grammar: Any, batch: Any, logits: Any) -> None:
            del scheduled, logits
            due.append((grammar, batch))

        def processing(*args: Any, **kwargs: Any) -> Any:
            logits = process(*args, **kwargs)  # [rows, vocabulary]
            while due:
                mask(SimpleNamespace(scheduled_spec_decode_tokens={}), *due.pop(), logits)
            return logits

        gpu_model_runner.apply_grammar_bitmask = put_off
        sampler.apply_logits_processors = processing

    def cache_layout(self) -> str:
        """Layout of a block's bytes."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return str(get_kv_transfer_group().layout)

    def reload_target(self, path: str) -> None:
        """Read the target's weights from a folder, and compare them with it."""
        model = self.model_runner.get_model()
        reload_in_same_layout(model, lambda: self.reload_weights(weights_path=path))
        if name := other_than_sent(model, Path(path)):
            raise RuntimeError(f"after the update {name} is another tensor than was sent; restart the replica.")

    def reload_drafter(self, path: str) -> None:
        """Read the drafter's weights from a folder; what it shares with the target stays the target's.

        vLLM reads the target's again only. A head that came without an embedding or an LM head, or with copies of the
        target's, has the target's modules in their place: what the checkpoint says of these is passed over.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader, reload

        runner = self.model_runner
        model, config = runner.drafter.model, runner.speculative_config.draft_model_config
        model = model.unwrap() if hasattr(model, "unwrap") else model
        # Modules of the target that the drafter uses: in which of its own, under which name.
        of_target = {id(module) for module in runner.get_model().modules()}
        own = [module for module in model.modules() if id(module) not in of_target]
        shared = [
            (module, name, one) for module in own for name, one in module.named_children() if id(one) in of_target
        ]
        names = {name for _, name, _ in shared}
        config.model, config.revision = path, None
        for owner, name, _ in shared:
            delattr(owner, name)

        def read() -> None:
            weights = get_model_loader(runner.load_config).get_all_weights(config, model)
            reload.initialize_layerwise_reload(model)
            model.load_weights((name, tensor) for name, tensor in weights if names.isdisjoint(name.split(".")))
            reload.finalize_layerwise_reload(model, config)

        try:
            with set_current_vllm_config(runner.vllm_config):
                reload_in_same_layout(model, read)
        finally:
            for owner, name, module in shared:
                setattr(owner, name, module)

    def watch_sampler(self, share: float, sampled: bool) -> None:
        """Check what is sampled in this share of the steps; `sampled`: drafts come with q."""
        from vllm.v1.sample import rejection_sampler
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        runner = self.model_runner

        def counts(name: str) -> bool:
            terms = (runner.requests[name].sampling_params.extra_args or {}).get(TERMS) or {}
            return not terms.get("chosen_seed", False)

        def owners() -> list[str | None]:
            thrown_away = runner.discard_request_mask.np
            names = enumerate(runner.input_batch.req_ids)
            return [name if counts(name) and not thrown_away[row] else None for row, name in names]

        self._watch = SamplerWatch(share, sampled=sampled, owners=owners)
        runner.sampler.sample = self._watch.around_sample(runner.sampler.sample, apply_top_k_top_p)
        rejection_sampler.rejection_sample = self._watch.around_rejection(rejection_sampler.rejection_sample)

    def draws_can_be_repeated(self) -> bool:
        """Return whether this sampler draws as `vllm_draws` says; those of GPUs do not."""
        runner = self.model_runner
        return runner.device.type == "cpu" and samples_so(runner.sampler.topk_topp_sampler)

    def take_checked(self) -> tuple[list[tuple[list[str], list[list[float]], float]], dict[str, int], float]:
        """Of the steps since the last call: the terms, as `Terms` has them; broken invariants; and how many more drafts
        they should have accepted."""
        terms = [(list(terms.checks), terms.sums.tolist(), terms.achievable) for terms in self._watch.take()]
        return terms, self._watch.take_violations(), self._watch.take_excess()
