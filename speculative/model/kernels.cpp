// The decoder's arithmetic for x86 CPUs with AVX-512: products with packed weights, attention over the paged cache, and
// whole layers in one call.
//
// Activations are float32. Every row is computed on its own, in an order that depends neither on the number of rows in
// the call nor on the number of threads: a token's hidden state is the same bits alone, in a batch, or behind drafts.
//
// Weights lie in panels of 16 or 32 outputs, so that one pass over a panel serves up to 8 rows; a step of a few rows
// is bound by reading them once. Four- and eight-bit weights are multiplied as integers, exactly, with activations
// rounded to 16 bits in blocks of 32 (relative to the block's largest: 2^-16).

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__)
#error "These kernels need AVX-512 (F, BW, DQ)."
#endif

namespace {

constexpr int64_t kBlock = 32;       // inputs that share a scale
constexpr int64_t kRowTile = 8;      // rows that share one pass over a panel
constexpr int64_t kFewRows = 16;     // up to so many rows, every thread prepares all of them itself: no barrier
constexpr int64_t kPanelInts = 16;   // outputs a panel of integer weights
constexpr int64_t kPanelFloats = 32;  // and of bfloat16 or float32 weights
constexpr int64_t kQueryTile = 6;    // queries that share one pass over the values

enum Kind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3 };

}  // namespace

extern "C" {

struct Linear {
    const void* weight;
    const float* bias;  // may be null
    int64_t num_inputs;
    int64_t num_outputs;
    int64_t kind;
};

struct Layer {
    const float* input_norm;  // [hidden]
    const float* mlp_norm;    // [hidden]
    const float* head_norm;   // [num_heads + num_kv_heads, head_dim], may be null
    Linear qkv;
    Linear output;
    Linear gate_up;
    Linear down;
};

struct Shape {
    int64_t hidden_size;
    int64_t intermediate_size;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t num_slots;       // of the cache
    int64_t cache_is_bfloat16;
    float* rotary;           // [positions, 2, head_dim / 2]: cosines, sines
    double eps;
};

struct Step {
    int64_t num_rows;
    int64_t num_spans;
    const int64_t* positions;       // [num_rows]
    const int64_t* slots;           // [num_rows]
    const int64_t* row_starts;      // [num_spans + 1]
    const int64_t* context;         // slots of all positions that each span's last row attends to, span after span
    const int64_t* context_starts;  // [num_spans + 1]
};

}  // extern "C"

namespace {

struct Range {
    int64_t begin, end;
};

Range share(int64_t count, int thread, int num_threads) {
    return {count * thread / num_threads, count * (thread + 1) / num_threads};
}

__m512 expand(__m256i bfloat16s) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16s), 16));
}

__m256i round_to_bfloat16(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __m512i halves = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan, _mm512_set1_epi32(0x7FC0));
    return _mm512_cvtepi32_epi16(halves);
}

// e^x to two units in the last place (Cephes' polynomial); NaN stays NaN.
__m512 exponential(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(100.0f), _mm512_max_ps(_mm512_set1_ps(-110.0f), x));  // infinity and 0 beyond
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

__mmask16 first_lanes(int64_t count) {
    return count >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << std::max<int64_t>(count, 0)) - 1);
}

// -- rows before a product --------------------------------------------------------------------------------------------

// Rows as a product reads them: floats, or 16-bit integers with a scale and a sum for every block.
struct Rows {
    const float* floats;
    int64_t stride;  // of floats
    const int16_t* ints;
    const float* scales;  // [rows, blocks]
    const float* sums;    // [rows, blocks], times the scale
};

enum class Input { kPlain, kNormed, kSwiGLU };

struct Source {
    Input input;
    const float* rows;
    int64_t stride;
    const float* norm;  // of kNormed
    float eps;
};

void norm_row(const float* row, const float* weight, float eps, int64_t size, float* out) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 x = _mm512_maskz_loadu_ps(first_lanes(size - i), row + i);
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    const float scale = 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        const __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, row + i), _mm512_set1_ps(scale));
        _mm512_mask_storeu_ps(out + i, lanes, _mm512_mul_ps(x, _mm512_maskz_loadu_ps(lanes, weight + i)));
    }
}

