// Attention over the paged cache.

#include "kernels.h"
#include "tiles.h"

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
constexpr int64_t kPairTile = 12;  // queries that share one pass over keys or values in pairs of bfloat16s

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
    int64_t length;              // positions that the first row attends to; each later row one more
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

constexpr int64_t kPositionsAhead = 64;

// Scores of 16 positions from `t` on, of every query: what lies behind a query's own position is garbage.
void score_block(const Cache& cache, const Piece& piece, int64_t t, int64_t last, const float* const* queries,
                 int64_t count, float* scores, int64_t scores_stride, float* copied) {
    const int64_t size = cache.head_dim;
    const float* keys[16];
    for (int64_t i = 0; i < 16; ++i) {
        const char* key = cache.keys + cache.at(piece.context[std::min(t + i, last)], piece.kv_head);
        if (cache.width == 4) {
            keys[i] = reinterpret_cast<const float*>(key);
            continue;
        }
        for (int64_t d = 0; d < size; d += 16) _mm512_storeu_ps(copied + i * size + d, load_cached(key + 2 * d, 2));
        keys[i] = copied + i * size;
    }
    for (int64_t q = 0; q < count; ++q) {
        __m512 products[16];
        const __m512 first = _mm512_loadu_ps(queries[q]);
        for (int own = 0; own < 16; own += kKeys) {
            __m512 some[kKeys];
            for (int i = 0; i < kKeys; ++i) some[i] = _mm512_mul_ps(first, _mm512_loadu_ps(keys[own + i]));
            for (int64_t d = 16; d < size; d += 16) {
                const __m512 part = _mm512_loadu_ps(queries[q] + d);
                for (int i = 0; i < kKeys; ++i) {
                    some[i] = _mm512_fmadd_ps(part, _mm512_loadu_ps(keys[own + i] + d), some[i]);
                }
            }
            std::copy_n(some, kKeys, products + own);
        }
        _mm512_storeu_ps(scores + q * scores_stride + t, sums_of(products));
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

// Scores of 16 positions, of Q queries. keys: for every two numbers of the head, a pair of each position.
template <int Q, int planes>
void score_pairs(const float* keys, int64_t pairs, const int8_t* queries, float* scores, int64_t stride) {
    __m512 sums[Q][planes];
    for (int q = 0; q < Q; ++q) {
        for (int p = 0; p < planes; ++p) sums[q][p] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < pairs; ++k) {
        const __m512bh key = (__m512bh)_mm512_loadu_si512(keys + 16 * k);
        for (int q = 0; q < Q; ++q) {
            const int32_t* pair = reinterpret_cast<const int32_t*>(queries + 4 * planes * (q * pairs + k));
            for (int p = 0; p < planes; ++p) {
                sums[q][p] = _mm512_dpbf16_ps(sums[q][p], key, (__m512bh)_mm512_set1_epi32(pair[p]));
            }
        }
    }
    for (int q = 0; q < Q; ++q) {
        if (planes == 2) sums[q][0] = _mm512_add_ps(sums[q][0], sums[q][planes - 1]);
        _mm512_storeu_ps(scores + q * stride, sums[q][0]);
    }
}

// For every two numbers of the head, a pair of each of 16 positions from `t` on, `stride` floats apart.
[[gnu::always_inline]] inline void pair_keys(const Cache& cache, const Piece& piece, int64_t t, int64_t last,
                                             float* keys, int64_t stride) {
    const int64_t pairs = cache.head_dim / 2;
    for (int64_t k = 0; k < pairs; k += 16) {
        __m512i rows[16], columns[16];
        for (int64_t i = 0; i < 16; ++i) {
            const char* key = cache.keys + cache.at(piece.context[std::min(t + i, last)], piece.kv_head);
            rows[i] = _mm512_maskz_loadu_epi32(first_lanes(pairs - k), key + 4 * k);
        }
        transpose(rows, columns);
        for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(keys + stride * (k + i), columns[i]);
    }
}

// As `score_block`, of a cache in bfloat16 and queries that `split_row` has made bfloat16s of.
template <int planes>
void score_pairs_of_block(const Cache& cache, const Piece& piece, int64_t t, int64_t last, const int8_t* queries,
                          int64_t count, float* scores, int64_t scores_stride, float* keys) {
    const int64_t pairs = cache.head_dim / 2;
    pair_keys(cache, piece, t, last, keys, 16);
    scores += t;
    for (int64_t q = 0; q < count; q += kPairTile) {
        with_count<kPairTile>(std::min(kPairTile, count - q), [&](auto tile) {
            const int8_t* own = queries + q * 4 * planes * pairs;
            score_pairs<tile(), planes>(keys, pairs, own, scores + q * scores_stride, scores_stride);
        });
    }
}

// Where the first 16 of 32 numbers lie in two vectors that unpacking has left; the others lie 8 behind them.
inline __m512i unpacked_order() {
    return _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
}

// Sums of the values of all positions of Q queries, weighted with pairs of bfloat16s, times `inverses`. Positions are
// taken in twos; the first `common` of them are every query's, and of the rest each takes its own.
template <int Q, int planes>
void weigh_values(const Cache& cache, const Piece& piece, int64_t common, const int64_t* lengths,
                  const float* const* weights, const float* inverses, float* const* outs) {
    const __m512i first = unpacked_order(), second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int64_t d = 0; d < cache.head_dim; d += 32) {
        const __mmask16 lanes = first_lanes((cache.head_dim - d) / 2);
        __m512 sums[Q][2];
        for (int q = 0; q < Q; ++q) sums[q][0] = sums[q][1] = _mm512_setzero_ps();
        const auto load = [&](int64_t t) {
            const char* value = cache.values + cache.at(piece.context[t], piece.kv_head) + 2 * d;
            return _mm512_maskz_loadu_epi32(lanes, value);
        };
        const auto add = [&](int q, int64_t t, __m512i even, __m512i odd) {
            const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(even, odd);
            const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(even, odd);
            const int32_t* pair = reinterpret_cast<const int32_t*>(weights[q]) + t / 2 * planes;
            for (int p = 0; p < planes; ++p) {
                const __m512bh weight = (__m512bh)_mm512_set1_epi32(pair[p]);
                sums[q][0] = _mm512_dpbf16_ps(sums[q][0], low, weight);
                sums[q][1] = _mm512_dpbf16_ps(sums[q][1], high, weight);
            }
        };
        int64_t t = 0;
        for (; t + 2 <= common; t += 2) {
            const __m512i even = load(t), odd = load(t + 1);
            for (int q = 0; q < Q; ++q) add(q, t, even, odd);
        }
#pragma GCC unroll 12
        for (int q = 0; q < Q; ++q) {  // unrolled, or the sums lie in memory
            for (int64_t own = t; own < lengths[q]; own += 2) {
                add(q, own, load(own), own + 1 < lengths[q] ? load(own + 1) : _mm512_setzero_si512());
            }
            const __m512 inverse = _mm512_set1_ps(inverses[q]);
            const __m512 low = _mm512_permutex2var_ps(sums[q][0], first, sums[q][1]);
            _mm512_storeu_ps(outs[q] + d, _mm512_mul_ps(low, inverse));
            if (d + 16 == cache.head_dim) continue;
            const __m512 high = _mm512_permutex2var_ps(sums[q][0], second, sums[q][1]);
            _mm512_storeu_ps(outs[q] + d + 16, _mm512_mul_ps(high, inverse));
        }
    }
}

#endif

// 2^x of an x of at most 0, to a unit in the last place and x 2^-24: for weights of attention, sooner than
// `exponential`. NaN stays NaN.
inline __m512 two_to_the(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);  // 0 beyond
    const __m512 n = _mm512_roundscale_ps(x, 8), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.534581242594868e-4f);
    for (const float c : {1.339993090368734e-3f, 9.618489071726799e-3f, 5.550328642129898e-2f, 2.4022646248340607e-1f,
                          6.931471824645996e-1f, 1.0f}) {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    return _mm512_scalef_ps(p, n);
}

