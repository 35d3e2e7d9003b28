"""The tokens that one request forbids, favours and penalises, prepared once and kept up with its output."""

from collections import defaultdict
from collections.abc import Sequence as Tokens
from typing import Any

import numpy as np

from speculative.request import SamplingParams

Int64s = np.ndarray[Any, np.dtype[np.int64]]
Float32s = np.ndarray[Any, np.dtype[np.float32]]


class TokenRules:
    """The rules of one request's parameters, on the host.

    allowed: [A] the only tokens that may come; None = all.
    biases: ([B] tokens, [B] added to their logits).
    penalised: whether what was said so far counts.
    reads_drafts: whether it matters which tokens the drafts are, beside what they count for.
    most_biased: at most so many tokens are biased or forbidden at a position, those that end any answer aside.
    """

    def __init__(self, params: SamplingParams, prompt: Tokens[int]) -> None:
        self._params = params
        self.allowed = None if params.allowed_token_ids is None else _int64s(sorted(set(params.allowed_token_ids)))
        biases: dict[int, float] = defaultdict(float)
        for token, bias in params.logit_bias:
            biases[token] += bias
        self.biases = (_int64s(list(biases)), np.array(list(biases.values()), np.float32))
        self._banned = [word[0] for word in params.bad_words if len(word) == 1]
        self._phrases: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # by their last token but one
        for word in params.bad_words:
            if len(word) > 1:
                self._phrases[word[-2]].append(word)
        self._memory = max((len(word) - 1 for word in params.bad_words), default=0)
        self.penalised = params.penalised
        self.reads_drafts = bool(self._phrases)
        at_once = max(map(len, self._phrases.values()), default=0)
        self.most_biased = len(biases) + len(self._banned) + at_once + len(params.stop_token_ids)
        self._counts = _Counts(prompt if params.repetition_penalty != 1 else ())

    def forbidden(self, output: Tokens[int], drafts: Tokens[int], eos_token_ids: Tokens[int]) -> list[int]:
        """Tokens that may not follow output + drafts: they would complete a bad word, or end the answer too soon."""
        forbidden = list(self._banned)
        if self._phrases:
            said = (*output[-self._memory :], *drafts)
            phrases = self._phrases.get(said[-1], ()) if said else ()
            forbidden += [word[-1] for word in phrases if said[1 - len(word) :] == word[:-1]]
        if len(output) + len(drafts) < self._params.min_tokens:
            forbidden += self._params.stop_token_ids
            forbidden += () if self._params.ignore_eos else eos_token_ids
        return forbidden

    def biased(self, output: Tokens[int], drafts: Tokens[int], eos_token_ids: Tokens[int]) -> tuple[Int64s, Float32s]:
        """Tokens [U], each once, and what is added to their logits after output + drafts: -inf to a forbidden one's."""
        tokens, values = self.biases
        forbidden = self.forbidden(output, drafts, eos_token_ids)
        if not forbidden:
            return tokens, values
        banned = _int64s(list(dict.fromkeys(forbidden)))
        bans = np.full(len(banned), -np.inf, np.float32)
        if not tokens.size:
            return banned, bans
        may_come = ~np.isin(tokens, banned)
        return np.concatenate([tokens[may_come], banned]), np.concatenate([values[may_come], bans])

    def counted(self, output: Tokens[int]) -> tuple[Int64s, Int64s, Any]:
        """Tokens [U] of prompt and output that are penalised; how often they stand in the output, and whether in the
        prompt, [U] each."""
        return self._counts.of(output)

    def penalties(self, output: Tokens[int], drafts: Tokens[int]) -> tuple[Int64s, Float32s, Float32s]:
        """Return what prompt, output and the first j drafts take from the logits that follow them.

        Sources: repetition: Keskar et al., "CTRL" (2019); frequency and presence: the OpenAI API.

        Returns:
            tokens [U], each once. factors [n + 1, U]: row j divides positive logits and multiplies the others.
            losses [n + 1, U]: then subtracted. 1 and 0 where row j has not seen the token.
        """
        params = self._params
        tokens, emitted, in_prompt = self._counts.after(output, drafts)
        factors = np.where(in_prompt | (emitted > 0), params.repetition_penalty, 1.0)
        losses = params.frequency_penalty * emitted + params.presence_penalty * (emitted > 0)
        return tokens, factors.astype(np.float32), losses.astype(np.float32)


def rules_of(params: SamplingParams, prompt: Tokens[int]) -> TokenRules | None:
    """The rules of a request; None when it has none."""
    return TokenRules(params, prompt) if params.ruled else None


class _Counts:
    """Counts of emitted tokens: every output token is counted once, whenever the counts are next asked for."""

    def __init__(self, prompt: Tokens[int]) -> None:
        self._tokens = np.unique(_int64s(prompt))  # then those of the output that are new
        self._num_prompt = len(self._tokens)
        self._emitted = np.zeros(len(self._tokens), np.int64)
        self._place = {token: place for place, token in enumerate(self._tokens.tolist())}
        self._num_counted = 0

    def of(self, output: Tokens[int]) -> tuple[Int64s, Int64s, Any]:
        """Tokens [U]; how often they stand in the output [U]; whether in the prompt [U]. Not to be written to."""
        self._catch_up(output)
        return self._tokens, self._emitted, np.arange(len(self._tokens)) < self._num_prompt

    def after(self, output: Tokens[int], drafts: Tokens[int]) -> tuple[Int64s, Int64s, Any]:
        """Tokens [U]; how often they stand in output + drafts[:j], row by row [n + 1, U]; whether in the prompt [U]."""
        self._catch_up(output)
        new = [token for token in dict.fromkeys(drafts) if token not in self._place]
        place = dict(zip(new, range(len(self._tokens), len(self._tokens) + len(new)), strict=True))
        tokens = np.concatenate([self._tokens, _int64s(new)])
        emitted = np.zeros((len(drafts) + 1, len(tokens)), np.int64)
        emitted[:, : len(self._emitted)] = self._emitted
        for offset, token in enumerate(drafts, start=1):
            emitted[offset:, place[token] if token in place else self._place[token]] += 1
        return tokens, emitted, np.arange(len(tokens)) < self._num_prompt

    def _catch_up(self, output: Tokens[int]) -> None:
        fresh = output[self._num_counted :]
        self._num_counted = len(output)
        if not fresh:
            return
        new = [token for token in dict.fromkeys(fresh) if token not in self._place]
        for token in new:
            self._place[token] = len(self._place)
        self._tokens = np.concatenate([self._tokens, _int64s(new)])
        self._emitted = np.concatenate([self._emitted, np.zeros(len(new), np.int64)])
        np.add.at(self._emitted, [self._place[token] for token in fresh], 1)


def _int64s(tokens: Tokens[int]) -> Int64s:
    return np.array(tokens, np.int64)