// silu(gate) * up, of a row [gate | up].
void swiglu_row(const float* row, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        const __m512 gate = _mm512_maskz_loadu_ps(lanes, row + i), up = _mm512_maskz_loadu_ps(lanes, row + size + i);
        const __m512 decay = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
        const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), decay));
        _mm512_mask_storeu_ps(out + i, lanes, _mm512_mul_ps(silu, up));
    }
}

void quantise_row(const float* row, int64_t size, int16_t* ints, float* scales, float* sums) {
    for (int64_t i = 0; i < size; i += kBlock) {
        const __m512 x0 = _mm512_loadu_ps(row + i), x1 = _mm512_loadu_ps(row + i + 16);
        const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1)));
        // NaN and infinity must come out as NaN: integers would hide them.
        const __m512 probe = _mm512_mul_ps(_mm512_add_ps(x0, x1), _mm512_setzero_ps());
        const bool finite = _mm512_cmp_ps_mask(probe, probe, _CMP_UNORD_Q) == 0 && std::isfinite(largest);
        const __m512 inverse = _mm512_set1_ps(largest > 0 && finite ? 32767.0f / largest : 0.0f);
        const __m512i q0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, inverse));
        const __m512i q1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, inverse));
        const float scale = finite ? largest / 32767.0f : NAN;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(ints + i), _mm512_cvtepi32_epi16(q0));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(ints + i + 16), _mm512_cvtepi32_epi16(q1));
        scales[i / kBlock] = scale;
        sums[i / kBlock] = scale * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1)));
    }
}

// Buffers of one call; grown, never shrunk, by the thread that calls.
struct Buffer {
    std::vector<float> store;
    float* at_least(int64_t size) {
        if (static_cast<int64_t>(store.size()) < size) store.resize(size);
        return store.data();
    }
};

struct Workspace {
    Buffer floats, ints, scales, sums, scores, qkv, attended, gate_up;
};

Workspace& workspace() {
    thread_local Workspace own;
    return own;
}

// Where `prepare` puts rows: one part for each thread when the rows are few, else one for all.
struct Prepared {
    float* floats;
    int16_t* ints;
    float* scales;
    float* sums;
    int64_t num_parts, rows_size;

    Prepared(Workspace& space, int64_t num_rows, int64_t most_inputs, int num_threads) {
        num_parts = num_rows <= kFewRows ? num_threads : 1;
        rows_size = num_rows * most_inputs;
        floats = space.floats.at_least(num_parts * rows_size);
        ints = reinterpret_cast<int16_t*>(space.ints.at_least(num_parts * (rows_size / 2 + 1)));
        scales = space.scales.at_least(num_parts * (rows_size / kBlock + 1));
        sums = space.sums.at_least(num_parts * (rows_size / kBlock + 1));
    }
};

// One thread's share of getting the rows ready. Ends with a barrier where rows were shared out.
Rows prepare(const Source& source, const Linear& linear, int64_t num_rows, const Prepared& to, int thread,
             int threads) {
    const bool is_int = linear.kind >= kInt8;
    if (source.input == Input::kPlain && !is_int) return {source.rows, source.stride, nullptr, nullptr, nullptr};
    const bool own = to.num_parts > 1 || threads == 1;
    const int64_t part = own ? thread % to.num_parts : 0, size = linear.num_inputs, blocks = size / kBlock;
    float* floats = to.floats + part * to.rows_size;
    int16_t* ints = to.ints + part * (to.rows_size / 2 + 1) * 2;
    float* scales = to.scales + part * (to.rows_size / kBlock + 1);
    float* sums = to.sums + part * (to.rows_size / kBlock + 1);
    const Range rows = own ? Range{0, num_rows} : share(num_rows, thread, threads);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const float* row = source.rows + r * source.stride;
        if (source.input != Input::kPlain) {
            float* out = floats + r * size;
            if (source.input == Input::kNormed) norm_row(row, source.norm, source.eps, size, out);
            else swiglu_row(row, size, out);
            row = out;
        }
        if (is_int) quantise_row(row, size, ints + r * size, scales + r * blocks, sums + r * blocks);
    }
    if (!own) {
#pragma omp barrier
    }
    return {floats, size, ints, scales, sums};
}

// -- products ---------------------------------------------------------------------------------------------------------

struct Target {
    float* rows;
    int64_t stride;
    bool add;  // to what is there
};