// The largest score of one query.
[[gnu::always_inline]] inline float largest_score(const float* scores, int64_t length) {
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (int64_t t = 0; t < length; t += 16) {
        largest = _mm512_mask_max_ps(largest, first_lanes(length - t), largest, _mm512_loadu_ps(scores + t));
    }
    return _mm512_reduce_max_ps(largest);
}

// e^((score - top) scale) of the first `count` of 16 scores, 0 of the rest. factor: scale / ln 2.
[[gnu::always_inline]] inline __m512 weights_of(const float* scores, int64_t count, __m512 top, __m512 factor) {
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores), top), factor);
    return _mm512_maskz_mov_ps(first_lanes(count), two_to_the(x));
}

// Scores of one query to e^(score - largest), in place; returns their sum. With planes they become pairs of bfloat16s.
template <int planes>
float exponentiate(float* scores, int64_t length, float scale) {
    const __m512 top = _mm512_set1_ps(largest_score(scores, length));
    const __m512 factor = _mm512_set1_ps(scale * 1.44269504088896341f);
    __m512 total = _mm512_setzero_ps();
    for (int64_t t = 0; t < length; t += 16) {
        __m512 weight = weights_of(scores + t, length - t, top, factor);
        if constexpr (planes == 0) _mm512_storeu_ps(scores + t, weight);
#if defined(__AVX512BF16__)
        if constexpr (planes == 1) {
            const __m256i pairs = (__m256i)_mm512_cvtneps_pbh(weight);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(scores + t / 2), pairs);
            weight = expand(pairs);  // what weighs adds up to 1
        }
        if constexpr (planes == 2) _mm512_storeu_si512(scores + t, in_two_planes(weight));
#endif
        total = _mm512_add_ps(total, weight);
    }
    return _mm512_reduce_add_ps(total);
}

