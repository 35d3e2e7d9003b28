// The engine's arithmetic for x86 CPUs with AVX-512: products with packed weights, attention over the paged cache, whole
// layers in one call; and over the vocabulary, distributions, filters and draws.
//
// Activations are float32. Every row is computed on its own, in an order that depends neither on the number of rows in
// the call nor on the number of threads: a token's hidden state is the same bits alone, in a batch, or behind drafts.
//
// Weights lie in panels of 32 outputs, so that one pass over a panel serves several rows; a step of a few rows is bound
// by reading them once, one of many by its products. Four- and eight-bit weights are multiplied as integers, exactly, with activations
// rounded in blocks of 32: to 16 bits (relative to the block's largest: 2^-16), or to 8 bits, as llama.cpp does.
// Bfloat16 weights are multiplied with activations that are a bfloat16, or the sum of two (2^-17 relative): the
// processor multiplies and adds pairs of those at twice the rate of float32.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include <omp.h>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__)
#error "These kernels need AVX-512 (F, BW, DQ)."
#endif

namespace {

constexpr int64_t kBlock = 32;       // inputs that share a scale
constexpr int64_t kFewRows = 16;     // up to so many rows, every thread prepares all of them itself: no barrier
constexpr int64_t kPanel = 32;       // outputs
constexpr int64_t kQueryTile = 6;    // queries that share one pass over keys or values

// Of those with Act, activations have as many bits.
enum Kind : int64_t {
    kFloat32 = 0,
    kBfloat16 = 1,
    kBfloat16Act16 = 2,
    kInt8 = 3,
    kInt4 = 4,
    kInt8Act8 = 5,
    kInt4Act8 = 6,
};

#if defined(__AVX512BF16__)
constexpr bool kPairs = true;  // bfloat16 weights are multiplied in pairs
#else
constexpr bool kPairs = false;
#endif

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

// A draft head of one layer that reads a token and a hidden state side by side (EAGLE-3).
struct DraftHead {
    const void* embedding;  // [vocabulary, hidden]
    int64_t embedding_is_bfloat16;
    int64_t residual_is_normed;
    const float* token_norm;   // [hidden]
    const float* hidden_norm;  // [hidden]
    Layer layer;
    const float* norm;  // [hidden]
    Linear lm_head;
    const int64_t* ids;  // [outputs of the LM head] the target's tokens
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

// The drafts of a round, entry after entry. Filters are of some entries, as truespec_filter has them. With `survival`,
// a draft may end early, as StopRule of draft_stopping.py says.
struct DraftRound {
    int64_t num_entries;
    int64_t* counts;                // [num_entries] drafts each, at least 1; on return, how many were made
    const int64_t* context;         // slots of all positions that the row before each one's last draft attends to
    const int64_t* context_starts;  // [num_entries + 1]
    const uint64_t* seeds;          // [num_entries]
    const uint64_t* lengths;        // [num_entries] tokens before each one's first draft, which number its round
    uint64_t purpose;               // of the drafts' random numbers
    const float* temperature;       // [num_entries]
    const uint8_t* greedy;          // [num_entries]
    int64_t num_filters;
    const int64_t* filtered;
    const float* log_min_p;
    const int64_t* top_k;
    const float* top_p;
    const double* survival;   // [2, num_edges + 1], may be null
    const double* following;  // [2, num_edges + 1]
    const double* edges;      // [num_edges], ascending
    int64_t num_edges;
    double least;
    double* probabilities;    // [drafts] by the drafter's own distribution, entry after entry
};

}  // extern "C"

namespace {

struct Range {
    int64_t begin, end;
};

Range share(int64_t count, int64_t thread, int64_t num_threads) {
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

// Rows as a product reads them: floats, or bfloat16s, or integers with a scale and a sum for every block. A float that
// two bfloat16s stand for is their sum: two high ones, then the two low ones beside them. An integer of 16 bits lies in
// two bytes, 256 high + low: four high ones, then the four low ones beside them; one of 8 bits has but one.
struct Rows {
    const float* floats;
    int64_t stride;        // of floats
    const int8_t* bytes;   // [rows, inputs / 4, planes, 4] integers, or [rows, inputs / 2, planes, 2] bfloat16s
    const float* scales;   // [rows, blocks]
    const float* sums;     // [rows, blocks], times the scale
    const int32_t* zeros;  // [rows, blocks]: -128 x the sum of the integers
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

// The largest integers that a block's largest number becomes; of two planes, no high byte comes to 128.
constexpr float kLargest[] = {0.0f, 127.0f, 32512.0f};

int32_t sum_of_bytes(__m256i bytes) {
    const __m512i words = _mm512_cvtepi8_epi16(bytes);
    return _mm512_reduce_add_epi32(_mm512_madd_epi16(words, _mm512_set1_epi16(1)));
}

template <int planes>
void quantise_row(const float* row, int64_t size, int8_t* bytes, float* scales, float* sums, int32_t* zeros) {
    for (int64_t i = 0; i < size; i += kBlock) {
        const __m512 x0 = _mm512_loadu_ps(row + i), x1 = _mm512_loadu_ps(row + i + 16);
        const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1)));
        // NaN and infinity must come out as NaN: integers would hide them.
        const __m512 probe = _mm512_mul_ps(_mm512_add_ps(x0, x1), _mm512_setzero_ps());
        const bool finite = _mm512_cmp_ps_mask(probe, probe, _CMP_UNORD_Q) == 0 && std::isfinite(largest);
        const __m512 inverse = _mm512_set1_ps(largest > 0 && finite ? kLargest[planes] / largest : 0.0f);
        const __m512i q0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, inverse));
        const __m512i q1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, inverse));
        const float scale = finite ? largest / kLargest[planes] : NAN;
        const __m256i low = _mm256_set_m128i(_mm512_cvtepi32_epi8(q1), _mm512_cvtepi32_epi8(q0));
        int32_t sum = sum_of_bytes(low);
        __m256i* place = reinterpret_cast<__m256i*>(bytes + planes * i);
        if constexpr (planes == 1) {
            _mm256_storeu_si256(place, low);
        } else {
            const __m512i half = _mm512_set1_epi32(128);  // a low byte above 127 is a negative one: the high byte has it
            const __m128i h0 = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(q0, half), 8));
            const __m128i h1 = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(q1, half), 8));
            const __m256i high = _mm256_set_m128i(h1, h0);
            sum += 256 * sum_of_bytes(high);
            const __m256i first = _mm256_unpacklo_epi32(high, low), second = _mm256_unpackhi_epi32(high, low);
            _mm256_storeu_si256(place, _mm256_permute2x128_si256(first, second, 0x20));
            _mm256_storeu_si256(place + 1, _mm256_permute2x128_si256(first, second, 0x31));
        }
        scales[i / kBlock] = scale;
        sums[i / kBlock] = scale * static_cast<float>(sum);
        zeros[i / kBlock] = -128 * sum;
    }
}

// An odd row ends with a zero.
template <int planes>
void split_row(const float* row, int64_t size, int8_t* bytes) {
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 x = _mm512_maskz_loadu_ps(first_lanes(size - i), row + i);
        const __m256i high = round_to_bfloat16(x);
        const __mmask16 pairs = first_lanes((size - i + 1) / 2 * planes);
        if constexpr (planes == 1) {
            _mm512_mask_storeu_epi32(bytes + 2 * i, pairs, _mm512_zextsi256_si512(high));
        } else {
            const __m256i low = round_to_bfloat16(_mm512_sub_ps(x, expand(high)));
            const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(high), low, 1);
            _mm512_mask_storeu_epi32(bytes + 4 * i, pairs, _mm512_permutexvar_epi32(order, both));
        }
    }
}

void round_row(const float* row, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        _mm512_mask_storeu_ps(out + i, lanes, expand(round_to_bfloat16(_mm512_maskz_loadu_ps(lanes, row + i))));
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
    Buffer floats, bytes, scales, sums, zeros, scores, qkv, attended, gate_up, pairs, logits, states;
};

Workspace& workspace() {
    thread_local Workspace own;
    return own;
}

// Where `prepare` puts rows: one part for each thread when the rows are few, else one for all.
struct Prepared {
    float* floats;
    int8_t* bytes;
    float* scales;
    float* sums;
    int32_t* zeros;
    int64_t num_parts, rows_size, bytes_size;

    Prepared(Workspace& space, int64_t num_rows, int64_t most_inputs, int num_threads) {
        num_parts = num_rows <= kFewRows ? num_threads : 1;
        rows_size = num_rows * most_inputs;
        floats = space.floats.at_least(num_parts * rows_size);
        bytes_size = 4 * (rows_size + num_rows);  // two bfloat16s a number, and the zeros of odd rows
        bytes = reinterpret_cast<int8_t*>(space.bytes.at_least(num_parts * bytes_size / 4));
        scales = space.scales.at_least(num_parts * (rows_size / kBlock + 1));
        sums = space.sums.at_least(num_parts * (rows_size / kBlock + 1));
        zeros = reinterpret_cast<int32_t*>(space.zeros.at_least(num_parts * (rows_size / kBlock + 1)));
    }
};