inline void store(__m512 sum, const Linear& linear, const Target& target, int64_t row, int64_t output) {
    const __mmask16 lanes = first_lanes(linear.num_outputs - output);
    float* out = target.rows + row * target.stride + output;
    if (linear.bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(lanes, linear.bias + output));
    if (target.add) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, out), sum);
    _mm512_mask_storeu_ps(out, lanes, sum);
}

// A panel of bfloat16 weights: for every input, 16 pairs (output j in the low half, j + 16 in the high one).
template <int R, bool is_bfloat16>
void float_tile(const Rows& rows, int64_t row, const Linear& linear, int64_t panel, const Target& target) {
    const int64_t size = linear.num_inputs;
    const float* a[R];
    __m512 low[R], high[R];
    for (int r = 0; r < R; ++r) {
        a[r] = rows.floats + (row + r) * rows.stride;
        low[r] = high[r] = _mm512_setzero_ps();
    }
    const char* weight = static_cast<const char*>(linear.weight) + panel * size * kPanelFloats * (is_bfloat16 ? 2 : 4);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    for (int64_t k = 0; k < size; ++k) {
        __m512 w0, w1;
        if constexpr (is_bfloat16) {
            const __m512i pairs = _mm512_loadu_si512(weight + k * 64);
            w0 = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
            w1 = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
        } else {
            w0 = _mm512_loadu_ps(reinterpret_cast<const float*>(weight + k * 128));
            w1 = _mm512_loadu_ps(reinterpret_cast<const float*>(weight + k * 128 + 64));
        }
        for (int r = 0; r < R; ++r) {
            const __m512 x = _mm512_set1_ps(a[r][k]);
            low[r] = _mm512_fmadd_ps(w0, x, low[r]);
            high[r] = _mm512_fmadd_ps(w1, x, high[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
        store(low[r], linear, target, row + r, panel * kPanelFloats);
        store(high[r], linear, target, row + r, panel * kPanelFloats + 16);
    }
}

// Adds to each of 16 sums the products of two weights with two activations.
inline __m512i multiply_pairs(__m512i sum, __m512i weights, const int16_t* pair) {
    const int32_t* both = reinterpret_cast<const int32_t*>(pair);
#if defined(__AVX512VNNI__)
    // As an intrinsic, the broadcast becomes an instruction of its own, which costs a sixth of the time at 16 rows.
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*both));
    return sum;
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(weights, _mm512_set1_epi32(*both)));
#endif
}

inline __m512 load_halves(const void* halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(halves)));
}

constexpr int64_t kInt4Bytes = 256 + 32 + 32;  // a block of a panel: 16 x 32 numbers, scales, smallest values
constexpr int64_t kInt8Bytes = 512 + 32;       // 16 x 32 numbers, scales

// Blocks of a panel of four-bit weights w = scale * n + least: 64 bytes hold 4 pairs of inputs, a pair a nibble.
template <int R, bool is_int4>
void int_tile(const Rows& rows, int64_t row, const Linear& linear, int64_t panel, const Target& target) {
    const int64_t size = linear.num_inputs, blocks = size / kBlock;
    const char* block = static_cast<const char*>(linear.weight) + panel * blocks * (is_int4 ? kInt4Bytes : kInt8Bytes);
    constexpr int kChains = R == 1 ? 4 : R <= 4 ? 2 : 1;  // independent sums, to hide the latency of a product
    const int16_t* a[R];
    __m512 sums[R];
    for (int r = 0; r < R; ++r) {
        a[r] = rows.ints + (row + r) * size;
        sums[r] = _mm512_setzero_ps();
    }
    const __m512i nibble = _mm512_set1_epi16(15);
    for (int64_t b = 0; b < blocks; ++b, block += is_int4 ? kInt4Bytes : kInt8Bytes) {
        __m512i products[R][kChains];
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < kChains; ++c) products[r][c] = _mm512_setzero_si512();
        }
