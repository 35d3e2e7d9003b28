// Attention over the paged cache.

#include "kernels.h"
#include "tiles.h"

#include <cfloat>
#include <cmath>
#include <cstring>

namespace truespec {

extern "C" {
// Whether attention over a cache in bfloat16 is left to tiles, of any number of rows: those round in another order.
int64_t truespec_attends_by_tiles = 0;
}

namespace {

constexpr int64_t kQueryTile = kWide ? 6 : 3;  // queries that share one pass over keys or values
constexpr int kParts = kWide ? 4 : 2;   // vectors of a head that such a pass over values takes at once
constexpr int kKeys = kWide ? 16 : 4;          // keys that a query is multiplied with at once
constexpr int64_t kPairTile = 12;  // queries that share one pass over a panel

// Positions are attended to in blocks of so many, counted from the first of the sequence: the scores of a block stay in
// the near caches. Where a later block has a larger score, what is known so far is scaled down to it.
constexpr int64_t kPositions = 256;
constexpr int64_t kPieceQueries = 192;  // that share what is prepared of a block

// A length up to whole blocks of positions.
int64_t padded(int64_t length, int64_t block) { return (length + block - 1) / block * block; }

// Sums of 16 vectors: lane i is the sum of vector i.
inline __m512 sums_of(const __m512* v) {
    __m512 quads[4];
    for (int g = 0; g < 4; ++g) {
        const __m512 *a = v + 4 * g;
        const __m512 first = _mm512_add_ps(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
        const __m512 second = _mm512_add_ps(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
        quads[g] = _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xEE));
    }
    __m512 halves[2];
    for (int h = 0; h < 2; ++h) {
        const __m512 a = quads[2 * h], b = quads[2 * h + 1];
        halves[h] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                         _mm512_shuffle_f32x4(halves[0], halves[1], 0xDD));
}

void write_cache(const float* numbers, char* to, int64_t size, int64_t width) {
    if (width == 4) {
        std::memcpy(to, numbers, size * 4);
        return;
    }
    for (int64_t i = 0; i < size; i += 16) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i), round_to_bfloat16(_mm512_loadu_ps(numbers + i)));
    }
}