int64_t planes_of(const Linear& linear) {
    return linear.kind == kBfloat16Act16 || linear.kind == kInt8Act8 || linear.kind == kInt4Act8 ? 1 : 2;
}

// One thread's share of getting the rows ready. Ends with a barrier where rows were shared out.
Rows prepare(const Source& source, const Linear& linear, int64_t num_rows, const Prepared& to, int thread,
             int threads) {
    const bool is_int = linear.kind >= kInt8, is_float = linear.kind == kFloat32 || (linear.kind == kBfloat16 && !kPairs);
    if (source.input == Input::kPlain && is_float) return {source.rows, source.stride, nullptr, nullptr, nullptr, nullptr};
    const bool own = to.num_parts > 1 || threads == 1;
    const int64_t part = own ? thread % to.num_parts : 0, size = linear.num_inputs, blocks = size / kBlock;
    float* floats = to.floats + part * to.rows_size;
    int8_t* bytes = to.bytes + part * to.bytes_size;
    float* scales = to.scales + part * (to.rows_size / kBlock + 1);
    float* sums = to.sums + part * (to.rows_size / kBlock + 1);
    int32_t* zeros = to.zeros + part * (to.rows_size / kBlock + 1);
    const Range rows = own ? Range{0, num_rows} : share(num_rows, thread, threads);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const float* row = source.rows + r * source.stride;
        if (source.input != Input::kPlain) {
            float* out = floats + r * size;
            if (source.input == Input::kNormed) norm_row(row, source.norm, source.eps, size, out);
            else swiglu_row(row, size, out);
            row = out;
        }
        const int64_t at = r * blocks;
        if (is_int && planes_of(linear) == 2) {
            quantise_row<2>(row, size, bytes + 2 * r * size, scales + at, sums + at, zeros + at);
        } else if (is_int) {
            quantise_row<1>(row, size, bytes + r * size, scales + at, sums + at, zeros + at);
        } else if (kPairs && linear.kind == kBfloat16) {
            split_row<2>(row, size, bytes + r * ((size + 1) / 2) * 8);
        } else if (kPairs && linear.kind == kBfloat16Act16) {
            split_row<1>(row, size, bytes + r * ((size + 1) / 2) * 4);
        } else if (linear.kind == kBfloat16Act16) {
            round_row(row, size, floats + r * size);
        }
    }
    if (!own) {
#pragma omp barrier
    }
    return {floats, size, bytes, scales, sums, zeros};
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

template <int R>
void store_panel(const __m512 (&sums)[R][2], const Linear& linear, const Target& target, int64_t row, int64_t panel) {
    for (int r = 0; r < R; ++r) {
        for (int half = 0; half < 2; ++half) store(sums[r][half], linear, target, row + r, panel * kPanel + 16 * half);
    }
}

// Rows that share one pass over a panel: what two sums for each and plane need of the processor's 32 registers.
constexpr int kFloatRows = 12, kPairRows = 8, kSplitPairRows = 6, kQuadRows = 6, kSplitQuadRows = 4;

// Which of the passes over a panel.
struct Turn {
    int64_t index, count;
};

// Asks for weights ahead of their use, line by line.
//
// One pass reads its panels in order. Where the processor multiplies bfloat16 (measured on AMD), bfloat16 weights in one
// product come fastest by the processor's own prefetching, those in few from past the outer caches, all others through
// all caches. Elsewhere (measured on Intel) a little ahead, into all caches, is best.
//
// Of several passes over a panel only the first would wait for memory, so each asks for half of the next panel.
constexpr int kAllCaches = 6;  // products, or more

template <int products>
class Ahead {
   public:
    Ahead(const char* weights, int64_t panel_bytes, Turn turn) : again_(turn.count > 1), step_(again_ ? 32 : 64) {
        place_ = weights + (again_ ? panel_bytes + panel_bytes * turn.index / turn.count : kDistance);
    }

    void fetch_line() {
        if (!kPairs || products >= kAllCaches || again_) _mm_prefetch(place_, _MM_HINT_T0);
        else if constexpr (products > 1) _mm_prefetch(place_, _MM_HINT_NTA);
        place_ += step_;
    }

   private:
    static constexpr int64_t kDistance = kPairs ? 8192 : 2048;
    bool again_;
    int64_t step_;
    const char* place_;
};

template <int R>
void float_tile(const Rows& rows, int64_t row, const Linear& linear, int64_t panel, Turn, const Target& target) {
    const int64_t size = linear.num_inputs;
    const float* a[R];
    __m512 sums[R][2];
    for (int r = 0; r < R; ++r) {
        a[r] = rows.floats + (row + r) * rows.stride;
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    }
    const float* weight = static_cast<const float*>(linear.weight) + panel * size * kPanel;
    for (int64_t k = 0; k < size; ++k, weight += kPanel) {
        const __m512 w0 = _mm512_loadu_ps(weight), w1 = _mm512_loadu_ps(weight + 16);
        for (int r = 0; r < R; ++r) {
            const __m512 x = _mm512_set1_ps(a[r][k]);
            sums[r][0] = _mm512_fmadd_ps(w0, x, sums[r][0]);
            sums[r][1] = _mm512_fmadd_ps(w1, x, sums[r][1]);
        }
    }
    store_panel<R>(sums, linear, target, row, panel);
}

// A panel of bfloat16 weights: for every two inputs, a pair for each of 32 outputs. An odd last input is paired with 0.
#if defined(__AVX512BF16__)

template <int R, int planes>
void pair_tile(const Rows& rows, int64_t row, const Linear& linear, int64_t panel, Turn turn, const Target& target) {
    const int64_t pairs = (linear.num_inputs + 1) / 2;
    const int8_t* a[R];
    __m512 sums[planes][R][2];
    for (int r = 0; r < R; ++r) {
        a[r] = rows.bytes + (row + r) * pairs * planes * 4;
        for (int p = 0; p < planes; ++p) sums[p][r][0] = sums[p][r][1] = _mm512_setzero_ps();
    }
    const char* weight = static_cast<const char*>(linear.weight) + panel * pairs * kPanel * 4;
    Ahead<R * planes> ahead(weight, pairs * kPanel * 4, turn);
    for (int64_t k = 0; k < pairs; ++k, weight += kPanel * 4) {
        ahead.fetch_line(), ahead.fetch_line();
        const __m512bh w0 = (__m512bh)_mm512_loadu_si512(weight), w1 = (__m512bh)_mm512_loadu_si512(weight + 64);
        for (int r = 0; r < R; ++r) {
            for (int p = 0; p < planes; ++p) {
                const int32_t* pair = reinterpret_cast<const int32_t*>(a[r] + (k * planes + p) * 4);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(*pair);
                sums[p][r][0] = _mm512_dpbf16_ps(sums[p][r][0], w0, x);
                sums[p][r][1] = _mm512_dpbf16_ps(sums[p][r][1], w1, x);
            }
        }
    }
    for (int r = 0; planes == 2 && r < R; ++r) {
        for (int half = 0; half < 2; ++half) sums[0][r][half] = _mm512_add_ps(sums[0][r][half], sums[planes - 1][r][half]);
    }
    store_panel<R>(sums[0], linear, target, row, panel);
}

#else

template <int R, int planes>
void pair_tile(const Rows& rows, int64_t row, const Linear& linear, int64_t panel, Turn turn, const Target& target) {
    const int64_t size = linear.num_inputs;
    const float* a[R];
    __m512 sums[R][2];
    for (int r = 0; r < R; ++r) {
        a[r] = rows.floats + (row + r) * rows.stride;
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    }
    const int64_t panel_bytes = (size + 1) / 2 * kPanel * 4;
    const char* weight = static_cast<const char*>(linear.weight) + panel * panel_bytes;
    Ahead<R * planes> ahead(weight, panel_bytes, turn);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    for (int64_t k = 0; k < size; k += 2, weight += kPanel * 4) {
        ahead.fetch_line(), ahead.fetch_line();
        const __m512i p0 = _mm512_loadu_si512(weight), p1 = _mm512_loadu_si512(weight + 64);
        const __m512 even0 = _mm512_castsi512_ps(_mm512_slli_epi32(p0, 16));
        const __m512 even1 = _mm512_castsi512_ps(_mm512_slli_epi32(p1, 16));
        const __m512 odd0 = _mm512_castsi512_ps(_mm512_and_si512(p0, upper));
        const __m512 odd1 = _mm512_castsi512_ps(_mm512_and_si512(p1, upper));
        for (int r = 0; r < R; ++r) {
            const __m512 x = _mm512_set1_ps(a[r][k]), y = _mm512_set1_ps(k + 1 < size ? a[r][k + 1] : 0.0f);
            sums[r][0] = _mm512_fmadd_ps(odd0, y, _mm512_fmadd_ps(even0, x, sums[r][0]));
            sums[r][1] = _mm512_fmadd_ps(odd1, y, _mm512_fmadd_ps(even1, x, sums[r][1]));
        }
    }
    store_panel<R>(sums, linear, target, row, panel);
}