#pragma GCC unroll 4
        for (int z = 0; z < 4; ++z) {
            __m512i weights[4];
            if constexpr (is_int4) {
                const __m512i packed = _mm512_loadu_si512(block + z * 64);
                weights[0] = _mm512_and_si512(packed, nibble);
                weights[1] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
                weights[2] = _mm512_and_si512(_mm512_srli_epi16(packed, 8), nibble);
                weights[3] = _mm512_srli_epi16(packed, 12);
            } else {
                const __m256i* bytes = reinterpret_cast<const __m256i*>(block + z * 128);
                for (int n = 0; n < 4; ++n) weights[n] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(bytes + n));
            }
            for (int r = 0; r < R; ++r) {
                const int16_t* pairs = a[r] + b * kBlock + z * 8;
                for (int n = 0; n < 4; ++n) {
                    __m512i& sum = products[r][n % kChains];
                    sum = multiply_pairs(sum, weights[n], pairs + 2 * n);
                }
            }
        }
        const __m512 scale = load_halves(block + (is_int4 ? 256 : 512));
        for (int r = 0; r < R; ++r) {
            const int64_t at = (row + r) * blocks + b;
            const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[at]));
            __m512i product = products[r][0];
            for (int c = 1; c < kChains; ++c) product = _mm512_add_epi32(product, products[r][c]);
            sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), both, sums[r]);
            if constexpr (is_int4) {
                sums[r] = _mm512_fmadd_ps(load_halves(block + 288), _mm512_set1_ps(rows.sums[at]), sums[r]);
            }
        }
    }
    for (int r = 0; r < R; ++r) store(sums[r], linear, target, row + r, panel * kPanelInts);
}

template <int R>
void tile(const Rows& rows, int64_t row, const Linear& linear, int64_t panel, const Target& target) {
    switch (linear.kind) {
        case kFloat32: return float_tile<R, false>(rows, row, linear, panel, target);
        case kBfloat16: return float_tile<R, true>(rows, row, linear, panel, target);
        case kInt8: return int_tile<R, false>(rows, row, linear, panel, target);
        default: return int_tile<R, true>(rows, row, linear, panel, target);
    }
}

void some_rows(int64_t count, const Rows& rows, int64_t row, const Linear& linear, int64_t panel, const Target& to) {
    switch (count) {
        case 1: return tile<1>(rows, row, linear, panel, to);
        case 2: return tile<2>(rows, row, linear, panel, to);
        case 3: return tile<3>(rows, row, linear, panel, to);
        case 4: return tile<4>(rows, row, linear, panel, to);
        case 5: return tile<5>(rows, row, linear, panel, to);
        case 6: return tile<6>(rows, row, linear, panel, to);
        case 7: return tile<7>(rows, row, linear, panel, to);
        default: return tile<8>(rows, row, linear, panel, to);
    }
}

void multiply(const Rows& rows, int64_t num_rows, const Linear& linear, const Target& target, int thread, int threads) {
    const int64_t width = linear.kind >= kInt8 ? kPanelInts : kPanelFloats;
    const Range panels = share((linear.num_outputs + width - 1) / width, thread, threads);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
        for (int64_t row = 0; row < num_rows; row += kRowTile) {
            some_rows(std::min(kRowTile, num_rows - row), rows, row, linear, panel, target);
        }
    }
}

// -- attention --------------------------------------------------------------------------------------------------------

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

// One layer's keys and values, [slots, num_kv_heads, head_dim] each, as bytes.
struct Cache {
    char* keys;
    char* values;
    int64_t width;  // bytes a number
    int64_t num_kv_heads, head_dim;

    int64_t at(int64_t slot, int64_t head) const { return (slot * num_kv_heads + head) * head_dim * width; }
};

struct Heads {
    const float* query;
    const float* key;
    const float* value;
    int64_t query_stride, key_stride, value_stride;  // numbers a row
};

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

void write_rows(const Cache& cache, const Heads& heads, const Step& step, int thread, int threads) {
    const Range rows = share(step.num_rows, thread, threads);
    const int64_t size = cache.num_kv_heads * cache.head_dim;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const int64_t at = cache.at(step.slots[r], 0);
        write_cache(heads.key + r * heads.key_stride, cache.keys + at, size, cache.width);
        write_cache(heads.value + r * heads.value_stride, cache.values + at, size, cache.width);
    }
}

// Rows of one span that one thread attends for, and one of the cache's heads.
struct Piece {
    int64_t row_begin, row_end;  // of the step
    int64_t length;              // positions that the first row attends to; each later row one more
    const int64_t* context;
    int64_t kv_head;
};

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
        for (int i = 0; i < 16; ++i) products[i] = _mm512_mul_ps(first, _mm512_loadu_ps(keys[i]));
        for (int64_t d = 16; d < size; d += 16) {
            const __m512 part = _mm512_loadu_ps(queries[q] + d);
            for (int i = 0; i < 16; ++i) {
                products[i] = _mm512_fmadd_ps(part, _mm512_loadu_ps(keys[i] + d), products[i]);
            }
        }
        _mm512_storeu_ps(scores + q * scores_stride + t, sums_of(products));
    }
}