// Adds the weighted values of positions begin..end to Q queries' sums, some numbers of the head at a time.
template <int Q>
void add_values(const Cache& cache, const Piece& piece, int64_t begin, int64_t end, const float* const* weights,
                float* const* outs) {
    for (int64_t d = 0; d < cache.head_dim; d += 16 * kParts) {
        const int parts = static_cast<int>(std::min<int64_t>(16 * kParts, cache.head_dim - d) / 16);
        __m512 sums[Q][kParts];
        for (int q = 0; q < Q; ++q) {
            for (int i = 0; i < kParts; ++i) sums[q][i] = i < parts ? _mm512_loadu_ps(outs[q] + d + 16 * i) : __m512{};
        }
        for (int64_t t = begin; t < end; ++t) {
            const char* value = cache.values + cache.at(piece.context[t], piece.kv_head) + d * cache.width;
            __m512 v[kParts];
            for (int i = 0; i < kParts; ++i) {
                v[i] = i < parts ? load_cached(value + 16 * i * cache.width, cache.width) : __m512{};
            }
            for (int q = 0; q < Q; ++q) {
                const __m512 weight = _mm512_set1_ps(weights[q][t]);
                for (int i = 0; i < kParts; ++i) sums[q][i] = _mm512_fmadd_ps(weight, v[i], sums[q][i]);
            }
        }
        for (int q = 0; q < Q; ++q) {
            for (int i = 0; i < kParts; ++i) {
                if (i < parts) _mm512_storeu_ps(outs[q] + d + 16 * i, sums[q][i]);
            }
        }
    }
}

constexpr int64_t kPieceRows = 8;

// A length up to whole blocks of positions.
int64_t padded(int64_t length, int64_t block) { return (length + block - 1) / block * block; }

// The queries of a piece, row after row, and where their scores, [count, stride], and results go. inverses: of the sums
// of their weights.
struct Queries {
    int64_t count, stride;
    float* scores;
    std::vector<const float*> rows, weights;
    std::vector<float*> outs;
    std::vector<int64_t> lengths;
    std::vector<float> inverses;