#endif

// Adds to each of 16 sums the products of four weights (unsigned bytes) with four activations (signed).
inline __m512i multiply_quads(__m512i sum, __m512i weights, __m512i activations) {
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sum, weights, activations);
#else
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(activations, 8), 8), odd = _mm512_srai_epi16(activations, 8);
    const __m512i low = _mm512_and_si512(weights, _mm512_set1_epi16(255)), high = _mm512_srli_epi16(weights, 8);
    return _mm512_add_epi32(sum, _mm512_add_epi32(_mm512_madd_epi16(low, even), _mm512_madd_epi16(high, odd)));
#endif
}

inline __m512 load_halves(const void* halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(halves)));
}

constexpr int64_t kInt4Bytes = 512 + 64 + 64;  // a block of a panel: 32 x 32 numbers, scales, smallest values
constexpr int64_t kInt8Bytes = 1024 + 64;      // 32 x 32 numbers, scales

// Blocks of a panel of four-bit weights w = scale * n + least: 64 bytes hold four inputs of 16 outputs in their low
// halves, four more in the high ones. Of eight-bit weights w = scale * (n - 128) they hold four inputs.
template <int R, bool is_int4, int planes>
void int_tile(const Rows& rows, int64_t row, const Linear& linear, int64_t panel, Turn turn, const Target& target) {
    constexpr int64_t kNumbers = is_int4 ? 512 : 1024, kBytes = is_int4 ? kInt4Bytes : kInt8Bytes;
    const int64_t size = linear.num_inputs, blocks = size / kBlock;
    const char* block = static_cast<const char*>(linear.weight) + panel * blocks * kBytes;
    Ahead<kAllCaches> ahead(block, blocks * kBytes, turn);
    const int8_t* a[R];
    __m512 sums[R][2];
    for (int r = 0; r < R; ++r) {
        a[r] = rows.bytes + (row + r) * planes * size;
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    }
    const __m512i low_half = _mm512_set1_epi8(15);
    for (int64_t b = 0; b < blocks; ++b, block += kBytes) {
        for (int64_t line = 0; line < kBytes; line += 64) ahead.fetch_line();
        __m512i products[R][planes][2];
        for (int r = 0; r < R; ++r) {
            for (int p = 0; p < planes; ++p) products[r][p][0] = products[r][p][1] = _mm512_setzero_si512();
            if (is_int4) continue;
            products[r][planes - 1][0] = _mm512_set1_epi32(rows.zeros[(row + r) * blocks + b]);
            products[r][planes - 1][1] = products[r][planes - 1][0];
        }
#pragma GCC unroll 8
        for (int z = 0; z < 8; ++z) {
            __m512i weights[2];
            for (int half = 0; half < 2; ++half) {
                if constexpr (is_int4) {
                    const __m512i packed = _mm512_loadu_si512(block + z / 2 * 128 + 64 * half);
                    weights[half] = _mm512_and_si512(z % 2 ? _mm512_srli_epi16(packed, 4) : packed, low_half);
                } else {
                    weights[half] = _mm512_loadu_si512(block + z * 128 + 64 * half);
                }
            }
            for (int r = 0; r < R; ++r) {
                for (int p = 0; p < planes; ++p) {
                    const int8_t* quad = a[r] + planes * (b * kBlock + 4 * z) + 4 * p;
                    const __m512i four = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(quad));
                    for (int half = 0; half < 2; ++half) {
                        products[r][p][half] = multiply_quads(products[r][p][half], weights[half], four);
                    }
                }
            }
        }
        for (int half = 0; half < 2; ++half) {
            const __m512 scale = load_halves(block + kNumbers + 32 * half);
            for (int r = 0; r < R; ++r) {
                const int64_t at = (row + r) * blocks + b;
                __m512i product = products[r][planes - 1][half];
                if constexpr (planes == 2) product = _mm512_add_epi32(product, _mm512_slli_epi32(products[r][0][half], 8));
                const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[at]));
                sums[r][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), both, sums[r][half]);
                if constexpr (is_int4) {
                    const __m512 least = load_halves(block + kNumbers + 64 + 32 * half);
                    sums[r][half] = _mm512_fmadd_ps(least, _mm512_set1_ps(rows.sums[at]), sums[r][half]);
                }
            }
        }
    }
    store_panel<R>(sums, linear, target, row, panel);
}

// Calls work with `count`, at most `most`, as a constant.
template <int most, typename Work>
void with_count(int64_t count, const Work& work) {
    if constexpr (most > 1) {
        if (count < most) return with_count<most - 1>(count, work);
    }
    work(std::integral_constant<int, most>{});
}

// Every panel is multiplied with all rows before the next one, in tiles of about the same size, `most` rows or fewer:
// as many as have room for their sums in the processor's registers.
template <int most, typename Tile>
void multiply_tiles(int64_t num_rows, Range panels, const Tile& tile) {
    const int64_t tiles = (num_rows + most - 1) / most;
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
        for (int64_t t = 0; t < tiles; ++t) {
            const Range rows = share(num_rows, t, tiles);
            with_count<most>(rows.end - rows.begin, [&](auto count) {
                tile(count, rows.begin, panel, Turn{t, tiles});
            });
        }
    }
}

void multiply(const Rows& rows, int64_t num_rows, const Linear& linear, const Target& to, int thread, int threads) {
    const Range panels = share((linear.num_outputs + kPanel - 1) / kPanel, thread, threads);
    const auto floats = [&](auto R, int64_t row, int64_t panel, Turn turn) {
        float_tile<R()>(rows, row, linear, panel, turn, to);
    };
    const auto pairs = [&](auto planes) {
        return [&](auto R, int64_t row, int64_t panel, Turn turn) {
            pair_tile<R(), planes()>(rows, row, linear, panel, turn, to);
        };
    };
    const auto ints = [&](auto is_int4, auto planes) {
        return [&](auto R, int64_t row, int64_t panel, Turn turn) {
            int_tile<R(), is_int4(), planes()>(rows, row, linear, panel, turn, to);
        };
    };
    const std::integral_constant<int, 1> one;
    const std::integral_constant<int, 2> two;
    switch (linear.kind) {
        case kFloat32: return multiply_tiles<kFloatRows>(num_rows, panels, floats);
        case kBfloat16: return multiply_tiles<kSplitPairRows>(num_rows, panels, pairs(two));
        case kBfloat16Act16: return multiply_tiles<kPairRows>(num_rows, panels, pairs(one));
        case kInt8: return multiply_tiles<kSplitQuadRows>(num_rows, panels, ints(std::false_type(), two));
        case kInt4: return multiply_tiles<kSplitQuadRows>(num_rows, panels, ints(std::true_type(), two));
        case kInt8Act8: return multiply_tiles<kQuadRows>(num_rows, panels, ints(std::false_type(), one));
        default: return multiply_tiles<kQuadRows>(num_rows, panels, ints(std::true_type(), one));
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

    int64_t most() const { return length + row_end - row_begin - 1; }  // positions that the last row attends to
};

// Asks for the numbers of some positions of a piece's head, for the second cache: they lie apart, so the processor would
// ask for few at once.
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
template <int Q>
void score_pairs(const float* keys, int64_t pairs, const int8_t* queries, float* scores, int64_t stride) {
    __m512 sums[Q][2];
    for (int q = 0; q < Q; ++q) sums[q][0] = sums[q][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; ++k) {
        const __m512bh key = (__m512bh)_mm512_loadu_si512(keys + 16 * k);
        for (int q = 0; q < Q; ++q) {
            const int32_t* both = reinterpret_cast<const int32_t*>(queries + 8 * (q * pairs + k));
            sums[q][0] = _mm512_dpbf16_ps(sums[q][0], key, (__m512bh)_mm512_set1_epi32(both[0]));
            sums[q][1] = _mm512_dpbf16_ps(sums[q][1], key, (__m512bh)_mm512_set1_epi32(both[1]));
        }
    }
    for (int q = 0; q < Q; ++q) _mm512_storeu_ps(scores + q * stride, _mm512_add_ps(sums[q][0], sums[q][1]));
}

// As `score_block`, of a cache in bfloat16 and queries that `split_row` has split in two.
void score_pairs_of_block(const Cache& cache, const Piece& piece, int64_t t, int64_t last, const int8_t* queries,
                          int64_t count, float* scores, int64_t scores_stride, float* keys) {
    const int64_t pairs = cache.head_dim / 2;
    for (int64_t k = 0; k < pairs; k += 16) {
        __m512i rows[16], columns[16];
        for (int64_t i = 0; i < 16; ++i) {
            const char* key = cache.keys + cache.at(piece.context[std::min(t + i, last)], piece.kv_head);
            rows[i] = _mm512_maskz_loadu_epi32(first_lanes(pairs - k), key + 4 * k);
        }
        transpose(rows, columns);
        for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(keys + 16 * (k + i), columns[i]);
    }
    scores += t;
    for (int64_t q = 0; q < count; q += kQueryTile) {
        with_count<kQueryTile>(std::min(kQueryTile, count - q), [&](auto tile) {
            score_pairs<tile()>(keys, pairs, queries + q * 8 * pairs, scores + q * scores_stride, scores_stride);
        });
    }
}

#endif

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
            for (int i = 0; i < 4; ++i) {
                if (i < parts) _mm512_storeu_ps(outs[q] + d + 16 * i, sums[q][i]);
            }
        }
    }
}