// Scores of one query to e^(score - largest); returns their sum.
float exponentiate(float* scores, int64_t length, float scale) {
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (int64_t t = 0; t < length; t += 16) {
        largest = _mm512_mask_max_ps(largest, first_lanes(length - t), largest, _mm512_loadu_ps(scores + t));
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest)), factor = _mm512_set1_ps(scale);
    __m512 total = _mm512_setzero_ps();
    for (int64_t t = 0; t < length; t += 16) {
        const __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + t), top), factor);
        const __m512 weight = _mm512_maskz_mov_ps(first_lanes(length - t), exponential(x));
        _mm512_storeu_ps(scores + t, weight);
        total = _mm512_add_ps(total, weight);
    }
    return _mm512_reduce_add_ps(total);
}

// Adds the weighted values of positions begin..end to Q queries' sums, 64 numbers (or fewer) of the head at a time.
template <int Q>
void add_values(const Cache& cache, const Piece& piece, int64_t begin, int64_t end, const float* const* weights,
                float* const* outs) {
    for (int64_t d = 0; d < cache.head_dim; d += 64) {
        const int parts = static_cast<int>(std::min<int64_t>(64, cache.head_dim - d) / 16);
        __m512 sums[Q][4];
        for (int q = 0; q < Q; ++q) {
            for (int i = 0; i < 4; ++i) sums[q][i] = i < parts ? _mm512_loadu_ps(outs[q] + d + 16 * i) : __m512{};
        }
        for (int64_t t = begin; t < end; ++t) {
            const char* value = cache.values + cache.at(piece.context[t], piece.kv_head) + d * cache.width;
            __m512 v[4];
            for (int i = 0; i < 4; ++i) {
                v[i] = i < parts ? load_cached(value + 16 * i * cache.width, cache.width) : __m512{};
            }
            for (int q = 0; q < Q; ++q) {
                const __m512 weight = _mm512_set1_ps(weights[q][t]);
                for (int i = 0; i < 4; ++i) sums[q][i] = _mm512_fmadd_ps(weight, v[i], sums[q][i]);
            }
        }
        for (int q = 0; q < Q; ++q) {
            for (int i = 0; i < parts; ++i) _mm512_storeu_ps(outs[q] + d + 16 * i, sums[q][i]);
        }
    }
}

void add_values_of(int64_t count, const Cache& cache, const Piece& piece, int64_t begin, int64_t end,
                   const float* const* weights, float* const* outs) {
    switch (count) {
        case 1: return add_values<1>(cache, piece, begin, end, weights, outs);
        case 2: return add_values<2>(cache, piece, begin, end, weights, outs);
        case 3: return add_values<3>(cache, piece, begin, end, weights, outs);
        case 4: return add_values<4>(cache, piece, begin, end, weights, outs);
        case 5: return add_values<5>(cache, piece, begin, end, weights, outs);
        default: return add_values<6>(cache, piece, begin, end, weights, outs);
    }
}

constexpr int64_t kPieceRows = 8;

int64_t padded(int64_t length) { return (length + 15) / 16 * 16; }

int64_t scratch_size(const Shape& shape, int64_t longest) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    return 16 * shape.head_dim + kPieceRows * group * padded(longest);
}