    void resize(int64_t new_count) {
        count = new_count;
        rows.resize(count), weights.resize(count), outs.resize(count), lengths.resize(count), inverses.resize(count);
    }
};

#if defined(__AVX512BF16__)

template <int planes>
void attend_in_pairs(const Cache& cache, const Piece& piece, const Piece& next, Queries& queries, float scale,
                     float* scratch) {
    const int64_t size = cache.head_dim, most = piece.most(), count = queries.count;
    int8_t* split = reinterpret_cast<int8_t*>(scratch + 16 * size);
    for (int64_t q = 0; q < count; ++q) split_row<planes>(queries.rows[q], size, split + 2 * planes * q * size);
    for (int64_t t = 0; t < most; t += 16) {
        fetch_positions(cache.keys, cache, piece, t + kPositionsAhead, std::min(t + kPositionsAhead + 16, most));
        fetch_positions(cache.values, cache, piece, t, std::min(t + 16, most));
        score_pairs_of_block<planes>(cache, piece, t, most - 1, split, count, queries.scores, queries.stride, scratch);
    }
    fetch_positions(cache.keys, cache, next, 0, std::min(kPositionsAhead, next.most()));
    for (int64_t q = 0; q < count; ++q) {
        const float total = exponentiate<planes>(queries.scores + q * queries.stride, queries.lengths[q], scale);
        queries.inverses[q] = 1.0f / total;
    }
    for (int64_t q = 0; q < count; q += kPairTile) {  // the first of a tile is the shortest
        with_count<kPairTile>(std::min(kPairTile, count - q), [&](auto tile) {
            weigh_values<tile(), planes>(cache, piece, queries.lengths[q], queries.lengths.data() + q,
                                         queries.weights.data() + q, queries.inverses.data() + q,
                                         queries.outs.data() + q);
        });
    }
}

#endif

#if defined(TRUESPEC_TILES)

// By sizes of the model alone, never by numbers of rows: attention by tiles rounds in another order.
bool attends_by_tiles(const Cache& cache, int64_t group) {
    return truespec_attends_by_tiles && cache.width == 2 && cache.head_dim % kTileInputs == 0 && group <= 2 * kTileRows;
}

// Rows of each tile, where tiles of one size hold `count` rows. The last one ends with the last row, so it may compute
// rows of the one before again.
int64_t rows_of_tiles(int64_t count) {
    const int64_t tiles = (count + kTileRows - 1) / kTileRows;
    return (count + tiles - 1) / tiles;
}

// Calls work with the first rows of two tiles at a time; the second is -1 where there is but one.
template <typename Work>
void for_tiles(int64_t count, const Work& work) {
    const int64_t rows = rows_of_tiles(count);
    for (int64_t row = 0; row < count; row += 2 * rows) {
        work(std::min(row, count - rows), row + rows < count ? std::min(row + rows, count - rows) : -1);
    }
}

// Scores of 32 positions from `t` on, as `score_block` has them, of queries that `split_row_for_tiles` has made
// bfloat16s of. panel: room for the keys.
template <int planes>
void score_by_tiles(const Cache& cache, const Piece& piece, int64_t t, const int8_t* queries, const Queries& to,
                    float* panel) {
    const int64_t size = cache.head_dim, query_bytes = 2 * planes * size, score_bytes = 4 * to.stride;
    for (int half = 0; half < 2; ++half) {
        pair_keys(cache, piece, t + 16 * half, piece.most() - 1, panel + 16 * half, kPanelRow / 4);
    }
    for_tiles(to.count, [&](int64_t first, int64_t second) {
        clear_sums();
        add_panel<planes>(queries + first * query_bytes, second < 0 ? nullptr : queries + second * query_bytes,
                          query_bytes, reinterpret_cast<const char*>(panel), size, [] {});
        float* scores = to.scores + t;
        STORE_TILE(0, scores + first * to.stride, score_bytes);
        STORE_TILE(1, scores + first * to.stride + 16, score_bytes);
        if (second < 0) return;
        STORE_TILE(2, scores + second * to.stride, score_bytes);
        STORE_TILE(3, scores + second * to.stride + 16, score_bytes);
    });
}