inline __m512 load_cached(const char* from, int64_t width) {
    if (width == 4) return _mm512_loadu_ps(reinterpret_cast<const float*>(from));
    return expand(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Rows of one span that one thread attends for, and one of the cache's heads.
struct Piece {
    int64_t row_begin, row_end;  // of the step
    int64_t length;              // positions up to that of the first row; each later row one more
    int64_t first;               // the first position that its first row attends to
    const int64_t* context;
    int64_t kv_head;

    int64_t most() const { return length + row_end - row_begin - 1; }  // positions that the last row attends to
};

// Asks for the numbers of some positions of a piece's head, for the second cache: they lie apart, so the processor
// would ask for few at once.
void fetch_positions(const char* numbers, const Cache& cache, const Piece& piece, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        const char* own = numbers + cache.at(piece.context[t], piece.kv_head);
        for (int64_t line = 0; line < cache.head_dim * cache.width; line += 64) _mm_prefetch(own + line, _MM_HINT_T1);
    }
}

constexpr int64_t kPositionsAhead = kPositions;

// Positions begin..end of a piece's sequence, from a multiple of `kPositions` on, and where their keys and values lie.
// first: a multiple of 32, before which nobody attends to any.
struct Block {
    int64_t begin, end, first;
    int64_t at[kPositions];

    Block(const Cache& cache, const Piece& piece, int64_t begin)
        : begin(begin),
          end(std::min(begin + kPositions, piece.most())),
          first(std::max<int64_t>(0, piece.first - begin) / 32 * 32) {
        for (int64_t t = begin + first; t < end; ++t) at[t - begin] = cache.at(piece.context[t], piece.kv_head);
    }

    int64_t count() const { return end - begin; }
};

// The queries of a piece, row after row, and what is known of them after some blocks: their largest scores, the sums of
// their weights e^(score - top), and the sums of the values with these weights, [count, head_dim].
struct Queries {
    int64_t count;
    float scale, cap;  // as in `Scores`, of the products
    float* sums;
    std::vector<const float*> rows;
    std::vector<int64_t> firsts, lengths;  // they attend to the positions from the first to before the second
    std::vector<float> tops, totals;

    void reset(int64_t new_count) {
        count = new_count;
        rows.resize(count), firsts.resize(count), lengths.resize(count);
        tops.assign(count, -FLT_MAX), totals.assign(count, 0.0f);  // finite: of infinities no difference is taken
    }

    // A query attends to the positions of a block from its first to before its end.
    int64_t first(int64_t q, const Block& block) const { return within(firsts[q], block); }
    int64_t end(int64_t q, const Block& block) const { return within(lengths[q], block); }

    static int64_t within(int64_t position, const Block& block) {
        return std::clamp<int64_t>(position - block.begin, 0, block.count());
    }
};

// Scores of 16 positions of a block from its `t` on, of every query, `kPositions` floats apart: those of positions
// that a query does not attend to are garbage.
[[gnu::always_inline]] inline void score_block(const Cache& cache, const Block& block, int64_t t, const Queries& queries,
                                               float* scores, float* copied) {
    const int64_t size = cache.head_dim;
    const float* keys[16];
    for (int64_t i = 0; i < 16; ++i) {
        const char* key = cache.keys + block.at[std::min(t + i, block.count() - 1)];
        if (cache.width == 4) {
            keys[i] = reinterpret_cast<const float*>(key);
            continue;
        }
        for (int64_t d = 0; d < size; d += 16) _mm512_storeu_ps(copied + i * size + d, load_cached(key + 2 * d, 2));
        keys[i] = copied + i * size;
    }
    for (int64_t q = 0; q < queries.count; ++q) {
        __m512 products[16];
        const float* query = queries.rows[q];
        const __m512 first = _mm512_loadu_ps(query);
        for (int own = 0; own < 16; own += kKeys) {
            __m512 some[kKeys];
            for (int i = 0; i < kKeys; ++i) some[i] = _mm512_mul_ps(first, _mm512_loadu_ps(keys[own + i]));
            for (int64_t d = 16; d < size; d += 16) {
                const __m512 part = _mm512_loadu_ps(query + d);
                for (int i = 0; i < kKeys; ++i) {
                    some[i] = _mm512_fmadd_ps(part, _mm512_loadu_ps(keys[own + i] + d), some[i]);
                }
            }
            std::copy_n(some, kKeys, products + own);
        }
        _mm512_storeu_ps(scores + q * kPositions + t, sums_of(products));
    }
}

#if defined(__AVX512BF16__)

// 16 rows of 16 words to 16 columns.
inline void transpose(const __m512i* rows, __m512i* columns) {
    __m512i quads[16];  // 4 * g + j: in every fourth, four rows from 4 * g on of one column, j + 4 * (which fourth)
    for (int g = 0; g < 4; ++g) {
        const __m512i* r = rows + 4 * g;
        const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
        const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
        quads[4 * g] = _mm512_unpacklo_epi64(a, c);
        quads[4 * g + 1] = _mm512_unpackhi_epi64(a, c);
        quads[4 * g + 2] = _mm512_unpacklo_epi64(b, d);
        quads[4 * g + 3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int j = 0; j < 4; ++j) {
        const __m512i a = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0x44);
        const __m512i b = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0x44);
        const __m512i c = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0xEE);
        const __m512i d = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0xEE);
        columns[j] = _mm512_shuffle_i32x4(a, b, 0x88);
        columns[4 + j] = _mm512_shuffle_i32x4(a, b, 0xDD);
        columns[8 + j] = _mm512_shuffle_i32x4(c, d, 0x88);
        columns[12 + j] = _mm512_shuffle_i32x4(c, d, 0xDD);
    }
}

// 32 positions of a block: for every two numbers of the head, a pair of each position. The panel has room for a
// multiple of 32 numbers. Positions behind the block's end are garbage.
void pair_keys(const Cache& cache, const Block& block, int64_t t, char* panel) {
    const int64_t pairs = cache.head_dim / 2;
    for (int64_t half = 0; half < kPanel; half += 16) {
        const char* keys[16];
        for (int64_t i = 0; i < 16; ++i) keys[i] = cache.keys + block.at[std::min(t + half + i, block.count() - 1)];
        for (int64_t k = 0; k < pairs; k += 16) {
            const __mmask16 lanes = first_lanes(pairs - k);
            __m512i rows[16], columns[16];
#pragma GCC unroll 16
            for (int64_t i = 0; i < 16; ++i) rows[i] = _mm512_maskz_loadu_epi32(lanes, keys[i] + 4 * k);
            transpose(rows, columns);
#pragma GCC unroll 16
            for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(panel + (k + i) * kPanelRow + 4 * half, columns[i]);
        }
    }
}

// 32 numbers of the values of 32 positions of a block: for every two positions, a pair of each number. An odd last
// position is paired with 0.
void pair_values(const Cache& cache, const Block& block, int64_t t, int64_t number, char* panel) {
    const __m512i first = _mm512_set_epi32(0x002F000F, 0x002E000E, 0x002D000D, 0x002C000C, 0x002B000B, 0x002A000A,
                                           0x00290009, 0x00280008, 0x00270007, 0x00260006, 0x00250005, 0x00240004,
                                           0x00230003, 0x00220002, 0x00210001, 0x00200000);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(0x00100010));
    const __mmask16 lanes = first_lanes((cache.head_dim - number) / 2);
    const char* values = cache.values + 2 * number;
    const auto load = [&](int64_t t) { return _mm512_maskz_loadu_epi32(lanes, values + block.at[t]); };
    const auto put = [&](__m512i even, __m512i odd) {
        _mm512_storeu_si512(panel, _mm512_permutex2var_epi16(even, first, odd));
        _mm512_storeu_si512(panel + 64, _mm512_permutex2var_epi16(even, second, odd));
        panel += kPanelRow;
    };
    const int64_t end = std::min(t + kPanel, block.count());
    for (; t + 2 <= end; t += 2) put(load(t), load(t + 1));
    if (t < end) put(load(t), _mm512_setzero_si512());
}