constexpr int64_t kPieceRows = 8;

int64_t padded(int64_t length) { return (length + 15) / 16 * 16; }

int64_t scratch_size(const Shape& shape, int64_t longest) {
    const int64_t group = shape.num_heads / shape.num_kv_heads;
    return 16 * shape.head_dim + kPieceRows * group * (shape.head_dim + padded(longest));
}

void attend_piece(const Shape& shape, const Cache& cache, const Heads& heads, const Piece& piece, const Piece& next,
                  float* scratch, float* attended) {
    const int64_t size = shape.head_dim, group = shape.num_heads / shape.num_kv_heads;
    const int64_t most = piece.most(), stride = padded(most), count = (piece.row_end - piece.row_begin) * group;
    float* scores = scratch + (16 + count) * size;
    std::vector<const float*> queries(count), weights(count);
    std::vector<float*> outs(count);
    std::vector<float> totals(count);
    for (int64_t q = 0; q < count; ++q) {
        const int64_t row = piece.row_begin + q / group, head = piece.kv_head * group + q % group;
        queries[q] = heads.query + row * heads.query_stride + head * size;
        weights[q] = scores + q * stride;
        outs[q] = attended + (row * shape.num_heads + head) * size;
    }
    const bool in_pairs = kPairs && cache.width == 2;
    int8_t* split = reinterpret_cast<int8_t*>(scratch + 16 * size);
    for (int64_t q = 0; in_pairs && q < count; ++q) split_row<2>(queries[q], size, split + 4 * q * size);
    for (int64_t t = 0; t < most; t += 16) {
        fetch_positions(cache.keys, cache, piece, t + kPositionsAhead, std::min(t + kPositionsAhead + 16, most));
        fetch_positions(cache.values, cache, piece, t, std::min(t + 16, most));
#if defined(__AVX512BF16__)
        if (in_pairs) {
            score_pairs_of_block(cache, piece, t, most - 1, split, count, scores, stride, scratch);
            continue;
        }
#endif
        score_block(cache, piece, t, most - 1, queries.data(), count, scores, stride, scratch);
    }
    fetch_positions(cache.keys, cache, next, 0, std::min(kPositionsAhead, next.most()));
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
    for (int64_t q = 0; q < count; ++q) {
        totals[q] = exponentiate(scores + q * stride, piece.length + q / group, scale);
        std::memset(outs[q], 0, size * sizeof(float));
    }
    for (int64_t q = 0; q < count; q += kQueryTile) {
        const int64_t tile = std::min(kQueryTile, count - q);
        const int64_t common = piece.length + q / group;  // the first of a tile is the shortest
        with_count<kQueryTile>(tile, [&](auto queries) {
            add_values<queries()>(cache, piece, 0, common, weights.data() + q, outs.data() + q);
        });
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
                if (piece.context) attend_piece(shape, cache, heads, piece, next, scratch, attended);
                piece = next;
            }
        }
    }
    if (piece.context) attend_piece(shape, cache, heads, piece, piece, scratch, attended);
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

void embed_row(const DraftHead& head, int64_t token, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        const int64_t at = token * size + i;
        const __m512 x = head.embedding_is_bfloat16
                             ? expand(_mm256_maskz_loadu_epi16(lanes, static_cast<const uint16_t*>(head.embedding) + at))
                             : _mm512_maskz_loadu_ps(lanes, static_cast<const float*>(head.embedding) + at);
        _mm512_mask_storeu_ps(out + i, lanes, x);
    }
}

// -- distributions over the vocabulary -----------------------------------------------------------------------------------------

void divide_row(float* row, int64_t size, float by) {
    if (by == 1.0f) return;
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        _mm512_mask_storeu_ps(row + i, lanes, _mm512_div_ps(_mm512_maskz_loadu_ps(lanes, row + i), _mm512_set1_ps(by)));
    }
}

// Whether an entry's draft goes on behind a token of this probability; `survived` is the chance of all drafts so far.
bool goes_on(const DraftRound& round, int64_t entry, double probability, double& survived) {
    const double* end = round.edges + round.num_edges;
    const int64_t place = std::upper_bound(round.edges, end, probability) - round.edges +
                          (round.greedy[entry] ? round.num_edges + 1 : 0);
    survived *= round.survival[place];
    return survived * round.following[place] >= round.least;
}

// e^(x - largest) over its sum; NaN everywhere where a logit is NaN or infinite, or all are -infinite.
void softmax_row(const float* logits, int64_t size, float* out) {
    __m512 tops[4];
    for (__m512& top : tops) top = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < size; i += 64) {
        for (int j = 0; j < 4; ++j) {
            const __mmask16 lanes = first_lanes(size - i - 16 * j);
            tops[j] = _mm512_mask_max_ps(tops[j], lanes, _mm512_maskz_loadu_ps(lanes, logits + i + 16 * j), tops[j]);
        }
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(
        _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]))));
    __m512d totals[4];
    for (__m512d& total : totals) total = _mm512_setzero_pd();
    for (int64_t i = 0; i < size; i += 64) {
        for (int j = 0; j < 4; ++j) {
            const __mmask16 lanes = first_lanes(size - i - 16 * j);
            const __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(lanes, logits + i + 16 * j), top);
            const __m512 weight = _mm512_maskz_mov_ps(lanes, exponential(x));
            _mm512_mask_storeu_ps(out + i + 16 * j, lanes, weight);
            const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(weight));
            const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(weight, 1));
            totals[j] = _mm512_add_pd(totals[j], _mm512_add_pd(low, high));
        }
    }
    const double total = _mm512_reduce_add_pd(
        _mm512_add_pd(_mm512_add_pd(totals[0], totals[1]), _mm512_add_pd(totals[2], totals[3])));
    const __m512 inverse = _mm512_set1_ps(static_cast<float>(1.0 / total));
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        _mm512_mask_storeu_ps(out + i, lanes, _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, out + i), inverse));
    }
}

// All mass on the first of the largest; on token 0 where a number is none.
void one_hot_row(const float* logits, int64_t size, float* out) {
    std::memset(out, 0, size * sizeof(float));
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        largest = _mm512_mask_max_ps(largest, lanes, _mm512_maskz_loadu_ps(lanes, logits + i), largest);
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
    int64_t best = 0;
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        const __mmask16 equal = _mm512_mask_cmp_ps_mask(lanes, _mm512_maskz_loadu_ps(lanes, logits + i), top, _CMP_EQ_OQ);
        if (equal) {
            best = i + __builtin_ctz(equal);
            break;
        }
    }
    out[best] = 1.0f;
}

// Lanes of the numbers of a row that are not below `least`, copied one after another.
int64_t copy_from(const float* row, int64_t size, float least, float* out) {
    int64_t count = 0;
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 x = _mm512_maskz_loadu_ps(first_lanes(size - i), row + i);
        const __mmask16 kept = _mm512_mask_cmp_ps_mask(first_lanes(size - i), x, _mm512_set1_ps(least), _CMP_GE_OQ);
        _mm512_mask_compressstoreu_ps(out + count, kept, x);
        count += __builtin_popcount(kept);
    }
    return count;
}

// The k-th largest of a row. The k-th largest of the maxima of its parts is no larger: it leaves few to choose from.
float kth_largest(const float* row, int64_t size, int64_t k, float* scratch) {
    constexpr int64_t kPart = 64;
    float least = -INFINITY;
    if (k <= size / kPart) {
        int64_t parts = 0;
        for (int64_t i = 0; i < size; i += kPart) {
            scratch[parts++] = *std::max_element(row + i, row + std::min(i + kPart, size));
        }
        std::nth_element(scratch, scratch + k - 1, scratch + parts, std::greater<float>());
        least = scratch[k - 1];
    }
    const int64_t count = copy_from(row, size, least, scratch);
    std::nth_element(scratch, scratch + k - 1, scratch + count, std::greater<float>());
    return scratch[k - 1];
}