// As `exponentiate`, to rows of tiles of 32 positions.
template <int planes>
float exponentiate_for_tiles(float* scores, int64_t length, float scale) {
    const __m512 top = _mm512_set1_ps(largest_score(scores, length));
    const __m512 factor = _mm512_set1_ps(scale * 1.44269504088896341f);
    __m512 total = _mm512_setzero_ps();
    for (int64_t t = 0; t < length; t += 32) {
        float weights[32];
        for (int64_t i = 0; i < 32; i += 16) {
            __m512 weight = weights_of(scores + t + i, length - t - i, top, factor);
            if (planes == 1) weight = expand((__m256i)_mm512_cvtneps_pbh(weight));  // what weighs adds up to 1
            total = _mm512_add_ps(total, weight);
            _mm512_storeu_ps(weights + i, weight);
        }
        split_row_for_tiles<planes>(weights, 32, reinterpret_cast<int8_t*>(scores) + 2 * planes * t);
    }
    return _mm512_reduce_add_ps(total);
}

// 32 numbers of the values of 32 positions from `t` on, 0 from position `length` on: for every two positions, a pair of
// each number, in the order of unpacking.
void pair_values(const Cache& cache, const Piece& piece, int64_t t, int64_t length, int64_t number, char* panel) {
    const auto load = [&](int64_t position) {
        if (position >= length) return _mm512_setzero_si512();
        return _mm512_loadu_si512(cache.values + cache.at(piece.context[position], piece.kv_head) + 2 * number);
    };
    for (int64_t i = 0; i < 32; i += 2, panel += kPanelRow) {
        const __m512i even = load(t + i), odd = load(t + i + 1);
        _mm512_store_si512(panel, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(panel + 64, _mm512_unpackhi_epi16(even, odd));
    }
}

// Adds the weighted values of positions begin..end to the sums of `count` queries, [count, head_dim]; those of position
// 0 begin them. `begin` is a multiple of 32.
template <int planes>
void weigh_by_tiles(const Cache& cache, const Piece& piece, int64_t begin, int64_t end, int64_t count,
                    const float* weights, int64_t stride, float* sums) {
    const int64_t size = cache.head_dim;
    alignas(64) char panels[2][kTileInputs / 2 * kPanelRow];
    const auto at = [&](int64_t query) { return reinterpret_cast<const int8_t*>(weights + query * stride); };
    for (int64_t number = 0; number < size; number += 32) {
        for_tiles(count, [&](int64_t first, int64_t second) {
            float *own = sums + first * size + number, *others = sums + second * size + number;
            clear_sums();
            if (begin > 0) {
                LOAD_TILE(0, own, 4 * size);
                LOAD_TILE(1, own + 16, 4 * size);
            }
            if (begin > 0 && second >= 0) {
                LOAD_TILE(2, others, 4 * size);
                LOAD_TILE(3, others + 16, 4 * size);
            }
            for (int64_t t = begin; t < end; t += 32) {
                char* panel = panels[t / 32 % 2];
                pair_values(cache, piece, t, end, number, panel);
                const int8_t* own_weights = at(first) + 2 * planes * t;
                const int8_t* other_weights = second < 0 ? nullptr : at(second) + 2 * planes * t;
                add_panel<planes>(own_weights, other_weights, 4 * stride, panel, 32, [] {});
            }
            STORE_TILE(0, own, 4 * size);
            STORE_TILE(1, own + 16, 4 * size);
            if (second < 0) return;
            STORE_TILE(2, others, 4 * size);
            STORE_TILE(3, others + 16, 4 * size);
        });
    }
}

// The positions that all rows see are weighed for all of them, up to whole panels of 32; the rest for each row on its
// own, with 0 behind what it sees: so its sums go through the same steps in any company, and what lies behind it may be
// no number.
template <int planes>
void attend_by_tiles(const Cache& cache, const Piece& piece, const Piece& next, Queries& queries, int64_t group,
                     float scale, float* scratch) {
    const int64_t size = cache.head_dim, most = piece.most(), count = queries.count, stride = queries.stride;
    float* sums = scratch + 16 * size;
    int8_t* split = reinterpret_cast<int8_t*>(sums);  // until the scores are there
    for (int64_t q = 0; q < count; ++q) {
        split_row_for_tiles<planes>(queries.rows[q], size, split + 2 * planes * q * size);
    }
    shape_for_panels(rows_of_tiles(count));
    for (int64_t t = 0; t < most; t += 32) {
        fetch_positions(cache.keys, cache, piece, t + kPositionsAhead, std::min(t + kPositionsAhead + 32, most));
        fetch_positions(cache.values, cache, piece, t, std::min(t + 32, most));
        score_by_tiles<planes>(cache, piece, t, split, queries, scratch);
    }
    fetch_positions(cache.keys, cache, next, 0, std::min(kPositionsAhead, next.most()));
    for (int64_t q = 0; q < count; ++q) {
        const float total = exponentiate_for_tiles<planes>(queries.scores + q * stride, queries.lengths[q], scale);
        queries.inverses[q] = 1.0f / total;
    }
    const int64_t whole = piece.length / 32 * 32;
    if (whole > 0) weigh_by_tiles<planes>(cache, piece, 0, whole, count, queries.scores, stride, sums);
    shape_for_panels(rows_of_tiles(group));
    for (int64_t q = 0; q < count; q += group) {
        if (queries.lengths[q] == whole) continue;
        weigh_by_tiles<planes>(cache, piece, whole, queries.lengths[q], group, queries.scores + q * stride, stride,
                               sums + q * size);
    }
    release_tiles();
    const __m512i first = unpacked_order(), second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int64_t q = 0; q < count; ++q) {
        const __m512 inverse = _mm512_set1_ps(queries.inverses[q]);
        float* out = queries.outs[q];
        for (int64_t d = 0; d < size; d += 32) {
            const __m512 a = _mm512_load_ps(sums + q * size + d), b = _mm512_load_ps(sums + q * size + d + 16);
            _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_permutex2var_ps(a, first, b), inverse));
            _mm512_storeu_ps(out + d + 16, _mm512_mul_ps(_mm512_permutex2var_ps(a, second, b), inverse));
        }
    }
}