// A block's keys, in a panel for every 32 positions, and values, in one for every 32 numbers.
struct Panels {
    int64_t key_bytes, value_bytes;  // of 32 positions, and of 32 numbers
    char *keys, *values;

    Panels(int64_t size, float* scratch)
        : key_bytes(padded(size, 32) / 2 * kPanelRow),
          value_bytes(kPositions / 2 * kPanelRow),
          keys(reinterpret_cast<char*>(scratch)),
          values(keys + kPositions / kPanel * key_bytes) {}

    char* keys_from(int64_t t) const { return keys + t / kPanel * key_bytes; }
    char* values_from(int64_t t, int64_t number) const {
        return values + number / kPanel * value_bytes + t / 2 * kPanelRow;
    }

    void fill(const Cache& cache, const Piece& piece, const Block& block) const {
        const int64_t count = block.count(), most = piece.most();
        for (int64_t t = block.first; t < count; t += kPanel) {
            const int64_t at = block.begin + t, ahead = at + kPositionsAhead;
            fetch_positions(cache.keys, cache, piece, ahead, std::min(ahead + kPanel, most));
            if (block.begin <= piece.first) fetch_positions(cache.values, cache, piece, at, std::min(at + kPanel, most));
            pair_keys(cache, block, t, keys_from(t));
        }
        for (int64_t t = block.first; t < count; t += kPanel) {
            const int64_t ahead = block.begin + t + kPositionsAhead;
            fetch_positions(cache.values, cache, piece, ahead, std::min(ahead + kPanel, most));
            for (int64_t number = 0; number < cache.head_dim; number += kPanel) {
                pair_values(cache, block, t, number, values_from(t, number));
            }
        }
    }
};

// A pair of a row, as `pair_row` has it, in all lanes.
inline __m512bh pair_of(const int8_t* row, int64_t k) {
    return (__m512bh)_mm512_set1_epi32(*reinterpret_cast<const int32_t*>(row + 4 * k));
}

// Adds the products of Q rows, `stride` bytes apart and as `pair_row` has them, with a panel of so many pairs to their
// sums.
template <int Q>
[[gnu::always_inline]] inline void add_pairs(const int8_t* rows, int64_t stride, const char* panel, int64_t pairs,
                                             __m512 (&sums)[Q][2]) {
    for (int64_t k = 0; k < pairs; ++k, panel += kPanelRow) {
        const __m512bh first = (__m512bh)_mm512_loadu_si512(panel), second = (__m512bh)_mm512_loadu_si512(panel + 64);
        for (int q = 0; q < Q; ++q) {
            const __m512bh x = pair_of(rows + q * stride, k);
            sums[q][0] = _mm512_dpbf16_ps(sums[q][0], first, x);
            sums[q][1] = _mm512_dpbf16_ps(sums[q][1], second, x);
        }
    }
}

// Scores of some positions of a block, whole panels, of Q queries, as `add_pairs` takes them.
template <int Q>
[[gnu::noinline]] void score_pairs(const Panels& panels, int64_t size, const int8_t* queries, int64_t stride,
                                   int64_t begin, int64_t end, float* scores) {
    for (int64_t t = begin; t < end; t += kPanel, scores += kPanel) {
        __m512 sums[Q][2];
        for (int q = 0; q < Q; ++q) sums[q][0] = sums[q][1] = _mm512_setzero_ps();
        add_pairs<Q>(queries, stride, panels.keys_from(t), size / 2, sums);
        for (int q = 0; q < Q; ++q) {
            for (int half = 0; half < 2; ++half) _mm512_storeu_ps(scores + q * kPositions + 16 * half, sums[q][half]);
        }
    }
}