// The smallest probability of the smallest set of the likeliest tokens with mass >= top_p, of a distribution's numbers.
float nucleus_floor(float* distribution, int64_t count, double top_p) {
    double before = 0;
    while (true) {
        const float pivot = distribution[count / 2];
        float* const middle = std::partition(distribution, distribution + count, [pivot](float p) { return p > pivot; });
        float* const rest = std::partition(middle, distribution + count, [pivot](float p) { return p == pivot; });
        double above = 0;
        for (const float* p = distribution; p < middle; ++p) above += *p;
        if (middle > distribution && before + above >= top_p) {
            count = middle - distribution;
            continue;
        }
        before += above + static_cast<double>(pivot) * static_cast<double>(rest - middle);
        if (before >= top_p || rest == distribution + count) return pivot;
        count -= rest - distribution;
        distribution = rest;
    }
}

// -infinity where a number of `row` is below the floor; the floor is one of `of`, which may be the row itself.
void drop_below(float* row, const float* of, int64_t size, float floor) {
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        const __m512 x = _mm512_maskz_loadu_ps(lanes, of + i);
        const __mmask16 below = _mm512_mask_cmp_ps_mask(lanes, x, _mm512_set1_ps(floor), _CMP_LT_OQ);
        _mm512_mask_storeu_ps(row + i, below, _mm512_set1_ps(-INFINITY));
    }
}

// Filters of one row of logits, in place; one that holds no number stays as it is. scratch: [2, size].
void filter_row(float* row, int64_t size, float log_min_p, int64_t top_k, float top_p, float* scratch) {
    __mmask16 is_nan = 0;
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 x = _mm512_maskz_loadu_ps(first_lanes(size - i), row + i);
        is_nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    }
    if (is_nan) return;
    if (log_min_p > -INFINITY) drop_below(row, row, size, *std::max_element(row, row + size) + log_min_p);
    if (top_k < size) drop_below(row, row, size, kth_largest(row, size, top_k, scratch));
    if (top_p >= 1) return;
    float *distribution = scratch, *likely = scratch + size;
    softmax_row(row, size, distribution);
    // All tokens below this have together less mass than may be left out.
    const float least = static_cast<float>((1.0 - top_p) / static_cast<double>(size) * 0.99);
    const int64_t count = copy_from(distribution, size, least, likely);
    if (count > 0) drop_below(row, distribution, size, nucleus_floor(likely, count, top_p));
}

constexpr int64_t kRun = 256;  // tokens whose mass is summed up before a draw looks for its place among them

double sum_run(const float* distribution, int64_t size) {
    __m512d sums[4];
    for (__m512d& sum : sums) sum = _mm512_setzero_pd();
    for (int64_t i = 0; i < size; i += 32) {
        for (int j = 0; j < 4; ++j) {
            const __mmask8 lanes = static_cast<__mmask8>(first_lanes(size - i - 8 * j));
            sums[j] = _mm512_add_pd(sums[j], _mm512_cvtps_pd(_mm256_maskz_loadu_ps(lanes, distribution + i + 8 * j)));
        }
    }
    return _mm512_reduce_add_pd(_mm512_add_pd(_mm512_add_pd(sums[0], sums[1]), _mm512_add_pd(sums[2], sums[3])));
}

// The last token with mass among those of begin..end; -1 if none has any.
int64_t last_possible(const float* distribution, int64_t begin, int64_t end) {
    for (int64_t i = end - 1; i >= begin; --i) {
        if (distribution[i] > 0) return i;
    }
    return -1;
}

// The token at `uniform` of the distribution's mass, in double precision; one without mass is never drawn. `runs` has room for
// the sum of every run.
int64_t draw_row(const float* distribution, int64_t size, double uniform, std::vector<double>& runs) {
    double total = 0;
    runs.clear();
    for (int64_t i = 0; i < size; i += kRun) {
        total += sum_run(distribution + i, std::min(kRun, size - i));
        runs.push_back(total);
    }
    const double place = uniform * total;
    const int64_t run = std::upper_bound(runs.begin(), runs.end(), place) - runs.begin();
    if (run == static_cast<int64_t>(runs.size()) || std::isnan(total)) {
        return std::max<int64_t>(0, last_possible(distribution, 0, size));  // the product was rounded up to the total
    }
    double mass = run > 0 ? runs[run - 1] : 0.0;
    const int64_t begin = run * kRun, end = std::min(begin + kRun, size);
    for (int64_t i = begin; i < end; ++i) {
        mass += distribution[i];
        if (distribution[i] > 0 && mass > place) return i;
    }
    return std::max<int64_t>(0, last_possible(distribution, begin, end));
}

// What share x distribution leaves beside q, whose columns stand for the tokens `ids` (null = all of them), unnormalised; the distribution
// itself where nothing is left. left: [size].
const float* residual_row(const float* distribution, int64_t size, float share, const float* q, int64_t width, const int64_t* ids,
                          float* left) {
    for (int64_t i = 0; i < size; ++i) left[i] = share * distribution[i];
    if (ids) {
        for (int64_t w = 0; w < width; ++w) left[ids[w]] = std::max(left[ids[w]] - q[w], 0.0f);
    } else {
        for (int64_t i = 0; i < size; ++i) left[i] = std::max(left[i] - q[i], 0.0f);
    }
    return last_possible(left, 0, size) >= 0 ? left : distribution;
}

// Sum of f(16 numbers) over a row, in float32 for a run, in double precision over the runs.
template <typename F>
double sum_lanes(int64_t size, const F& f) {
    double total = 0;
    for (int64_t begin = 0; begin < size; begin += kRun) {
        __m512 run = _mm512_setzero_ps();
        for (int64_t i = begin; i < std::min(begin + kRun, size); i += 16) {
            run = _mm512_add_ps(run, f(i, first_lanes(size - i)));
        }
        total += _mm512_reduce_add_ps(run);
    }
    return total;
}

double sum_of_squares(const float* distribution, int64_t size) {
    return sum_lanes(size, [distribution](int64_t i, __mmask16 lanes) {
        const __m512 x = _mm512_maskz_loadu_ps(lanes, distribution + i);
        return _mm512_mul_ps(x, x);
    });
}

// Sum of min(scale x p, q) over q's columns; NaN where q or p has one there.
double overlap(const float* p, float scale, const float* q, int64_t width, const int64_t* ids) {
    const __m512 scales = _mm512_set1_ps(scale);
    return sum_lanes(width, [=](int64_t i, __mmask16 lanes) {
        __m512 x;
        if (ids) {
            const __m512i low = _mm512_maskz_loadu_epi64(static_cast<__mmask8>(lanes), ids + i);
            const __m512i high = _mm512_maskz_loadu_epi64(static_cast<__mmask8>(lanes >> 8), ids + i + 8);
            const __m256 zero = _mm256_setzero_ps();
            const __m256 first = _mm512_mask_i64gather_ps(zero, static_cast<__mmask8>(lanes), low, p, 4);
            const __m256 second = _mm512_mask_i64gather_ps(zero, static_cast<__mmask8>(lanes >> 8), high, p, 4);
            x = _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1);
        } else {
            x = _mm512_maskz_loadu_ps(lanes, p + i);
        }
        x = _mm512_mul_ps(x, scales);
        const __m512 y = _mm512_maskz_loadu_ps(lanes, q + i);
        const __m512 least = _mm512_min_ps(x, y);  // y where one is NaN
        return _mm512_mask_mov_ps(least, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
    });
}

// A step's verify rows, as VerifyInput of verification/base.py has them. A row with a draft judges it; the last row of
// each entry has none.
struct VerifyStep {
    int64_t num_rows, num_entries, size;
    const float* p;          // [num_rows, size]
    const float* q;          // [., width], of packed drafts; null = drafts were chosen
    int64_t width;
    const int64_t* ids;      // [width] tokens of q's columns; null = all
    const int64_t* columns;  // of packed drafts; null = the tokens themselves
    const int64_t *drafts, *packed, *entries, *first_rows;

    const float* distribution(int64_t row) const { return p + row * size; }
    const float* draft_probs(int64_t row) const { return q + packed[row] * width; }
    bool judged(int64_t row) const { return drafts[row] >= 0 && drafts[row] < size; }

    float p_of_draft(int64_t row) const { return judged(row) ? distribution(row)[drafts[row]] : 0.0f; }

    float q_of_draft(int64_t row) const {
        if (!judged(row)) return 0.0f;
        return q ? draft_probs(row)[columns ? columns[packed[row]] : drafts[row]] : 1.0f;
    }

    float q_of(int64_t row, int64_t token) const {
        if (!judged(row)) return 0.0f;
        if (!q) return token == drafts[row] ? 1.0f : 0.0f;
        if (!ids) return draft_probs(row)[token];
        const int64_t* column = std::find(ids, ids + width, token);
        return column == ids + width ? 0.0f : draft_probs(row)[column - ids];
    }