#else

bool attends_by_tiles(const Cache&, int64_t) { return false; }

#endif

void attend_plainly(const Cache& cache, const Piece& piece, const Piece& next, Queries& queries, float scale,
                    float* scratch) {
    const int64_t size = cache.head_dim, most = piece.most(), count = queries.count;
    for (int64_t t = 0; t < most; t += 16) {
        fetch_positions(cache.keys, cache, piece, t + kPositionsAhead, std::min(t + kPositionsAhead + 16, most));
        fetch_positions(cache.values, cache, piece, t, std::min(t + 16, most));
        score_block(cache, piece, t, most - 1, queries.rows.data(), count, queries.scores, queries.stride, scratch);
    }
    fetch_positions(cache.keys, cache, next, 0, std::min(kPositionsAhead, next.most()));
    for (int64_t q = 0; q < count; ++q) {
        queries.inverses[q] = 1.0f / exponentiate<0>(queries.scores + q * queries.stride, queries.lengths[q], scale);
        std::memset(queries.outs[q], 0, size * sizeof(float));
    }
    for (int64_t q = 0; q < count; q += kQueryTile) {
        const int64_t tile = std::min(kQueryTile, count - q);
        const int64_t common = queries.lengths[q];  // the first of a tile is the shortest
        const float* const* weights = queries.weights.data();
        float* const* outs = queries.outs.data();
        with_count<kQueryTile>(tile, [&](auto some) {
            add_values<some()>(cache, piece, 0, common, weights + q, outs + q);
        });
        for (int64_t i = q; i < q + tile; ++i) {
            const int64_t own = queries.lengths[i];
            if (own > common) add_values<1>(cache, piece, common, own, weights + i, outs + i);
        }
    }
    for (int64_t q = 0; q < count; ++q) {
        float* out = queries.outs[q];
        const __m512 inverse = _mm512_set1_ps(queries.inverses[q]);
        for (int64_t d = 0; d < size; d += 16) {
            _mm512_storeu_ps(out + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), inverse));
        }
    }
}

