"""Which padded shapes there are, and which one a step gets."""

from hypothesis import given
from hypothesis import strategies as st

from speculative.gpu.buckets import MAX_CAPTURED_SEQS, Buckets

SIZES = st.tuples(st.integers(1, 600), st.integers(0, 64))


def test_small_shapes_are_exact_and_large_ones_come_in_steps() -> None:
    assert Buckets.of(20, 7) == Buckets((1, 2, 4, 8, 16, 20), (1, 2, 3, 4, 5, 8), 128, 7)
    assert [Buckets.of(20, 7).fit(*step) for step in ((3, 6), (9, 1), (17, 2))] == [(4, 8), (16, 1), (20, 2)]
    assert Buckets.of(1, 0) == Buckets((1,), (1,), 128, 0)
    assert list(Buckets.of(3, 1)) == [(3, 2), (3, 1), (2, 2), (2, 1), (1, 2), (1, 1)]


def test_a_few_rows_are_padded_to_the_longest_and_many_are_not() -> None:
    buckets = Buckets.of(32, 4)
    assert [bucket.num_queries for bucket in buckets if bucket.num_seqs == 24] == [5, 1]
    assert [bucket.num_queries for bucket in buckets if bucket.num_seqs == 32] == [5, 4, 3, 2, 1]
    assert buckets.fit(20, 2) == (24, 5)
    assert buckets.fit(30, 2) == (32, 2)


def test_packed_rows_come_in_steps_of_the_batch_and_in_smaller_ones_where_few_draft() -> None:
    counts = {size: [own.num_rows for own in Buckets.of(256, 4).packed if own.num_seqs == size] for size in (1, 24, 32)}
    assert counts == {1: [5, 1], 24: [120, 24], 32: [160, 128, 32]}
    many = [own.num_rows for own in Buckets.of(256, 4).packed if own.num_seqs == 256]
    assert many == [1280, 1024, 768, 512, 384, 320, 256]
    assert Buckets.of(64, 0).packed[:2] == ((64, 64), (48, 48))
    # 64 streams, one of which drafts four: 128 rows, which take no longer than 64 do, and not five for each.
    assert [Buckets.of(64, 4).fit_rows(64, rows) for rows in (64, 68, 320)] == [(64, 64), (64, 128), (64, 320)]
    assert (len(Buckets.of(64, 4).packed), len(Buckets.of(256, 4).packed)) == (25, 67)


def test_rounds_of_a_model_have_as_many_drafts_as_are_planned() -> None:
    buckets = Buckets.of(3, 4)
    assert list(buckets.of_drafts(varying=False)) == [(3, 4), (2, 4), (1, 4)]
    assert [bucket.num_queries for bucket in buckets.of_drafts(varying=True)] == [4, 3, 2, 1] * 3
    assert buckets.of_drafts(varying=True).fit(2, 2) == (2, 2)
    beside_passages = Buckets.of(3, 10, 4)
    assert beside_passages.largest == (3, 11)
    assert list(beside_passages.of_drafts(varying=True)) == list(buckets.of_drafts(varying=True))


@given(SIZES)
def test_every_step_up_to_the_limit_fits_and_the_count_is_bounded(sizes: tuple[int, int]) -> None:
    max_seqs, max_drafts = sizes
    buckets = Buckets.of(max_seqs, max_drafts)
    most = min(max_seqs, MAX_CAPTURED_SEQS)
    assert buckets.largest == (most, max_drafts + 1)
    assert max(len(list(buckets)), len(buckets.packed)) <= 200
    assert next(iter(buckets)) == buckets.largest
    for num_seqs in (1, most // 2 + 1, most):
        for num_queries in range(1, max_drafts + 2):
            bucket = buckets.fit(num_seqs, num_queries)
            assert bucket is not None
            assert bucket.num_seqs >= num_seqs and bucket.num_queries >= num_queries
    assert buckets.fit(most + 1, 1) is None
    assert buckets.fit(1, max_drafts + 2) is None


@given(SIZES, st.data())
def test_packed_rows_leave_a_row_for_every_sequence_that_is_padding(
    sizes: tuple[int, int], data: st.DataObject
) -> None:
    max_seqs, max_drafts = sizes
    buckets = Buckets.of(max_seqs, max_drafts)
    num_seqs = data.draw(st.integers(1, buckets.largest.num_seqs))
    num_rows = data.draw(st.integers(num_seqs, num_seqs * (max_drafts + 1)))
    bucket = buckets.fit_rows(num_seqs, num_rows)
    assert bucket is not None
    assert bucket.num_rows >= num_rows + bucket.num_seqs - num_seqs
    assert buckets.fit_rows(buckets.largest.num_seqs + 1, 1000) is None
