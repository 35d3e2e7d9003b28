"""The compiled kernels against plain torch, in the types and sizes that serve."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from speculative.gpu.buckets import Bucket
from speculative.gpu.logit_edits import LogitEdits, StepEdits
from speculative.gpu.packed_attention import sending_packed
from speculative.gpu.paged_attention import SPLIT_TOKENS, AttentionSizes, PagedRows
from speculative.gpu.row_judge import RowFields
from speculative.model.attention import StepAttention
from speculative.model.config import PLAIN, ScoreRule
from speculative.state.batch import AttentionRows
from speculative.state.kv_cache import KVCache, KVShape
from tests.speculative.gpu.test_paged_attention import scene
from tests.support.drafted_rows import NUM_DRAFTS, OFFSET, assert_sampled, draft_scene
from tests.support.edited_rows import ALL as EDITED_ROWS
from tests.support.edited_rows import EOS, input_of, logits_of, masks_of, rows_of
from tests.support.judged_rows import KINDS, Scene, assert_equal, filtered, padded, parts
from tests.support.judged_rows import scene as rows_to_judge
from tests.support.long_contexts import error_of
from tests.support.torch_operators import TorchAttend, torch_edit, torch_floors

pytestmark = pytest.mark.gpu
BLOCK_SIZE, MAX_BLOCKS, MAX_QUERIES = 16, 128, 5
SIZES = AttentionSizes(BLOCK_SIZE, MAX_QUERIES, MAX_BLOCKS)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
RULED = ScoreRule(window=300, cap=5.0)
HEADS = [(9, 3, 64), (32, 8, 128), (16, 1, 80), (4, 4, 32)]


def paged(
    cuda: torch.device, heads: tuple[int, int, int], contexts: list[int], num_queries: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, PagedRows]:
    """Sequences with `num_queries` rows behind contexts of these lengths; one of -1 is padding."""
    rows = [(length, num_queries) if length >= 0 else (0, 0) for length in contexts]
    *tensors, paged_rows = scene(heads, rows, num_queries, dtype, max_blocks=MAX_BLOCKS)
    query, keys, values = (tensor.to(cuda) for tensor in tensors)
    places = (paged_rows.slots, paged_rows.visible, paged_rows.blocks)
    return query, keys, values, PagedRows(*(place.to(cuda) for place in places))


# A sum in float16 would be off by 2.4e-4 and more. Tensor cores cut off what float32 does not hold, where others round:
# 2**-23 for each 16 of the 4,200 positions make 3.1e-5.
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 8e-6), (torch.float16, 6e-5), (torch.bfloat16, 2e-4)])
@pytest.mark.parametrize("kernel", ["splits", "packed"])
def test_long_contexts_are_added_up_in_float32(
    cuda: torch.device, kernel: str, dtype: torch.dtype, limit: float
) -> None:
    assert error_of(kernel, dtype, cuda) < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
def test_the_kernels_agree_with_torch(cuda: torch.device, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    from speculative.gpu.triton_attention import TritonAttend

    contexts = [0, 1, 15, 16, SPLIT_TOKENS - 3, SPLIT_TOKENS, 1000, -1, 2000]
    for num_queries, rule in ((1, PLAIN), (2, RULED), (4, PLAIN), (MAX_QUERIES, RULED), (MAX_QUERIES, PLAIN)):
        arguments = paged(cuda, heads, contexts, num_queries, dtype)
        found, expected = TritonAttend(SIZES)(*arguments, rule), TorchAttend(BLOCK_SIZE)(*arguments, rule)
        assert (found.float() - expected.float()).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
def test_a_rows_bits_depend_on_neither_neighbours_nor_padding(
    cuda: torch.device, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    from speculative.gpu.triton_attention import TritonAttend

    attend, contexts = TritonAttend(SIZES), [700, 3, -1, 1500, 255, 256]
    for rule, num_queries in itertools.product((PLAIN, RULED), (1, 3, MAX_QUERIES)):
        whole, again = (attend(*paged(cuda, heads, contexts, num_queries, dtype), rule) for _ in range(2))
        assert torch.equal(whole, again), "two runs give the same bits"
        for index in (0, 3, 4, 5):
            alone = attend(*paged(cuda, heads, [-1] * index + [contexts[index]], num_queries, dtype), rule)
            assert torch.equal(alone[-num_queries:], whole.unflatten(0, (-1, num_queries))[index])
        query, keys, values, rows = paged(cuda, heads, contexts, num_queries, dtype)
        few = torch.arange(len(query), device=cuda) % num_queries == 0  # packed: the last one has all, others one row
        few[-num_queries:] = True
        starts = torch.tensor([len(contexts), *range(len(contexts)), int(few.sum())], dtype=torch.int32, device=cuda)
        packed = PagedRows(rows.slots[few], rows.visible[few], rows.blocks, 0, starts)
        assert torch.equal(attend(query[few], keys, values, packed, rule)[-num_queries:], whole[-num_queries:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [*HEADS, (7, 1, 96), (16, 2, 256)])
def test_prompts_and_chunks_are_attended_as_torch_does(
    cuda: torch.device, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Against `StepAttention`; and in one piece or in two, the bits of a prompt are the same."""
    from speculative.gpu.triton_prompts import triton_attend_packed

    num_heads, num_kv_heads, head_dim = heads
    send = sending_packed(BLOCK_SIZE, 0, triton_attend_packed)
    cache = KVCache(KVShape(1, num_kv_heads, head_dim), 400 * BLOCK_SIZE, dtype=dtype, device=cuda)
    random = torch.Generator(cuda).manual_seed(0)
    cache.data.copy_(torch.randn(cache.data.shape, generator=random, device=cuda))
    query = torch.randn((3000, num_heads, head_dim), generator=random, device=cuda).to(dtype)
    own = np.random.default_rng(0).permutation(400)

    def attended(chunks: list[tuple[int, int, int]], rule: ScoreRule) -> list[Tensor]:
        """Of (first block, positions before, rows), by both; the query of a row is that of its position."""
        contexts = [
            (own[block:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[: before + count]
            for block, before, count in chunks
        ]
        slots = [slots[before:] for slots, (_, before, _) in zip(contexts, chunks, strict=True)]
        starts = np.cumsum([0, *(count for *_, count in chunks)])
        rows = AttentionRows(np.concatenate(slots), starts, tuple(contexts))
        given = torch.cat([query[before : before + count] for _, before, count in chunks])
        return [attend.attend_stored(0, given, rule) for attend in (send(cache, rows)[0], StepAttention(cache, rows))]

    for rule in (PLAIN, RULED):
        found, expected = attended([(0, 0, 2000), (130, 1000, 515), (230, 0, 1), (231, 40, 60)], rule)
        assert (found.float() - expected.float()).abs().max() < TOLERANCE[dtype]
        cuts = ((0, 777), (777, 2000))
        parts = [attended([(5, 3, 70), (0, begin, end - begin)], rule)[0][70:] for begin, end in cuts]
        assert torch.equal(torch.cat(parts), found[:2000])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [203, 49152, 128256, 151936])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_judged_as_torch_judges_them(cuda: torch.device, kind: str, size: int, dtype: torch.dtype) -> None:
    from speculative.gpu.triton_judge import TritonJudge

    given = padded(rows_to_judge(kind, (4, 0, 4, 1, 19, 4), size)).to(cuda)
    given = Scene(given.logits.to(dtype), given.rows, given.sampled)
    some = torch.arange(len(given.rows.counts), device=cuda) % 2 == 0
    filters = filtered(given, (0.0, 0, 1.0), (0.0, 50, 1.0), (0.01, 0, 1.0))
    for one in (given, filters, filters.with_rows(coupled=some)):
        for mode in ("raw_logprobs", "processed_logprobs"):
            assert_equal(TritonJudge(mode), one, mode)
    unwanted = torch.tensor([False], device=cuda)
    assert_equal(TritonJudge("raw_logprobs"), given.with_rows(checked=unwanted, reported=unwanted))


@pytest.mark.parametrize("kind", KINDS)
def test_a_judged_rows_bits_depend_on_neither_padding_nor_the_run(cuda: torch.device, kind: str) -> None:
    from speculative.gpu.triton_judge import TritonJudge

    given = filtered(rows_to_judge(kind, (4, 0, 4), 49152), (0.0, 50, 0.9), (0.0, 0, 1.0))
    given.rows.checked[:] = False
    judge = TritonJudge("processed_logprobs")
    alone, again, whole = (parts(judge, one.to(cuda)) for one in (given, given, padded(given)))
    for name, values in alone.items():
        assert torch.equal(again[name], values), "two runs give the same bits"
        assert torch.equal(whole[name][: len(values)], values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "vocab_size"), [(203, None), (32_000, 128_256), (128_256, None)], ids=["tiny", "a head", "a vocabulary"]
)
def test_drafts_are_sampled_as_torch_samples_them(
    cuda: torch.device, width: int, vocab_size: int | None, dtype: torch.dtype
) -> None:
    from speculative.gpu.triton_drafts import triton_drafts

    given = draft_scene(12, width, vocab_size=vocab_size).to(cuda, dtype)
    coupled = torch.arange(12, device=cuda) % 4 == 1
    for one in (given, given.filtered((0.0, 0, 1.0), (0.0, 50, 1.0), (0.01, 0, 1.0))):
        found = assert_sampled(one, triton_drafts)
        assert len(set(found.columns.tolist())) > 6
        noisy = assert_sampled(one.with_fields(coupled=coupled), triton_drafts)
        assert torch.equal(noisy.probs, found.probs) and torch.equal(noisy.columns[~coupled], found.columns[~coupled])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafts_bits_depend_on_neither_neighbours_nor_the_run(cuda: torch.device, dtype: torch.dtype) -> None:
    from speculative.gpu.triton_drafts import triton_drafts

    given = draft_scene(64, 32_000, vocab_size=128_256).to(cuda, dtype).filtered((0.0, 0, 1.0), (0.0, 50, 0.9))
    given.fields.coupled[::5] = True
    whole, again = (one.sample(triton_drafts) for one in (given, given))
    for begin, end in ((0, 1), (7, 16), (0, 64)):
        alone = given.rows(begin, end).sample(triton_drafts)
        for name, part in alone._asdict().items():
            own = part.unflatten(0, (NUM_DRAFTS, end - begin))[OFFSET]
            for other in (whole, again):
                assert torch.equal(own, getattr(other, name).unflatten(0, (NUM_DRAFTS, 64))[OFFSET, begin:end]), name