// Adds weighted values of a block to the sums of Q queries, in pairs of positions: those that all of them see, then of
// those behind them what each sees itself, from its first position to before its end.
template <int Q, bool ruled>
[[gnu::noinline]] void weigh_pairs(const Panels& panels, int64_t size, const float* weights, Range common,
                                   const int64_t* firsts, const int64_t* ends, float* to) {
    for (int64_t number = 0; number < size; number += kPanel) {
        const char* panel = panels.values_from(0, number);
        const int64_t begin = ruled ? common.begin : 0;
        const bool whole = number + 16 < size;
        __m512 sums[Q][2];
        for (int q = 0; q < Q; ++q) {
            const float* so_far = to + q * size + number;
            sums[q][0] = _mm512_loadu_ps(so_far);
            sums[q][1] = whole ? _mm512_loadu_ps(so_far + 16) : _mm512_setzero_ps();
        }
        add_pairs<Q>(reinterpret_cast<const int8_t*>(weights) + 4 * begin, 4 * kPositions, panel + begin * kPanelRow,
                     common.end - begin, sums);
#pragma GCC unroll 12
        for (int q = 0; q < Q; ++q) {  // unrolled, or the sums lie in memory
            const int8_t* row = reinterpret_cast<const int8_t*>(weights + q * kPositions);
            for (int64_t k = common.end; 2 * k < ends[q]; ++k) {
                __mmask32 own = 2 * k + 1 < ends[q] ? 0xFFFFFFFF : 0x55555555;  // the next value may be no number
                if (ruled && 2 * k < firsts[q]) own &= 0xAAAAAAAA;
                const __m512bh first = (__m512bh)_mm512_maskz_loadu_epi16(own, panel + k * kPanelRow);
                const __m512bh second = (__m512bh)_mm512_maskz_loadu_epi16(own, panel + k * kPanelRow + 64);
                const __m512bh weight = pair_of(row, k);
                sums[q][0] = _mm512_dpbf16_ps(sums[q][0], first, weight);
                sums[q][1] = _mm512_dpbf16_ps(sums[q][1], second, weight);
            }
            for (int half = 0; half < 1 + whole; ++half) {
                _mm512_storeu_ps(to + q * size + number + 16 * half, sums[q][half]);
            }
        }
    }
}

#endif

// c[0] r^(n-1) + ... + c[n-1].
template <int n>
[[gnu::always_inline]] inline __m512 polynomial(const float (&c)[n], __m512 r) {
    __m512 p = _mm512_set1_ps(c[0]);
    for (int i = 1; i < n; ++i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c[i]));
    return p;
}

// 2^x of an x of at most 0, for weights of attention, sooner than `exponential`: relative to it to 3e-6 where they become
// bfloat16s, else to a unit in the last place, and to x 2^-24. NaN stays NaN.
template <bool in_pairs>
[[gnu::always_inline]] inline __m512 two_to_the(__m512 x) {
    constexpr float some[] = {9.570101911e-3f, 5.591786032e-2f, 2.402474483e-1f, 6.931218147e-1f, 9.999992614e-1f};
    constexpr float all[] = {1.534581242594868e-4f, 1.339993090368734e-3f, 9.618489071726799e-3f, 5.550328642129898e-2f,
                             2.4022646248340607e-1f, 6.931471824645996e-1f, 1.0f};
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);  // 0 beyond
    const __m512 n = _mm512_roundscale_ps(x, 8), r = _mm512_sub_ps(x, n);
    const __m512 p = in_pairs ? polynomial(some, r) : polynomial(all, r);
    return _mm512_scalef_ps(p, n);
}

// tanh to 3 units in the last place (near 0 Cephes' polynomial); NaN stays NaN.
[[gnu::always_inline]] inline __m512 hyperbolic_tangent(__m512 x) {
    constexpr float near[] = {-5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                              -3.33332819422e-1f};
    const __m512 size = _mm512_abs_ps(x), square = _mm512_mul_ps(x, x), one = _mm512_set1_ps(1.0f);
    const __m512 small = _mm512_fmadd_ps(_mm512_mul_ps(polynomial(near, square), square), x, x);
    const __m512 power = _mm512_add_ps(exponential(_mm512_add_ps(size, size)), one);
    const __m512 large = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), power));
    const __mmask16 is_negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 signed_large = _mm512_mask_mov_ps(large, is_negative, _mm512_sub_ps(_mm512_setzero_ps(), large));
    return _mm512_mask_mov_ps(signed_large, _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.625f), _CMP_LT_OQ), small);
}

// Products of one query from begin to before end, up to whole 16 of them, to scores of at most `cap`, in place.
[[gnu::noinline]] void cap_scores(float* scores, int64_t begin, int64_t end, float scale, float cap) {
    const __m512 inner = _mm512_set1_ps(scale / cap), outer = _mm512_set1_ps(cap);
    for (int64_t t = begin / 16 * 16; t < end; t += 16) {
        const __m512 capped = hyperbolic_tangent(_mm512_mul_ps(_mm512_loadu_ps(scores + t), inner));
        _mm512_storeu_ps(scores + t, _mm512_mul_ps(capped, outer));
    }
}

// The largest score of one query.
[[gnu::always_inline]] inline float largest_score(const float* scores, int64_t count) {
    __m512 largest[4];
    for (int i = 0; i < 4; ++i) largest[i] = _mm512_set1_ps(-INFINITY);
    int64_t t = 0;
    for (; t + 64 <= count; t += 64) {
        for (int i = 0; i < 4; ++i) largest[i] = _mm512_max_ps(largest[i], _mm512_loadu_ps(scores + t + 16 * i));
    }
    for (; t < count; t += 16) {
        const __mmask16 lanes = first_lanes(count - t);
        largest[0] = _mm512_mask_max_ps(largest[0], lanes, largest[0], _mm512_maskz_loadu_ps(lanes, scores + t));
    }
    for (int i = 1; i < 4; ++i) largest[0] = _mm512_max_ps(largest[0], largest[i]);
    return _mm512_reduce_max_ps(largest[0]);
}

