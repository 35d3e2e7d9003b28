"""Any traffic: random requests, batches, aborts, preemptions, handoffs and moves, against rules and a naive loop."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.request import FinishReason, Request, SamplingParams
from speculative.sampling.rng import gumbel
from speculative.state.sequence import Phase
from tests.support.engines import (
    Answer,
    assert_idle,
    assert_pool_is_whole,
    decoder_of,
    exported,
    insert,
    live_sequences,
    naive_logits,
    take,
    tiny_engine,
)
from tests.support.tiny_models import write_tiny_model

VOCABULARY = 48
NEAR_TIE = 1e-4
DRAFTER = DrafterConfig.of(kind="ngram", num_draft_tokens=4, ngram_max=3, ngram_min=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("properties") / "m", vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def reference(folder: Path) -> EngineCore:
    return tiny_engine(folder)


tokens = st.integers(3, 12)  # few of them, so that n-grams come again
prompts = st.lists(tokens, min_size=1, max_size=40).map(tuple)
parameters = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    logit_bias=st.sampled_from([(), ((5, 2.0),)]),
    stop_token_ids=st.sampled_from([(), (7,)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 3]),
    logprob_token_ids=st.sampled_from([(), (4, 9)]),
    speculate=st.sampled_from([True, True, False]),
    reproducible=st.just(True),
)
# What may happen between two steps; numbers choose whom.
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, parameters),
        st.tuples(st.just("add"), prompts, parameters),
        st.tuples(st.just("prefill"), prompts, parameters),
        st.tuples(st.just("abort"), st.integers(0, 50)),
        st.tuples(st.just("move"), st.integers(0, 50)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    max_size=25,
)


class Service:
    """A prefill and a decode engine, the second with hardly enough blocks, and everything that was asked of them."""

    def __init__(self, folder: Path, *, caching: bool) -> None:
        common = {"drafter": DRAFTER, "prefix_caching": caching}
        self.prefill = tiny_engine(folder, **common)
        self.decode = tiny_engine(folder, max_num_seqs=4, kv_cache_tokens=112, max_model_len=72, **common)
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = defaultdict(Answer)
        self.aborted: set[str] = set()

    def apply(self, operation: tuple) -> None:  # type: ignore[type-arg]
        match operation:
            case ("add", prompt, params):
                self.decode.add(self._request(prompt, params))
            case ("prefill", prompt, params):
                self.prefill.add(self._request(prompt, params), prefill_only_after=len(self.requests) % 2)
            case ("abort", number) if self.requests:
                name = f"r{number % len(self.requests)}"
                self.aborted |= {name} if any([self.decode.abort(name), self.prefill.abort(name)]) else set()
            case ("move", number):
                self._move(number)
            case ("step", count):
                for _ in range(count):
                    self.step()

    def step(self) -> None:
        for engine in (self.prefill, self.decode):
            take(self.answers, engine.step())
            self._assert_rules(engine)
        for name in self.prefill.held_ids:
            insert(self.decode, self.requests[name], exported(self.prefill, name))

    def finish(self) -> None:
        for _ in range(2000):
            if not (self.prefill.has_work or self.decode.has_work or self.prefill.held_ids):
                return
            self.step()
        raise AssertionError("the engines never come to an end")

    def _request(self, prompt: tuple[int, ...], params: SamplingParams) -> Request:
        number = len(self.requests)
        self.requests[f"r{number}"] = Request(f"r{number}", prompt, params, seed=1000 + number)
        return self.requests[f"r{number}"]

    def _move(self, number: int) -> None:
        """Drop a running request and take it up again from the tokens it has emitted, as after a dead replica."""
        running = [seq for seq in live_sequences(self.decode) if seq.phase is not Phase.HELD]
        if running:
            request = running[number % len(running)].request
            self.decode.abort(request.request_id)
            self.decode.add(request, emitted=self.answers[request.request_id].token_ids)

    def _assert_rules(self, engine: EngineCore) -> None:
        assert_pool_is_whole(engine)
        for sequence in live_sequences(engine):
            if sequence.phase is Phase.RUNNING:
                assert sequence.num_computed < len(sequence.tokens)
                assert sequence.num_computed <= len(sequence.blocks) * engine.config.block_size
            if sequence.phase is Phase.HELD:
                assert sequence.num_computed == len(sequence.tokens) - 1


@torch.inference_mode()
def naive_text(engine: EngineCore, request: Request, reported: list[int]) -> tuple[list[int], float]:
    """The text by the loop one would write first, and how near a tie was where it parts from the emitted one."""
    params, output = request.params, list[int]()
    eos = () if params.ignore_eos else engine.model.eos_token_ids
    while len(output) < params.max_tokens and len(request.prompt_token_ids) + len(output) < 72:
        logits = naive_logits(decoder_of(engine), torch.tensor([[*request.prompt_token_ids, *output]]))[0, -1].double()
        scores = naive_distribution(logits, request, output)
        if not params.greedy:
            position = torch.tensor([len(request.prompt_token_ids) + len(output)])
            scores = scores + gumbel(torch.tensor([request.seed]), position, VOCABULARY)[0]
        best = scores.topk(2)
        output.append(int(best.indices[0]))
        if len(reported) < len(output) or reported[len(output) - 1] != output[-1]:
            return output, float(best.values[0] - best.values[1])
        if output[-1] in eos or output[-1] in params.stop_token_ids:
            break
    return output, 0.0


def naive_distribution(logits: torch.Tensor, request: Request, output: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token, parameter by parameter, in float64."""
    params = request.params
    logits = logits.clone()
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in {*request.prompt_token_ids, *output}:
        logits[token] *= params.repetition_penalty ** (-1 if logits[token] > 0 else 1)
    for token in output:
        logits[token] -= params.frequency_penalty
    if params.greedy:
        return logits
    logits = (logits / params.temperature).log_softmax(-1)
    logits[logits < logits.max() + torch.tensor(max(params.min_p, 1e-30)).log()] = -torch.inf
    if params.top_k:
        logits[logits < logits.topk(params.top_k).values[-1]] = -torch.inf
    order = logits.softmax(-1).sort(descending=True)
    dropped = order.values.cumsum(-1) - order.values >= params.top_p
    logits[order.indices[dropped]] = -torch.inf
    return logits.log_softmax(-1)


@settings(max_examples=80, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=operations, caching=st.booleans())
def test_any_traffic_keeps_the_rules_and_the_text(
    folder: Path,
    reference: EngineCore,
    operations: list[tuple],
    caching: bool,  # type: ignore[type-arg]
) -> None:
    service = Service(folder, caching=caching)
    for operation in operations:
        service.apply(operation)
    service.finish()
    assert_idle(service.prefill)
    assert_idle(service.decode)
    for name, request in service.requests.items():
        answer = service.answers[name]
        if name in service.aborted:
            continue
        assert answer.error is None, answer.error
        assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if request.params.logprobs is not None:
            assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
        expected, gap = naive_text(reference, request, answer.token_ids)
        assert answer.token_ids == expected or abs(gap) < NEAR_TIE, f"{name}: {answer.token_ids} against {expected}"