    // The chance that a draft survives, before it is drawn.
    double chance(int64_t row) const {
        return q ? overlap(distribution(row), 1.0f, draft_probs(row), width, ids) : p_of_draft(row);
    }

    // The distribution behind a rejection, or p in a last row, unnormalised.
    const float* residual(int64_t row, float* left) const {
        if (!judged(row)) return distribution(row);
        const float one = 1.0f;
        if (!q) return residual_row(distribution(row), size, 1.0f, &one, 1, &drafts[row], left);
        return residual_row(distribution(row), size, 1.0f, draft_probs(row), width, ids, left);
    }
};

// What the terms of the self-checks are taken with; selfcheck/terms.py says what each number is.
struct TermRules {
    const double* stakes;
    int64_t num_stakes;
    double least_residual, least_spread, equal, rounding;

    bool is_open(double certain) const { return certain < 1 - least_spread; }
    bool is_undecided(double chance) const { return chance > least_spread && is_open(chance); }
};

// Sums of a self-check's terms: log(1 + stake Z - |stake| rounding) of each stake, then number, positive and negative
// parts, squares.
struct TermSums {
    TermRules rules;
    double* sums;  // [checks, num_stakes + 4]

    // Z is what a value differs from its mean by; 0 where that is rounding.
    void add(int64_t check, double value, double mean) const {
        const double difference = value - mean;
        if (!std::isfinite(difference)) return;
        const bool equal = std::abs(difference) <= rules.equal * std::max(value, mean);
        const double z = equal ? 0.0 : std::min(std::max(difference, -1.0), 1.0);
        const int64_t num_stakes = rules.num_stakes;
        const double* stakes = rules.stakes;
        double* own = sums + check * (num_stakes + 4);
        for (int64_t s = 0; s < num_stakes; ++s) own[s] += std::log1p(stakes[s] * z - std::abs(stakes[s]) * rules.rounding);
        double* parts = own + num_stakes;
        parts[0] += 1;
        parts[1] += std::max(z, 0.0);
        parts[2] += std::max(-z, 0.0);
        parts[3] += z * z;
    }
};

// What a ratio of probabilities is, at most 1; NaN stays.
double ratio_of(double above, double below) {
    return std::min(above / std::max<double>(below, std::numeric_limits<float>::min()), 1.0);
}

// Of a round's last token: the mass before it, and its own, of the distribution that it is drawn from.
struct LastPlace {
    double below, own;
};

// The terms of the last row of a round, whose token is `token`: f and g of sampled drafts, r and g of chosen ones.
LastPlace add_last_terms(const VerifyStep& step, int64_t row, int64_t token, bool counts, const TermSums& to, float* left) {
    const bool judged = step.judged(row);
    const LastPlace unknown{NAN, NAN};
    const auto mass_of = [&](const float* distribution, int64_t end) {
        double mass = 0;
        for (int64_t i = 0; i < end; i += kRun) mass += sum_run(distribution + i, std::min(kRun, end - i));
        return mass;
    };
    if (step.q) {
        const float* rest = step.residual(row, left);
        const double mass = mass_of(rest, step.size);
        if (!(mass > to.rules.least_residual)) return unknown;
        const LastPlace place{mass_of(rest, token) / mass, rest[token] / mass};
        if (!counts || !to.rules.is_open(sum_of_squares(rest, step.size) / (mass * mass))) return place;
        if (judged) {
            const double both = overlap(rest, static_cast<float>(1 / mass), step.draft_probs(row), step.width, step.ids);
            to.add(6, ratio_of(step.q_of(row, token), place.own), both);
        }
        to.add(7, 2 * place.below + place.own, 1);
        return place;
    }
    const double p_draft = step.p_of_draft(row), rest = 1 - p_draft;
    if (!(rest > to.rules.least_residual)) return unknown;
    const double below = mass_of(step.distribution(row), token) - (step.drafts[row] < token ? p_draft : 0.0);
    const bool repeated = token == step.drafts[row];
    const LastPlace place{below / rest, repeated ? 0.0 : step.distribution(row)[token] / rest};
    if (!counts || repeated) return place;
    const double square = (sum_of_squares(step.distribution(row), step.size) - p_draft * p_draft) / (rest * rest);
    if (!to.rules.is_open(square)) return place;
    if (judged) to.add(2, place.own, square);
    to.add(3, 2 * place.below + place.own, 1);
    return place;
}

// -- random numbers ---------------------------------------------------------------------------------------------------

// 52 bits of two words, in the open interval (0, 1).
inline double unit_of(uint32_t first, uint32_t second) {
    const uint64_t bits = (uint64_t{first >> 6} << 26) + (second >> 6);
    return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

// 52 bits of Philox4x32-10, as in rng.py.
double uniform_of(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2) {
    uint32_t c3 = 0, k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = c0 * uint64_t{0xD2511F53}, second = c2 * uint64_t{0xCD9E8D57};
        c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(second);
        c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(first);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return unit_of(c0, c1);
}

// The uniforms of the coupled verifier's noise, as in rng.py: two tokens for each counter.
void noise_row(uint64_t seed, uint32_t position, int64_t size, double* out) {
    constexpr int kLanes = 16;
    constexpr uint32_t kNoise = 4;  // the purpose
    for (int64_t begin = 0; begin < size; begin += 2 * kLanes) {
        uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
        double drawn[2 * kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
            c0[lane] = static_cast<uint32_t>(begin / 2 + lane);
            c1[lane] = position;
            c2[lane] = kNoise;
            c3[lane] = 0;
        }
        uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
        for (int round = 0; round < 10; ++round) {
            for (int lane = 0; lane < kLanes; ++lane) {
                const uint64_t first = c0[lane] * uint64_t{0xD2511F53}, second = c2[lane] * uint64_t{0xCD9E8D57};
                c0[lane] = static_cast<uint32_t>(second >> 32) ^ c1[lane] ^ k0;
                c1[lane] = static_cast<uint32_t>(second);
                c2[lane] = static_cast<uint32_t>(first >> 32) ^ c3[lane] ^ k1;
                c3[lane] = static_cast<uint32_t>(first);
            }
            k0 += 0x9E3779B9;
            k1 += 0xBB67AE85;
        }
        for (int lane = 0; lane < kLanes; ++lane) {
            drawn[2 * lane] = unit_of(c0[lane], c1[lane]);
            drawn[2 * lane + 1] = unit_of(c2[lane], c3[lane]);
        }
        std::memcpy(out + begin, drawn, std::min<int64_t>(2 * kLanes, size - begin) * sizeof(double));
    }
}

}  // namespace