// Scores of the positions of a block that one query sees to weights e^(score - top), in place, and 0 beside them up to
// whole 32. In pairs they become bfloat16s, as `pair_row` has them. What is known of the query then counts these scores in,
// but not yet their values.
template <bool in_pairs, bool ruled>
[[gnu::noinline]] void exponentiate(Queries& queries, int64_t q, const Block& block, float* scores, int64_t size) {
    const int64_t first = ruled ? queries.first(q, block) : 0, end = queries.end(q, block);
    if (first == end) return;
    const bool capped = ruled && queries.cap != 0;
    if (capped) cap_scores(scores, first, end, queries.scale, queries.cap);
    const float scale = capped ? 1.0f : queries.scale;
    const float so_far = queries.tops[q], top = std::max(so_far, largest_score(scores + first, end - first));
    const __m512 factor = _mm512_set1_ps(scale * 1.44269504088896341f), subtracted = _mm512_set1_ps(top);
    const auto power = [&](__m512 score) {
        return two_to_the<in_pairs>(_mm512_mul_ps(_mm512_sub_ps(score, subtracted), factor));
    };
    if (top != so_far) {
        const __m512 rescale = power(_mm512_set1_ps(so_far));
        queries.tops[q] = top;
        queries.totals[q] *= _mm512_cvtss_f32(rescale);
        float* sums = queries.sums + q * size;
        for (int64_t d = 0; d < size; d += 16) {
            _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), rescale));
        }
    }
    __m512 added = _mm512_setzero_ps();
    const auto weigh = [&](int64_t t, bool all) {
        __m512 weights[2];
        for (int i = 0; i < 2; ++i) {
            weights[i] = power(_mm512_loadu_ps(scores + t + 16 * i));
            const int64_t from = t + 16 * i;
            __mmask16 own = first_lanes(end - from);
            if (ruled) own &= ~first_lanes(first - from);
            if (!all) weights[i] = _mm512_maskz_mov_ps(own, weights[i]);
        }
#if defined(__AVX512BF16__)
        if constexpr (in_pairs) {
            const __m512bh rounded = _mm512_cvtne2ps_pbh(weights[1], weights[0]);
            _mm512_storeu_si512(scores + t / 2, (__m512i)rounded);
            added = _mm512_dpbf16_ps(added, rounded, (__m512bh)_mm512_set1_epi32(0x3F803F80));
            return;
        }
#endif
        for (int i = 0; i < 2; ++i) {
            _mm512_storeu_ps(scores + t + 16 * i, weights[i]);
            added = _mm512_add_ps(added, weights[i]);
        }
    };
    int64_t t = first / 32 * 32;
    if (ruled && t < first) weigh(t, false), t += 32;
    for (; t + 32 <= end; t += 32) weigh(t, true);
    if (t < end) weigh(t, false);
    queries.totals[q] += _mm512_reduce_add_ps(added);
}

// Adds the weighted values of positions begin..end of a block to Q queries' sums, some numbers of the head at a time.
template <int Q>
[[gnu::always_inline]] inline void add_values(const Cache& cache, const Block& block, int64_t begin, int64_t end,
                                              const float* weights, float* to) {
    for (int64_t d = 0; d < cache.head_dim; d += 16 * kParts) {
        const int parts = static_cast<int>(std::min<int64_t>(16 * kParts, cache.head_dim - d) / 16);
        __m512 sums[Q][kParts];
        for (int q = 0; q < Q; ++q) {
            for (int i = 0; i < kParts; ++i) {
                sums[q][i] = i < parts ? _mm512_loadu_ps(to + q * cache.head_dim + d + 16 * i) : __m512{};
            }
        }
        for (int64_t t = begin; t < end; ++t) {
            const char* value = cache.values + block.at[t] + d * cache.width;
            __m512 v[kParts];
            for (int i = 0; i < kParts; ++i) {
                v[i] = i < parts ? load_cached(value + 16 * i * cache.width, cache.width) : __m512{};
            }
            for (int q = 0; q < Q; ++q) {
                const __m512 weight = _mm512_set1_ps(weights[q * kPositions + t]);
                for (int i = 0; i < kParts; ++i) sums[q][i] = _mm512_fmadd_ps(weight, v[i], sums[q][i]);
            }
        }
        for (int q = 0; q < Q; ++q) {
            for (int i = 0; i < kParts; ++i) {
                if (i < parts) _mm512_storeu_ps(to + q * cache.head_dim + d + 16 * i, sums[q][i]);
            }
        }
    }
}

#if defined(__AVX512BF16__)