void attend_piece(const Shape& shape, const Cache& cache, const Heads& heads, const Piece& piece, float* scratch,
                  float* attended) {
    const int64_t size = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
    const int64_t num_rows = piece.row_end - piece.row_begin, most = piece.length + num_rows - 1;
    const int64_t stride = padded(most), count = num_rows * group;
    float* scores = scratch + 16 * size;
    std::vector<const float*> queries(count), weights(count);
    std::vector<float*> outs(count);
    std::vector<float> totals(count);
    for (int64_t q = 0; q < count; ++q) {
        const int64_t row = piece.row_begin + q / group, head = piece.kv_head * group + q % group;
        queries[q] = heads.query + row * heads.query_stride + head * size;
        weights[q] = scores + q * stride;
        outs[q] = attended + (row * shape.num_heads + head) * size;
    }
    for (int64_t t = 0; t < most; t += 16) {
        score_block(cache, piece, t, most - 1, queries.data(), count, scores, stride, scratch);
    }
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
    for (int64_t q = 0; q < count; ++q) {
        totals[q] = exponentiate(scores + q * stride, piece.length + q / group, scale);
        std::memset(outs[q], 0, size * sizeof(float));
    }
    for (int64_t q = 0; q < count; q += kQueryTile) {
        const int64_t tile = std::min(kQueryTile, count - q);
        const int64_t common = piece.length + q / group;  // the first of a tile is the shortest
        add_values_of(tile, cache, piece, 0, common, weights.data() + q, outs.data() + q);
        for (int64_t i = q; i < q + tile; ++i) {
            const int64_t own = piece.length + i / group;
            if (own > common) add_values<1>(cache, piece, common, own, weights.data() + i, outs.data() + i);
        }
    }
    for (int64_t q = 0; q < count; ++q) {
        const __m512 inverse = _mm512_set1_ps(1.0f / totals[q]);
        for (int64_t d = 0; d < size; d += 16) {
            _mm512_storeu_ps(outs[q] + d, _mm512_mul_ps(_mm512_loadu_ps(outs[q] + d), inverse));
        }
    }
}

int64_t longest_context(const Step& step) {
    int64_t longest = 0;
    for (int64_t s = 0; s < step.num_spans; ++s) {
        longest = std::max(longest, step.context_starts[s + 1] - step.context_starts[s]);
    }
    return longest;
}

// Attention of all spans, once everybody's keys and values are written. Pieces go round the threads in turn.
void attend_spans(const Shape& shape, const Cache& cache, const Heads& heads, const Step& step, float* scratch,
                  float* attended, int thread, int threads) {
    const bool scarce = threads > 1 && step.num_spans * shape.num_kv_heads < 4 * threads;
    int64_t turn = 0;
    for (int64_t s = 0; s < step.num_spans; ++s) {
        const int64_t start = step.row_starts[s], stop = step.row_starts[s + 1];
        const int64_t length = step.context_starts[s + 1] - step.context_starts[s];
        const int64_t most = scarce ? std::max<int64_t>(1, std::min(kPieceRows, (stop - start) / threads)) : kPieceRows;
        for (int64_t row = start; row < stop; row += most) {
            for (int64_t g = 0; g < shape.num_kv_heads; ++g) {
                if (turn++ % threads != thread) continue;
                const Piece piece{row, std::min(row + most, stop), length - (stop - 1 - row),
                                  step.context + step.context_starts[s], g};
                attend_piece(shape, cache, heads, piece, scratch, attended);
            }
        }
    }
}

// -- layers -----------------------------------------------------------------------------------------------------------

void rotate_head(float* head, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 lanes = first_lanes(half - i);
        const __m512 c = _mm512_maskz_loadu_ps(lanes, cosines + i), s = _mm512_maskz_loadu_ps(lanes, sines + i);
        const __m512 x = _mm512_maskz_loadu_ps(lanes, head + i), y = _mm512_maskz_loadu_ps(lanes, head + half + i);
        _mm512_mask_storeu_ps(head + i, lanes, _mm512_fnmadd_ps(y, s, _mm512_mul_ps(x, c)));
        _mm512_mask_storeu_ps(head + half + i, lanes, _mm512_fmadd_ps(x, s, _mm512_mul_ps(y, c)));
    }
}

// The angles of each row: of its position in the table, or (without a table) row after row as `rotate` of layers.py
// takes them, [num_rows, head_dim] each.
struct Angles {
    const float* table;
    const float* cosines;
    const float* signed_sines;
};

// Norms (where the model has head norms) and rotates the query and key heads of one thread's rows, in place.
void rotate_rows(const Shape& shape, const float* head_norm, const Angles& angles, const Step& step, float* qkv,
                 int64_t stride, int thread, int threads) {
    const Range rows = share(step.num_rows, thread, threads);
    const int64_t size = shape.head_dim, half = size / 2;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const float* cosines = angles.table ? angles.table + step.positions[r] * size : angles.cosines + r * size;
        const float* sines = angles.table ? cosines + half : angles.signed_sines + r * size + half;
        for (int64_t h = 0; h < shape.num_heads + shape.num_kv_heads; ++h) {
            float* head = qkv + r * stride + h * size;
            if (head_norm) norm_row(head, head_norm + h * size, static_cast<float>(shape.eps), size, head);
            rotate_head(head, cosines, sines, half);
        }
    }
}