extern "C" {

// logits [num_rows, size] -> distributions [num_rows, size]: softmax, or all mass on the likeliest token where `greedy`.
void truespec_distributions(int64_t num_rows, int64_t size, const float* logits, const uint8_t* greedy, float* distributions) {
    for (int64_t r = 0; r < num_rows; ++r) {
        if (greedy[r]) one_hot_row(logits + r * size, size, distributions + r * size);
        else softmax_row(logits + r * size, size, distributions + r * size);
    }
}

// Filters of some rows of logits [., size], in place: of row rows[f], log_min_p[f], top_k[f] and top_p[f].
void truespec_filter(int64_t count, int64_t size, float* logits, const int64_t* rows, const float* log_min_p,
                     const int64_t* top_k, const float* top_p) {
    float* scratch = workspace().scores.at_least(2 * size);
    for (int64_t f = 0; f < count; ++f) {
        filter_row(logits + rows[f] * size, size, log_min_p[f], top_k[f], top_p[f], scratch);
    }
}

// One token of each of num_rows distributions [num_rows, size].
void truespec_draw(int64_t num_rows, int64_t size, const float* distributions, const double* uniforms, int64_t* tokens) {
    std::vector<double> runs;
    for (int64_t r = 0; r < num_rows; ++r) tokens[r] = draw_row(distributions + r * size, size, uniforms[r], runs);
}

// One token of each residual distribution (share p - q)+, or of p where nothing is left of it. Row rows[e] of p [., size] stands
// against row q_rows[e] of q [., width]; -1 = q is 0. `ids` are the tokens of q's columns, entry after entry ids_stride
// apart; null = width is size.
void truespec_draw_residual(int64_t count, int64_t size, const float* p, const int64_t* rows, const float* shares,
                            const float* q, int64_t width, const int64_t* ids, int64_t ids_stride, const int64_t* q_rows,
                            const double* uniforms, int64_t* tokens) {
    std::vector<double> runs;
    float* left = workspace().scores.at_least(size);
    for (int64_t e = 0; e < count; ++e) {
        const float* distribution = p + rows[e] * size;
        if (q_rows[e] < 0) {
            tokens[e] = draw_row(distribution, size, uniforms[e], runs);
            continue;
        }
        const int64_t* own = ids ? ids + e * ids_stride : nullptr;
        const float* rest = residual_row(distribution, size, shares[e], q + q_rows[e] * width, width, own, left);
        tokens[e] = draw_row(rest, size, uniforms[e], runs);
    }
}

// Token-wise verification: of each entry the leading drafts that survive, the token behind them, and the chances of the
// drafts it came to, summed up. accept_uniforms, sample_uniforms: [num_rows].
void truespec_verify(const VerifyStep* step, const double* accept_uniforms, const double* sample_uniforms, int64_t* num_accepted,
                     int64_t* tokens, float* expected) {
    std::vector<double> runs;
    float* left = workspace().scores.at_least(step->size);
    for (int64_t e = 0; e < step->num_entries; ++e) {
        int64_t row = step->first_rows[e];
        double chances = 0;
        for (; step->judged(row); ++row) {
            chances += step->chance(row);
            const double p = step->p_of_draft(row), q = step->q_of_draft(row);
            if (!(accept_uniforms[row] * q < p && p > 0 && q > 0)) break;  // in double precision neither product underflows
        }
        num_accepted[e] = row - step->first_rows[e];
        tokens[e] = draw_row(step->residual(row, left), step->size, sample_uniforms[row], runs);
        expected[e] = static_cast<float>(chances);
    }
}

// The token emitted at each row; rows past the last one of their entry repeat it.
void truespec_emitted(const VerifyStep* step, const int64_t* num_accepted, const int64_t* tokens, int64_t* emitted) {
    for (int64_t row = 0; row < step->num_rows; ++row) {
        const int64_t entry = step->entries[row];
        emitted[row] = row - step->first_rows[entry] < num_accepted[entry] ? step->drafts[row] : tokens[entry];
    }
}

// What is recorded of a round: q of the draft at each row, and of each entry's last token; and in `before`, if it is not
// null, the mass of q before each draft. column_of [size]: the column of each token, -1 = none; null where it is the token.
void truespec_round_probs(const VerifyStep* step, const int64_t* num_accepted, const int64_t* tokens,
                          const int32_t* column_of, double* of_drafts, double* of_last, double* before) {
    for (int64_t row = 0; row < step->num_rows; ++row) {
        of_drafts[row] = step->q_of_draft(row);
        if (!before) continue;
        double mass = 0;
        if (step->judged(row)) {
            const int64_t end = step->columns ? step->columns[step->packed[row]] : step->drafts[row];
            const float* distribution = step->draft_probs(row);
            for (int64_t i = 0; i < end; i += kRun) mass += sum_run(distribution + i, std::min(kRun, end - i));
        }
        before[row] = mass;
    }
    for (int64_t e = 0; e < step->num_entries; ++e) {
        const int64_t row = step->first_rows[e] + num_accepted[e];
        const int64_t column = column_of ? column_of[tokens[e]] : tokens[e];
        of_last[e] = step->judged(row) && column >= 0 ? step->draft_probs(row)[column] : 0.0;
    }
}

// What is broken at each row: 1 + its place among the ROW_KINDS of selfcheck/invariants.py, or 0. highest: [num_rows]
// the highest logit; outside: whether the token is outside its request's filters.
void truespec_broken_rows(const VerifyStep* step, const int64_t* num_accepted, const int64_t* emitted,
                          const float* highest, const uint8_t* outside, double mass_rounding, int64_t* broken) {
    enum { kNotFinite = 1, kNoToken, kDistribution, kQZero, kPZero, kSupport };
    for (int64_t row = 0; row < step->num_rows; ++row) {
        const bool reached = row - step->first_rows[step->entries[row]] <= num_accepted[step->entries[row]];
        broken[row] = 0;
        if (reached && outside[row]) broken[row] = kSupport;
        if (reached && !(step->distribution(row)[emitted[row]] > 0)) broken[row] = kPZero;
        if (step->q && step->drafts[row] >= 0) {
            const float* distribution = step->draft_probs(row);
            double mass = 0;
            for (int64_t i = 0; i < step->width; i += kRun) mass += sum_run(distribution + i, std::min(kRun, step->width - i));
            const bool negative = std::any_of(distribution, distribution + step->width, [](float q) { return q < 0; });
            if (!(step->q_of_draft(row) > 0)) broken[row] = kQZero;
            if (negative || !(std::abs(mass - 1) < mass_rounding)) broken[row] = kDistribution;
        }
        if (reached && highest[row] == -INFINITY) broken[row] = kNoToken;
        if (reached && !(highest[row] < INFINITY)) broken[row] = kNotFinite;
    }
}

// The terms of token-wise verification, as selfcheck/terms.py defines them: of sampled drafts d c a_prime e a b f g, of
// chosen ones d a r g, summed up (TermSums); what could be accepted of the drafts that were reached; and rows [3, num_rows] of
// each row's chance, and the place of the last tokens.
void truespec_terms(const VerifyStep* step, const int64_t* num_accepted, const int64_t* emitted, const uint8_t* counted,
                    const TermRules* rules, double* sums, double* achievable, double* rows) {
    float* left = workspace().scores.at_least(step->size);
    const TermSums to{*rules, sums};
    *achievable = 0;
    std::fill(rows, rows + 3 * step->num_rows, NAN);
    bool alive = true;  // p was not 0 at an earlier draft of the round
    for (int64_t row = 0; row < step->num_rows; ++row) {
        const int64_t entry = step->entries[row], offset = row - step->first_rows[entry];
        const bool judged = step->judged(row), reached = offset <= num_accepted[entry];
        const bool accepted = offset < num_accepted[entry];
        if (offset == 0) alive = true;
        const bool counts = counted[entry] && alive;
        const double p_draft = step->p_of_draft(row), q_draft = step->q_of_draft(row);
        alive = alive && p_draft > 0;
        if (!counts && !reached) continue;
        const double chance = judged ? step->chance(row) : 0.0, ratio = ratio_of(p_draft, q_draft);
        if (judged && reached) {
            if (std::isfinite(chance)) *achievable += chance;
            rows[row] = ratio;
        }
        if (counts) {
            const double p_emitted = step->distribution(row)[emitted[row]];
            const bool is_open = judged && rules->is_undecided(chance);
            if (reached) {
                const double square = sum_of_squares(step->distribution(row), step->size);
                if (rules->is_open(square)) to.add(0, p_emitted, square);
                if (is_open) to.add(step->q ? 4 : 1, accepted, chance);
            }
            if (judged && step->q) {
                if (is_open && reached && p_emitted > 0) to.add(1, ratio_of(step->q_of(row, emitted[row]), p_emitted), chance);
                if (is_open) to.add(2, ratio, chance);
                const double square = sum_of_squares(step->draft_probs(row), step->width);
                if (rules->is_open(square)) to.add(3, q_draft, square);
                if (reached && rules->is_undecided(ratio)) to.add(5, accepted, ratio);
            }
        }
        if (reached && !accepted) {
            const LastPlace place = add_last_terms(*step, row, emitted[row], counts, to, left);
            rows[step->num_rows + row] = place.below;
            rows[2 * step->num_rows + row] = place.own;
        }
    }
}

// One uniform in (0, 1) a row, as `uniforms` of rng.py.
void truespec_uniforms(int64_t count, const uint64_t* seeds, const uint64_t* rounds, const uint64_t* offsets,
                       const uint64_t* purposes, double* out) {
    for (int64_t i = 0; i < count; ++i) {
        out[i] = uniform_of(seeds[i], static_cast<uint32_t>(rounds[i]), static_cast<uint32_t>(offsets[i]),
                            static_cast<uint32_t>(purposes[i]));
    }
}

// One uniform for every token: out [num_rows, size].
void truespec_noise(int64_t num_rows, int64_t size, const int64_t* seeds, const int64_t* positions, double* out) {
    for (int64_t r = 0; r < num_rows; ++r) {
        noise_row(static_cast<uint64_t>(seeds[r]), static_cast<uint32_t>(positions[r]), size, out + r * size);
    }
}

// rows [num_rows, inputs] -> out [num_rows, outputs]; normed first where there is a norm.
void truespec_linear(const Linear* linear, int64_t num_rows, const float* rows, int64_t stride, const float* norm,
                     double eps, float* out, int64_t num_threads) {
    const int num_parts = static_cast<int>(std::max<int64_t>(1, num_threads));
    const Prepared prepared(workspace(), num_rows, linear->num_inputs, num_parts);
    in_threads(num_threads, [&](int thread, int threads) {
        const Source source{norm ? Input::kNormed : Input::kPlain, rows, stride, norm, static_cast<float>(eps)};
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

// One layer of a draft head: token_ids [num_rows] and hidden [num_rows, hidden_size] -> out, of the same size. It lies
// first in its cache.
void truespec_draft_layer(const DraftHead* head, const Shape* shape, const Step* step, void* cache_data,
                          const int64_t* token_ids, const float* hidden, int64_t stride, float* out,
                          int64_t num_threads) {
    const int64_t size = shape->hidden_size, num_rows = step->num_rows;
    Pass pass(*shape, *step, num_threads, 2 * size);
    float* rows = workspace().pairs.at_least(num_rows * 2 * size);
    for (int64_t r = 0; r < num_rows; ++r) {
        float *token = rows + r * 2 * size, *own = token + size, *residual = out + r * size;
        embed_row(*head, token_ids[r], size, residual);  // as scratch
        norm_row(residual, head->token_norm, pass.eps, size, token);
        norm_row(hidden + r * stride, head->hidden_norm, pass.eps, size, own);
        std::memcpy(residual, head->residual_is_normed ? own : hidden + r * stride, size * sizeof(float));
    }
    in_threads(num_threads, [&](int thread, int threads) {
        const Worker worker{pass, thread, threads};
        const Angles angles{shape->rotary, nullptr, nullptr};
        worker.attention({Input::kPlain, rows, 2 * size, nullptr, 0}, head->layer, angles,
                         layer_cache(*shape, cache_data, 0), {out, size, true});
        worker.mlp({Input::kNormed, out, size, head->layer.mlp_norm, pass.eps}, head->layer, {out, size, true});
    });
}

// All drafts of a round: draws from the head's distribution, runs the head on what was drawn, and draws again. hidden [num_entries,
// hidden_size] is what the first drafts are drawn from. -> tokens and columns of the drafts, entry after entry, and the
// distributions [drafts, outputs] they were drawn from; there is room for `counts`.
void truespec_draft_round(const DraftHead* head, const Shape* shape, void* cache_data, const DraftRound* round,
                          const float* hidden, int64_t stride, int64_t* tokens, int64_t* columns, float* distributions,
                          int64_t num_threads) {
    const int64_t size = shape->hidden_size, width = head->lm_head.num_outputs, num_entries = round->num_entries;
    float* logits = workspace().logits.at_least(num_entries * width);
    float* states = workspace().states.at_least(2 * num_entries * size);
    float *now = states, *next = states + num_entries * size;
    for (int64_t e = 0; e < num_entries; ++e) std::memcpy(now + e * size, hidden + e * stride, size * sizeof(float));
    std::vector<int64_t> active(num_entries), filters(num_entries, -1), firsts(num_entries, 0);
    std::iota(active.begin(), active.end(), 0);
    for (int64_t f = 0; f < round->num_filters; ++f) filters[round->filtered[f]] = f;
    std::partial_sum(round->counts, round->counts + num_entries - 1, firsts.begin() + 1);
    std::vector<double> runs, survived(num_entries, 1.0);
    std::vector<int64_t> made(num_entries, 0), drawn, positions, slots, row_starts, context, context_starts;
    for (int64_t offset = 0; !active.empty(); ++offset) {
        truespec_linear(&head->lm_head, active.size(), now, size, head->norm, shape->eps, logits, num_threads);
        for (size_t row = 0; row < active.size(); ++row) {
            const int64_t e = active[row], f = filters[e], place = firsts[e] + offset;
            float *own = logits + row * width, *distribution = distributions + place * width;
            divide_row(own, width, round->temperature[e]);
            if (f >= 0) {
                float* scratch = workspace().scores.at_least(2 * width);
                filter_row(own, width, round->log_min_p[f], round->top_k[f], round->top_p[f], scratch);
            }
            truespec_distributions(1, width, own, round->greedy + e, distribution);
            const double uniform = uniform_of(round->seeds[e], static_cast<uint32_t>(round->lengths[e]),
                                              static_cast<uint32_t>(offset), static_cast<uint32_t>(round->purpose));
            columns[place] = draw_row(distribution, width, uniform, runs);
            tokens[place] = head->ids[columns[place]];
            ++made[e];
            if (round->survival) {
                if (round->greedy[e]) softmax_row(own, width, own);
                round->probabilities[place] = (round->greedy[e] ? own : distribution)[columns[place]];
            }
        }
        drawn.clear(), positions.clear(), slots.clear(), row_starts.assign(1, 0), context.clear(), context_starts.assign(1, 0);
        size_t going_on = 0;
        for (size_t row = 0; row < active.size(); ++row) {
            const int64_t e = active[row];
            if (round->counts[e] <= offset + 1) continue;
            if (round->survival && !goes_on(*round, e, round->probabilities[firsts[e] + offset], survived[e])) continue;
            const int64_t* begin = round->context + round->context_starts[e];
            const int64_t* end = round->context + round->context_starts[e + 1] - (round->counts[e] - 2 - offset);
            context.insert(context.end(), begin, end);
            context_starts.push_back(context.size());
            positions.push_back(end - begin - 1);
            slots.push_back(end[-1]);
            drawn.push_back(tokens[firsts[e] + offset]);
            std::memmove(now + going_on * size, now + row * size, size * sizeof(float));
            active[going_on++] = e;
            row_starts.push_back(going_on);
        }
        active.resize(going_on);
        if (active.empty()) break;
        const int64_t count = going_on;
        const Step step{count, count, positions.data(), slots.data(), row_starts.data(), context.data(),
                        context_starts.data()};
        truespec_draft_layer(head, shape, &step, cache_data, drawn.data(), now, size, next, num_threads);
        std::swap(now, next);
    }
    int64_t packed = 0;  // what ended early leaves no gap
    for (int64_t e = 0; e < num_entries; packed += made[e++]) {
        round->counts[e] = made[e];
        if (firsts[e] == packed) continue;
        std::copy_n(tokens + firsts[e], made[e], tokens + packed);
        std::copy_n(columns + firsts[e], made[e], columns + packed);
        std::copy_n(round->probabilities + firsts[e], made[e], round->probabilities + packed);
        std::memmove(distributions + packed * width, distributions + firsts[e] * width, made[e] * width * sizeof(float));
    }
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

// What Python mirrors: the size of each struct, and where each of its fields lies. The bindings compare at load.
struct Place {
    const char* name;
    int64_t bytes;
};

#define SIZE(type) {#type, sizeof(type)}
#define AT(type, field) {#type "." #field, offsetof(type, field)}
const Place kPlaces[] = {
    SIZE(Linear),
    AT(Linear, weight), AT(Linear, bias), AT(Linear, num_inputs), AT(Linear, num_outputs), AT(Linear, kind),
    SIZE(Layer),
    AT(Layer, input_norm), AT(Layer, mlp_norm), AT(Layer, head_norm), AT(Layer, qkv), AT(Layer, output),
    AT(Layer, gate_up), AT(Layer, down),
    SIZE(DraftHead),
    AT(DraftHead, embedding), AT(DraftHead, embedding_is_bfloat16), AT(DraftHead, residual_is_normed),
    AT(DraftHead, token_norm), AT(DraftHead, hidden_norm), AT(DraftHead, layer), AT(DraftHead, norm),
    AT(DraftHead, lm_head), AT(DraftHead, ids),
    SIZE(Shape),
    AT(Shape, hidden_size), AT(Shape, intermediate_size), AT(Shape, num_heads), AT(Shape, num_kv_heads),
    AT(Shape, head_dim), AT(Shape, num_slots), AT(Shape, cache_is_bfloat16), AT(Shape, rotary), AT(Shape, eps),
    SIZE(Step),
    AT(Step, num_rows), AT(Step, num_spans), AT(Step, positions), AT(Step, slots), AT(Step, row_starts),
    AT(Step, context), AT(Step, context_starts),
    SIZE(DraftRound),
    AT(DraftRound, num_entries), AT(DraftRound, counts), AT(DraftRound, context), AT(DraftRound, context_starts),
    AT(DraftRound, seeds), AT(DraftRound, lengths), AT(DraftRound, purpose), AT(DraftRound, temperature),
    AT(DraftRound, greedy), AT(DraftRound, num_filters), AT(DraftRound, filtered), AT(DraftRound, log_min_p),
    AT(DraftRound, top_k), AT(DraftRound, top_p), AT(DraftRound, survival), AT(DraftRound, following),
    AT(DraftRound, edges), AT(DraftRound, num_edges), AT(DraftRound, least), AT(DraftRound, probabilities),
    SIZE(VerifyStep),
    AT(VerifyStep, num_rows), AT(VerifyStep, num_entries), AT(VerifyStep, size), AT(VerifyStep, p), AT(VerifyStep, q),
    AT(VerifyStep, width), AT(VerifyStep, ids), AT(VerifyStep, columns), AT(VerifyStep, drafts),
    AT(VerifyStep, packed), AT(VerifyStep, entries), AT(VerifyStep, first_rows),
    SIZE(TermRules),
    AT(TermRules, stakes), AT(TermRules, num_stakes), AT(TermRules, least_residual), AT(TermRules, least_spread),
    AT(TermRules, equal), AT(TermRules, rounding),
    {nullptr, 0},
};
#undef SIZE
#undef AT

// The table above; its last entry has no name.
const Place* truespec_places() { return kPlaces; }

}  // extern "C"