template <bool ruled>
void attend_in_pairs(const Block& block, Queries& queries, const Panels& panels, int64_t size, const int8_t* split,
                     float* scores) {
    const int64_t row_bytes = 2 * padded(size, 32);
    for (int64_t q = 0; q < queries.count; q += kPairTile) {
        const int64_t some = std::min(kPairTile, queries.count - q), longest = queries.end(q + some - 1, block);
        const int64_t first = ruled ? queries.first(q, block) / kPanel * kPanel : 0;
        if (longest <= first) continue;
        with_count<kPairTile>(some, [&](auto tile) {
            score_pairs<tile()>(panels, size, split + q * row_bytes, row_bytes, first, longest, scores + first);
        });
        int64_t firsts[kPairTile], ends[kPairTile];
        for (int64_t i = 0; i < some; ++i) {
            exponentiate<true, ruled>(queries, q + i, block, scores + i * kPositions, size);
            ends[i] = queries.end(q + i, block);
            if (ruled) firsts[i] = queries.first(q + i, block);
        }
        float* sums = queries.sums + q * size;
        Range common{0, ends[0] / 2};  // the first one ends first
        if constexpr (ruled) {
            common.begin = (firsts[some - 1] + 1) / 2;  // the last one begins last
            common.end = std::max(common.begin, common.end);
            for (int64_t i = 0; i < some; ++i) {
                const int64_t end = std::min(ends[i], 2 * common.begin);
                if (firsts[i] >= end) continue;
                const Range none{firsts[i] / 2, firsts[i] / 2};
                weigh_pairs<1, true>(panels, size, scores + i * kPositions, none, firsts + i, &end, sums + i * size);
            }
        }
        with_count<kPairTile>(some, [&](auto tile) {
            weigh_pairs<tile(), ruled>(panels, size, scores, common, firsts, ends, sums);
        });
    }
}

#endif

#if defined(TRUESPEC_TILES)

// By sizes of the model alone, never by numbers of rows: attention by tiles rounds in another order. No windows.
bool attends_by_tiles(const Cache& cache, int64_t group, int64_t window) {
    return truespec_attends_by_tiles && window == 0 && cache.width == 2 && cache.head_dim % kTileInputs == 0 && group <= 2 * kTileRows;
}

// Rows of each tile, where tiles of one size hold `count` rows. The last one ends with the last row, so it may compute
// rows of the one before again.
int64_t rows_of_tiles(int64_t count) {
    const int64_t tiles = (count + kTileRows - 1) / kTileRows;
    return (count + tiles - 1) / tiles;
}

// Scores of the 32 positions of a panel, of at most 32 queries that `pair_row` has made bfloat16s of.
void score_by_tiles(const int8_t* queries, int64_t count, int64_t size, const char* panel, float* scores) {
    const int64_t second = count - rows_of_tiles(count), query_bytes = 2 * size;
    clear_sums();
    add_panel(queries, second ? queries + second * query_bytes : nullptr, query_bytes, panel, size, [] {});
    STORE_TILE(0, scores, 4 * kPositions);
    STORE_TILE(1, scores + 16, 4 * kPositions);
    if (!second) return;
    STORE_TILE(2, scores + second * kPositions, 4 * kPositions);
    STORE_TILE(3, scores + second * kPositions + 16, 4 * kPositions);
}

// Adds weighted values of so many positions of a panel to 32 numbers of the sums of at most 32 queries.
void weigh_by_tiles(const float* weights, int64_t count, const char* panel, int64_t positions, float* to,
                    int64_t size) {
    const int64_t second = count - rows_of_tiles(count);
    float* others = to + second * size;
    LOAD_TILE(0, to, 4 * size);
    LOAD_TILE(1, to + 16, 4 * size);
    if (second) {
        LOAD_TILE(2, others, 4 * size);
        LOAD_TILE(3, others + 16, 4 * size);
    }
    const auto at = [&](int64_t query) { return reinterpret_cast<const int8_t*>(weights + query * kPositions); };
    add_panel(at(0), second ? at(second) : nullptr, 4 * kPositions, panel, positions, [] {});
    STORE_TILE(0, to, 4 * size);
    STORE_TILE(1, to + 16, 4 * size);
    if (!second) return;
    STORE_TILE(2, others, 4 * size);
    STORE_TILE(3, others + 16, 4 * size);
}

// The first pairs of a panel of 32 positions, of so many; 0 behind them, where it may be no number.
void copy_first(const char* panel, int64_t positions, char* to) {
    for (int64_t t = 0; t < 32; t += 2, panel += kPanelRow, to += kPanelRow) {
        const __mmask32 seen = t >= positions ? 0 : t + 1 == positions ? 0x55555555 : 0xFFFFFFFF;
        _mm512_store_si512(to, _mm512_maskz_loadu_epi16(seen, panel));
        _mm512_store_si512(to + 64, _mm512_maskz_loadu_epi16(seen, panel + 64));
    }
}