struct Sizes {
    int64_t query, kv, qkv;
    explicit Sizes(const Shape& shape)
        : query(shape.num_heads * shape.head_dim), kv(shape.num_kv_heads * shape.head_dim), qkv(query + 2 * kv) {}
};

Cache layer_cache(const Shape& shape, void* data, int64_t layer) {
    const int64_t width = shape.cache_is_bfloat16 ? 2 : 4;
    const int64_t part = shape.num_slots * shape.num_kv_heads * shape.head_dim * width;
    char* keys = static_cast<char*>(data) + 2 * layer * part;
    return {keys, keys + part, width, shape.num_kv_heads, shape.head_dim};
}

// The buffers of a pass over some rows.
struct Pass {
    const Shape& shape;
    const Step& step;
    Sizes sizes;
    float eps;
    Prepared prepared;
    int64_t scratch_each;
    float *scratch, *qkv, *attended, *gate_up;

    Pass(const Shape& shape, const Step& step, int64_t num_threads, int64_t most_inputs = 0)
        : shape(shape),
          step(step),
          sizes(shape),
          eps(static_cast<float>(shape.eps)),
          prepared(workspace(), step.num_rows,
                   std::max({shape.hidden_size, shape.intermediate_size, sizes.query, most_inputs}),
                   static_cast<int>(std::max<int64_t>(1, num_threads))),
          scratch_each(scratch_size(shape, longest_context(step))) {
        Workspace& space = workspace();
        scratch = space.scores.at_least(std::max<int64_t>(1, num_threads) * scratch_each);
        qkv = space.qkv.at_least(step.num_rows * sizes.qkv);
        attended = space.attended.at_least(step.num_rows * sizes.query);
        gate_up = space.gate_up.at_least(step.num_rows * 2 * shape.intermediate_size);
    }
};

// One thread's part of a pass. Every part ends with all threads done.
struct Worker {
    const Pass& pass;
    int thread, threads;

    void wait() const {
        if (threads > 1) {
#pragma omp barrier
        }
    }

    void product(const Source& source, const Linear& linear, const Target& target) const {
        const int64_t num_rows = pass.step.num_rows;
        const Rows ready = prepare(source, linear, num_rows, pass.prepared, thread, threads);
        multiply(ready, num_rows, linear, target, thread, threads);
        wait();
    }

    void attention(const Source& source, const Layer& layer, const Angles& angles, const Cache& cache,
                   const Target& target) const {
        const Sizes& sizes = pass.sizes;
        product(source, layer.qkv, {pass.qkv, sizes.qkv, false});
        rotate_rows(pass.shape, layer.head_norm, angles, pass.step, pass.qkv, sizes.qkv, thread, threads);
        const float* key = pass.qkv + sizes.query;
        const Heads heads{pass.qkv, key, key + sizes.kv, sizes.qkv, sizes.qkv, sizes.qkv};
        write_rows(cache, heads, pass.step, thread, threads);
        wait();
        attend_spans(pass.shape, cache, heads, pass.step, pass.scratch + thread * pass.scratch_each, pass.attended,
                     thread, threads);
        wait();
        product({Input::kPlain, pass.attended, sizes.query, nullptr, 0}, layer.output, target);
    }

    void mlp(const Source& source, const Layer& layer, const Target& target) const {
        const int64_t inner = pass.shape.intermediate_size;
        product(source, layer.gate_up, {pass.gate_up, 2 * inner, false});
        product({Input::kSwiGLU, pass.gate_up, 2 * inner, nullptr, 0}, layer.down, target);
    }
};

template <typename Work>
void in_threads(int64_t num_threads, const Work& work) {
    if (num_threads <= 1) {
        work(0, 1);
        return;
    }
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    work(omp_get_thread_num(), omp_get_num_threads());
}

}  // namespace