void attend_piece(const Shape& shape, const Cache& cache, const Heads& heads, const Piece& piece, const Piece& next,
                  int64_t planes, float* scratch, float* attended) {
    const int64_t size = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
    thread_local Queries queries;  // allocates nothing once it has been as large
    queries.resize((piece.row_end - piece.row_begin) * group);
    const bool in_tiles = attends_by_tiles(cache, group);
    queries.stride = padded(piece.most(), in_tiles ? 32 : 16);
    queries.scores = scratch + (16 + queries.count) * size;
    for (int64_t q = 0; q < queries.count; ++q) {
        const int64_t row = piece.row_begin + q / group, head = piece.kv_head * group + q % group;
        queries.rows[q] = heads.query + row * heads.query_stride + head * size;
        queries.weights[q] = queries.scores + q * queries.stride;
        queries.outs[q] = attended + (row * shape.num_heads + head) * size;
        queries.lengths[q] = piece.length + q / group;
    }
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
#if defined(TRUESPEC_TILES)
    if (in_tiles) {
        const auto attend = planes == 1 ? attend_by_tiles<1> : attend_by_tiles<2>;
        return attend(cache, piece, next, queries, group, scale, scratch);
    }
#endif
#if defined(__AVX512BF16__)
    if (cache.width == 2) {
        return (planes == 1 ? attend_in_pairs<1> : attend_in_pairs<2>)(cache, piece, next, queries, scale, scratch);
    }
#endif
    attend_plainly(cache, piece, next, queries, scale, scratch);
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

int64_t scratch_size(const Shape& shape, int64_t longest) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    return 16 * shape.head_dim + kPieceRows * group * (shape.head_dim + padded(longest, 32));
}

int64_t longest_context(const Step& step) {
    int64_t longest = 0;
    for (int64_t s = 0; s < step.num_spans; ++s) {
        longest = std::max(longest, step.context_starts[s + 1] - step.context_starts[s]);
    }
    return longest;
}

void attend_spans(const Shape& shape, const Cache& cache, const Heads& heads, const Step& step, int64_t planes,
                  float* scratch, float* attended, int thread, int threads) {
    const bool scarce = threads > 1 && step.num_spans * shape.num_kv_heads < 4 * threads;
    int64_t turn = 0;
    Piece piece{};
    for (int64_t s = 0; s < step.num_spans; ++s) {
        const int64_t start = step.row_starts[s], stop = step.row_starts[s + 1];
        const int64_t length = step.context_starts[s + 1] - step.context_starts[s];
        const int64_t most = scarce ? std::max<int64_t>(1, std::min(kPieceRows, (stop - start) / threads)) : kPieceRows;
        for (int64_t row = start; row < stop; row += most) {
            for (int64_t g = 0; g < shape.num_kv_heads; ++g) {
                if (turn++ % threads != thread) continue;
                const Piece next{row, std::min(row + most, stop), length - (stop - 1 - row),
                                 step.context + step.context_starts[s], g};
                if (piece.context) attend_piece(shape, cache, heads, piece, next, planes, scratch, attended);
                piece = next;
            }
        }
    }
    if (piece.context) attend_piece(shape, cache, heads, piece, piece, planes, scratch, attended);
}

}  // namespace truespec
