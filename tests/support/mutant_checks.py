"""What the offline suite asks of an engine, as functions that raise AssertionError where the answer is wrong.

Each takes a `World`, which makes engines; the mutants' world puts its fault into every engine that is under test, and
into none that only serves as a reference.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from speculative.config import DrafterConfig, EngineConfig
from speculative.drafting.base import Drafter, DraftOutput
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams
from speculative.sampling.draft_probs import PointMass
from speculative.state.batch import Batch
from tests.support.engines import Answer, answer_all, hand_over, run
from tools.faults.toy import tiny_engine

Install = Callable[[EngineCore], None]
Check = Callable[["World"], None]
LOOP = tuple([5, 9, 17, 33, 5, 9, 17, 33] * 3)
PROMPTS = [LOOP, LOOP[:11], tuple(range(3, 40)), (7,) * 9, tuple(3 + (5 * i) % 23 for i in range(60))]
GREEDY = SamplingParams(max_tokens=30, temperature=0, logprobs=3, ignore_eos=True)
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@dataclass(frozen=True)
class World:
    """Makes engines over one tiny model, with a fault in those that are under test."""

    folder: Path
    install: Install = lambda engine: None

    def engine(self, proposer: Drafter | None = None, *, faulty: bool = True, **config: object) -> EngineCore:
        settings = {"dtype": "float32", "device": "cpu", "kv_cache_tokens": 4096, "prefix_caching": False}
        settings["drafter"] = DrafterConfig.of(kind="ngram", num_draft_tokens=4, ngram_min=1)  # type: ignore[assignment]
        engine = EngineCore.load(self.folder, EngineConfig(**{**settings, **config}))  # type: ignore[arg-type]
        engine.parts.eager.drafter = proposer or engine.drafter
        if faulty:
            self.install(engine)
        return engine

    def plain(self, **config: object) -> EngineCore:
        return self.engine(faulty=False, drafter=DrafterConfig(kind="none"), **config)


def requests(params: SamplingParams) -> list[Request]:
    return [Request(f"r{i}", prompt, params, seed=i) for i, prompt in enumerate(PROMPTS)]


def assert_teacher_forced(world: World, request: Request, answer: Answer) -> None:
    """What was served equals what another engine says about the same tokens, without speculation."""
    whole = (*request.prompt_token_ids, *answer.token_ids)
    scoring = Request("score", whole, score_from=len(request.prompt_token_ids))
    scores = answer_all(world.plain(), [scoring])["score"].values
    drift = max(abs(a - b) for a, b in zip(answer.values, scores, strict=True))
    assert drift < 1e-4, f"logprobs drifted by {drift:.3g} nats"


# -- the checks ----------------------------------------------------------------------------------------------------


@check
def greedy_equals_plain(world: World) -> None:
    """With every kind of parameter, drafted positions included."""
    for params in (
        GREEDY,
        replace(GREEDY, frequency_penalty=0.3, bad_words=((9,),)),
        replace(GREEDY, frequency_penalty=2, presence_penalty=1, repetition_penalty=1.3),
        replace(GREEDY, allowed_token_ids=tuple(range(2, 40)), logit_bias=((5, 3.0),)),
    ):
        reference = answer_all(world.plain(), requests(params))
        for drafter in (None, OracleDrafter(reference)):
            found = answer_all(world.engine(drafter), requests(params))
            for name, answer in reference.items():
                assert found[name].token_ids == answer.token_ids, name


class OracleDrafter(Drafter):
    """Drafts what is known to come, so that whole runs are accepted."""

    def __init__(self, reference: dict[str, Answer]) -> None:
        self.texts = {name: answer.token_ids for name, answer in reference.items()}

    def propose(self, batch: Batch) -> DraftOutput:
        drafts = []
        for entry in batch.entries:
            text, said = self.texts[entry.sequence.request.request_id], entry.sequence.num_output
            drafts.append(text[said : said + entry.max_drafts])
        return DraftOutput.pack(drafts, PointMass())


@check
def logprobs_are_teacher_forced(world: World) -> None:
    for params in (GREEDY, replace(GREEDY, temperature=1.0)):
        for request in requests(params):
            answer = answer_all(world.engine(), [request])[request.request_id]
            assert answer.error is None, answer.error
            assert_teacher_forced(world, request, answer)


@check
def logprobs_hold_near_the_length_limit(world: World) -> None:
    for room in range(1, 9):
        engine = world.engine(max_model_len=len(LOOP) + 12 + room)
        request = Request("r", LOOP, replace(GREEDY, max_tokens=200))
        answer = answer_all(engine, [request])["r"]
        assert len(answer.token_ids) == 12 + room
        assert_teacher_forced(world, request, answer)


@check
def logprobs_hold_after_a_handoff_into_a_used_slot(world: World) -> None:
    prefill, decode = world.engine(), world.engine(max_num_seqs=1)
    for request in requests(GREEDY):
        begun = hand_over(prefill, decode, [request])
        assert_teacher_forced(world, request, run(decode, begun)[request.request_id])


@check
def prompt_logprobs_are_teacher_forced(world: World) -> None:
    prompt = tuple(3 + (7 * i) % 41 for i in range(53))
    reference = answer_all(world.plain(), [Request("s", prompt, score_from=1)])["s"].values
    params = SamplingParams(max_tokens=2, prompt_logprobs=2)
    engine = world.engine(max_num_seqs=2, max_batched_tokens=16)
    reported = answer_all(engine, [Request("r", prompt, params)])["r"].deltas[0].prompt_logprobs
    assert reported is not None
    drift = max(abs(a.logprob - b) for a, b in zip(reported, reference, strict=True))
    assert drift < 1e-4


@check
def preemption_changes_nothing(world: World) -> None:
    params = replace(GREEDY, max_tokens=60, frequency_penalty=0.8, repetition_penalty=1.2)
    reference = answer_all(world.plain(), requests(params))
    engine = world.engine(kv_cache_tokens=192, max_model_len=160, max_num_seqs=4)
    found = answer_all(engine, requests(params))
    assert engine.take_stats().num_preemptions > 0
    for name, answer in reference.items():
        assert found[name].token_ids == answer.token_ids, name


@check
def drafts_go_on_from_the_prefix_cache(world: World) -> None:
    """What a drafter keeps of a shared prefix changes no token that is emitted, only how many of its drafts survive."""
    prompt = tuple(3 + (7 * i) % 41 for i in range(50))
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    rounds = []
    for caching in (False, True):
        engine = tiny_engine(own_drafts=True, prefix_caching=caching)
        if caching:
            world.install(engine)
        answer_all(engine, [Request("first", prompt, params)])
        again = answer_all(engine, [Request("again", prompt, params)])["again"]
        assert (again.num_cached_tokens > 0) == caching
        rounds.append([(delta.token_ids, delta.num_drafted, delta.num_accepted) for delta in again.deltas])
    assert rounds[0] == rounds[1]


@check
def unseeded_requests_differ(world: World) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.3)
    found = answer_all(world.engine(), [Request(f"r{i}", LOOP, params) for i in range(16)])
    assert len({tuple(answer.token_ids) for answer in found.values()}) == 16


@check
def nothing_follows_a_stop(world: World) -> None:
    said = answer_all(world.plain(), [Request("r", LOOP, replace(GREEDY, frequency_penalty=2))])
    reference = said["r"].token_ids
    for token in dict.fromkeys(reference):
        params = replace(GREEDY, frequency_penalty=2, stop_token_ids=(token,))
        answer = answer_all(world.engine(OracleDrafter(said)), [Request("r", LOOP, params)])["r"]
        assert answer.token_ids == reference[: reference.index(token) + 1]
        assert answer.stop_token_id == token


@check
def speculation_stays_on_while_logprobs_are_asked_for(world: World) -> None:
    engine = world.engine()
    answer_all(engine, [Request("r", LOOP, GREEDY)])
    assert engine.take_stats().num_drafted > 0
