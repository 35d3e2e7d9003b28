"""Audits of a real model: its own engine and chat prompts, instead of a table."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deploy.exchange.prompts import KINDS, read_prompts
from deploy.run.models import find_model
from serve_app.backends.torch_backend import load_engine
from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore
from speculative.errors import ConfigError
from speculative.request import Request
from tools.faults.run import CleanSetting

_NUM_DRAFTS = 3
_MAX_TOKENS = 96


@dataclass(frozen=True, slots=True)
class AuditedModel:
    """A model folder, and the trained head that drafts for it."""

    folder: Path
    head: str

    @classmethod
    def find(cls, model: str, head: str | None) -> "AuditedModel":
        """A catalogue name, a folder or a hub id; and a head, by name or folder.

        Raises:
            ConfigError: there is no such model, or no head: only one that draws its drafts tries all the terms.
        """
        if head is None:
            raise ConfigError(
                "--head is missing: name the draft head of --model, which draws drafts from a distribution."
            )
        return cls(find_model(model), head)

    def serve(self, setting: CleanSetting, seed: int) -> tuple[EngineCore, Iterator[Request]]:
        """An engine with the setting, and endless chat requests."""
        config = EngineConfig(
            max_num_seqs=16,
            kv_cache_tokens=16384,
            verifier=setting.verifier,
            self_check_sample_rate=1.0,
            drafter=DrafterConfig(
                kind="eagle3", model=self.head, sampled=not setting.deterministic, num_draft_tokens=_NUM_DRAFTS
            ),
        )
        return load_engine(self.folder, config), self._requests(setting, seed)

    def _requests(self, setting: CleanSetting, seed: int) -> Iterator[Request]:
        prompts = [tuple(prompt) for kind in read_prompts(self.folder, KINDS).values() for prompt in kind]
        params = replace(setting.params, max_tokens=_MAX_TOKENS, logprobs=2)
        random = np.random.default_rng(seed)
        while True:
            prompt, number = prompts[int(random.integers(len(prompts)))], int(random.integers(2**62))
            yield Request(f"r{number}", prompt, params, seed=number)