def test_filters_find_the_floors_that_sorting_finds(cuda: torch.device) -> None:
    from speculative.gpu.triton_filters import triton_floors

    vocab_size, cases = 128_256, [(0.0, 128_256, 1.0), (0.0, 40, 1.0), (0.0, 128_256, 0.9), (0.05, 20, 0.8)]
    logits = torch.randn((len(cases), vocab_size), generator=torch.Generator().manual_seed(0)).to(cuda) * 3
    log_min_p, top_p = (torch.tensor([case[part] for case in cases], device=cuda) for part in (0, 2))
    top_k = torch.tensor([case[1] for case in cases], device=cuda)
    warm = torch.ones((len(cases), 1), device=cuda)
    found, expected = (find(logits, warm, log_min_p.log(), top_k, top_p) for find in (triton_floors, torch_floors))
    kept = [(logits >= floors[:, None]).sum(dim=-1) for floors in (found, expected)]
    assert kept[0][0] == vocab_size
    assert kept[0][1] == 40
    assert ((kept[0] - kept[1]).abs() <= kept[1] // 1000).all(), "sums in another order may move a nucleus' edge"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_of_logits_are_torchs(cuda: torch.device, dtype: torch.dtype) -> None:
    from speculative.gpu.triton_edits import triton_edit

    size, drafted = 128_256, [*EDITED_ROWS, *EDITED_ROWS[:2]] * 6
    bucket = Bucket(len(drafted), 7)
    step_input, logits = input_of(drafted), logits_of(drafted, size, dtype=dtype).to(cuda)
    own = StepEdits.of(step_input, masks_of(drafted, size), EOS, size)
    assert own is not None
    found = []
    for edit in (triton_edit, torch_edit):
        edits = LogitEdits(bucket, size, cuda, edit)
        edits.prepare(own.sizes)
        edits.send(own)
        rows = RowFields(*(tensor.to(cuda) for tensor in rows_of(step_input, Bucket(bucket.num_seqs, 7))))
        padded = torch.cat([logits, logits.new_zeros((bucket.num_rows - len(logits), size))])
        found.append(edits.apply(padded, rows, own.sizes)[: len(logits)])
    assert torch.equal(*found)
    assert not torch.equal(found[0], logits.float())