extern "C" {

// rows [num_rows, inputs] -> out [num_rows, outputs].
void truespec_linear(const Linear* linear, int64_t num_rows, const float* rows, int64_t stride, float* out,
                     int64_t num_threads) {
    const int num_parts = static_cast<int>(std::max<int64_t>(1, num_threads));
    const Prepared prepared(workspace(), num_rows, linear->num_inputs, num_parts);
    in_threads(num_threads, [&](int thread, int threads) {
        const Source source{Input::kPlain, rows, stride, nullptr, 0};
        const Rows ready = prepare(source, *linear, num_rows, prepared, thread, threads);
        multiply(ready, num_rows, *linear, {out, linear->num_outputs, false}, thread, threads);
    });
}

// Stores keys and values of one layer, then attends: query, key and value -> attended [num_rows, num_heads, head_dim].
void truespec_attend(const Shape* shape, const Step* step, void* cache_data, int64_t layer, const float* query,
                     int64_t query_stride, const float* key, int64_t key_stride, const float* value,
                     int64_t value_stride, float* attended, int64_t num_threads) {
    const Cache cache = layer_cache(*shape, cache_data, layer);
    const Heads heads{query, key, value, query_stride, key_stride, value_stride};
    const int64_t each = scratch_size(*shape, longest_context(*step));
    float* scratch = workspace().scores.at_least(std::max<int64_t>(1, num_threads) * each);
    in_threads(num_threads, [&](int thread, int threads) {
        write_rows(cache, heads, *step, thread, threads);
        if (threads > 1) {
#pragma omp barrier
        }
        attend_spans(*shape, cache, heads, *step, scratch + thread * each, attended, thread, threads);
    });
}

// rows [num_rows, size], normed.
void truespec_norm(int64_t num_rows, int64_t size, const float* rows, int64_t stride, const float* weight, double eps,
                   float* out) {
    for (int64_t r = 0; r < num_rows; ++r) {
        norm_row(rows + r * stride, weight, static_cast<float>(eps), size, out + r * size);
    }
}

// Layers first..last of a decoder, in place on hidden [num_rows, hidden_size].
void truespec_layers(const Layer* layers, int64_t first, int64_t last, const Shape* shape, const Step* step,
                     void* cache_data, float* hidden, int64_t num_threads) {
    Pass pass(*shape, *step, num_threads);
    in_threads(num_threads, [&](int thread, int threads) {
        const Worker worker{pass, thread, threads};
        for (int64_t index = first; index < last; ++index) {
            const Layer& layer = layers[index];
            const Cache cache = layer_cache(*shape, cache_data, index);
            const Angles angles{shape->rotary, nullptr, nullptr};
            worker.attention({Input::kNormed, hidden, shape->hidden_size, layer.input_norm, pass.eps}, layer, angles,
                             cache, {hidden, shape->hidden_size, true});
            worker.mlp({Input::kNormed, hidden, shape->hidden_size, layer.mlp_norm, pass.eps}, layer,
                       {hidden, shape->hidden_size, true});
        }
    });
}

// Attention of one layer, projections and rotation included: rows [num_rows, inputs] -> out [num_rows, hidden_size].
// cosines and signed_sines are [num_rows, head_dim], as `rotate` of layers.py takes them.
void truespec_attention(const Layer* layer, int64_t index, const Shape* shape, const Step* step, void* cache_data,
                        const float* rows, int64_t stride, const float* cosines, const float* signed_sines, float* out,
                        int64_t num_threads) {
    Pass pass(*shape, *step, num_threads, layer->qkv.num_inputs);
    in_threads(num_threads, [&](int thread, int threads) {
        const Worker worker{pass, thread, threads};
        worker.attention({Input::kPlain, rows, stride, nullptr, 0}, *layer, {nullptr, cosines, signed_sines},
                         layer_cache(*shape, cache_data, index), {out, shape->hidden_size, false});
    });
}

// The MLP of one layer: rows [num_rows, hidden_size] -> out [num_rows, hidden_size].
void truespec_mlp(const Layer* layer, int64_t num_rows, const float* rows, int64_t stride, float* out,
                  int64_t num_threads) {
    const Linear &gate_up = layer->gate_up, &down = layer->down;
    Shape shape{};
    shape.hidden_size = gate_up.num_inputs;
    shape.intermediate_size = down.num_inputs;
    shape.num_heads = shape.num_kv_heads = 1;
    Step step{};
    step.num_rows = num_rows;
    Pass pass(shape, step, num_threads);
    in_threads(num_threads, [&](int thread, int threads) {
        const Worker worker{pass, thread, threads};
        worker.mlp({Input::kPlain, rows, stride, nullptr, 0}, *layer, {out, down.num_outputs, false});
    });
}

}  // extern "C"