// The positions that all queries of two tiles see are weighed for all of them, up to whole panels of 32; the rest for
// each row on its own, with 0 behind what it sees: so its sums go through the same steps in any company, and what lies
// behind it may be no number.
template <bool ruled>
void attend_by_tiles(const Block& block, Queries& queries, const Panels& panels, int64_t size, int64_t group,
                     const int8_t* split, float* scores) {
    const int64_t most = 2 * kTileRows / group * group;
    for (int64_t q = 0; q < queries.count; q += most) {
        const int64_t some = std::min(most, queries.count - q), longest = queries.end(q + some - 1, block);
        if (longest == 0) continue;
        shape_for_panels(rows_of_tiles(some));
        for (int64_t t = 0; t < longest; t += 32) {
            score_by_tiles(split + 2 * q * size, some, size, panels.keys_from(t), scores + t);
        }
        for (int64_t i = 0; i < some; ++i) {
            exponentiate<true, ruled>(queries, q + i, block, scores + i * kPositions, size);
        }
        const int64_t whole = queries.end(q, block) / 32 * 32;
        for (int64_t number = 0; number < size && whole > 0; number += 32) {
            weigh_by_tiles(scores, some, panels.values_from(0, number), whole, queries.sums + q * size + number, size);
        }
        if (longest == whole) continue;
        shape_for_panels(rows_of_tiles(group));
        for (int64_t i = 0; i < some; i += group) {
            const int64_t seen = queries.end(q + i, block);
            for (int64_t t = whole; t < seen; t += 32) {
                for (int64_t number = 0; number < size; number += 32) {
                    alignas(64) char panel[kTileInputs / 2 * kPanelRow];
                    copy_first(panels.values_from(t, number), seen - t, panel);
                    weigh_by_tiles(scores + i * kPositions + t / 2, group, panel, 32,
                                   queries.sums + (q + i) * size + number, size);
                }
            }
        }
    }
    release_tiles();
}

#endif

template <bool ruled>
void attend_plainly(const Cache& cache, const Piece& piece, const Block& block, Queries& queries, float* copied,
                    float* scores) {
    const int64_t size = cache.head_dim, count = block.count(), most = piece.most();
    for (int64_t t = block.first; t < count; t += 16) {
        const int64_t at = block.begin + t, ahead = at + kPositionsAhead;
        fetch_positions(cache.keys, cache, piece, ahead, std::min(ahead + 16, most));
        fetch_positions(cache.values, cache, piece, at, std::min(at + 16, most));
        score_block(cache, block, t, queries, scores, copied);
    }
    for (int64_t q = 0; q < queries.count; ++q) {
        exponentiate<false, ruled>(queries, q, block, scores + q * kPositions, size);
    }
    for (int64_t q = 0; q < queries.count; q += kQueryTile) {
        const int64_t tile = std::min(kQueryTile, queries.count - q);
        const int64_t begin = ruled ? queries.first(q + tile - 1, block) : 0;  // the last of a tile begins last
        const int64_t end = std::max(begin, queries.end(q, block));  // the first one ends first
        float *weights = scores + q * kPositions, *sums = queries.sums + q * size;
        const auto add_own = [&](int64_t i, int64_t from, int64_t to) {
            if (from < to) add_values<1>(cache, block, from, to, weights + i * kPositions, sums + i * size);
        };
        for (int64_t i = 0; ruled && i < tile; ++i) {
            add_own(i, queries.first(q + i, block), std::min(begin, queries.end(q + i, block)));
        }
        with_count<kQueryTile>(tile, [&](auto some) { add_values<some()>(cache, block, begin, end, weights, sums); });
        for (int64_t i = 0; i < tile; ++i) add_own(i, end, queries.end(q + i, block));
    }
}

#if defined(__AVX512BF16__)

template <bool ruled>
void attend_in_panels(const Cache& cache, const Piece& piece, const Block& block, Queries& queries, int64_t group,
                      int64_t window, const Panels& panels, int8_t* split, float* scores) {
    const int64_t size = cache.head_dim, row_bytes = 2 * padded(size, 32);
    for (int64_t q = 0; block.begin <= piece.first && q < queries.count; ++q) {
        pair_row(queries.rows[q], size, split + q * row_bytes);
    }
    panels.fill(cache, piece, block);
#if defined(TRUESPEC_TILES)
    if (attends_by_tiles(cache, group, window)) {
        return attend_by_tiles<ruled>(block, queries, panels, size, group, split, scores);
    }
#endif
    attend_in_pairs<ruled>(block, queries, panels, size, split, scores);
}

#endif

// Where a thread keeps what it needs of a piece, and how much that is.
struct Places {
    int64_t panels, sums, split, scores, end;

    Places(int64_t size, int64_t queries)
        : panels(0),
          sums(panels + kPositions * padded(size, 32)),
          split(sums + queries * size),
          scores(split + queries * padded(size, 32) / 2),
          end(scores + queries * kPositions) {}
};

int64_t rows_of_piece(int64_t group) { return std::max<int64_t>(1, kPieceQueries / group); }

int64_t first_seen(int64_t length, int64_t window) { return window > 0 ? std::max<int64_t>(0, length - window) : 0; }

// ruled: whether there is a window or a cap.
template <bool ruled>
void attend_piece(const Shape& shape, const Scores& rule, const Cache& cache, const Heads& heads, const Piece& piece,
                  const Piece& next, float* scratch, float* attended) {
    const int64_t size = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
    const Places places(size, rows_of_piece(group) * group);
    thread_local Queries queries;  // allocates nothing once it has been as large
    queries.reset((piece.row_end - piece.row_begin) * group);
    queries.sums = scratch + places.sums;
    std::memset(queries.sums, 0, queries.count * size * sizeof(float));
    for (int64_t q = 0; q < queries.count; ++q) {
        const int64_t row = piece.row_begin + q / group, head = piece.kv_head * group + q % group;
        queries.rows[q] = heads.query + row * heads.query_stride + head * size;
        queries.lengths[q] = piece.length + q / group;
        if (ruled) queries.firsts[q] = first_seen(queries.lengths[q], rule.window);
    }
    queries.scale = static_cast<float>(rule.scale != 0 ? rule.scale : 1.0 / std::sqrt(static_cast<double>(size)));
    queries.cap = static_cast<float>(rule.cap);
    float* scores = scratch + places.scores;
    for (int64_t begin = piece.first / kPositions * kPositions; begin < piece.most(); begin += kPositions) {
        const Block block(cache, piece, begin);
#if defined(__AVX512BF16__)
        if (cache.width == 2) {
            attend_in_panels<ruled>(cache, piece, block, queries, group, rule.window, Panels(size, scratch + places.panels),
                             reinterpret_cast<int8_t*>(scratch + places.split), scores);
            continue;
        }
#endif
        attend_plainly<ruled>(cache, piece, block, queries, scratch + places.panels, scores);
    }
    fetch_positions(cache.keys, cache, next, next.first, std::min(next.first + kPositionsAhead, next.most()));
    for (int64_t q = 0; q < queries.count; ++q) {
        const int64_t row = piece.row_begin + q / group, head = piece.kv_head * group + q % group;
        float* out = attended + (row * shape.num_heads + head) * size;
        const __m512 inverse = _mm512_set1_ps(1.0f / queries.totals[q]);
        for (int64_t d = 0; d < size; d += 16) {
            _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(queries.sums + q * size + d), inverse));
        }
    }
}

}  // namespace

Cache layer_cache(const Shape& shape, void* data, int64_t layer) {
    const int64_t width = shape.cache_is_bfloat16 ? 2 : 4;
    const int64_t part = shape.num_slots * shape.num_kv_heads * shape.head_dim * width;
    char* keys = static_cast<char*>(data) + 2 * layer * part;
    return {keys, keys + part, width, shape.num_kv_heads, shape.head_dim};
}

void write_rows(const Cache& cache, const Heads& heads, const Step& step, int thread, int threads) {
    const Range rows = share(step.num_rows, thread, threads);
    const int64_t size = cache.num_kv_heads * cache.head_dim;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int64_t at = cache.at(step.slots[r], 0);
        write_cache(heads.key + r * heads.key_stride, cache.keys + at, size, cache.width);
        write_cache(heads.value + r * heads.value_stride, cache.values + at, size, cache.width);
    }
}

int64_t scratch_size(const Shape& shape) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    return Places(shape.head_dim, rows_of_piece(group) * group).end;
}

void attend_spans(const Shape& shape, const Scores& rule, const Cache& cache, const Heads& heads, const Step& step,
                  float* scratch, float* attended, int thread, int threads) {
    const bool scarce = threads > 1 && step.num_spans * shape.num_kv_heads < 4 * threads;
    const int64_t whole = rows_of_piece(shape.num_heads / shape.num_kv_heads);
    const auto attend = rule.window != 0 || rule.cap != 0 ? attend_piece<true> : attend_piece<false>;
    int64_t turn = 0;
    Piece piece{};
    for (int64_t s = 0; s < step.num_spans; ++s) {
        const int64_t start = step.row_starts[s], stop = step.row_starts[s + 1];
        const int64_t length = step.context_starts[s + 1] - step.context_starts[s];
        const int64_t most = scarce ? std::max<int64_t>(1, std::min(whole, (stop - start) / threads)) : whole;
        for (int64_t row = start; row < stop; row += most) {
            for (int64_t g = 0; g < shape.num_kv_heads; ++g) {
                if (turn++ % threads != thread) continue;
                const int64_t own = length - (stop - 1 - row);
                const Piece next{row, std::min(row + most, stop), own, first_seen(own, rule.window),
                                 step.context + step.context_starts[s], g};
                if (piece.context) attend(shape, rule, cache, heads, piece, next, scratch, attended);
                piece = next;
            }
        }
    }
    if (piece.context) attend(shape, rule, cache, heads, piece, piece, scratch, attended);
}

}  // namespace truespec
