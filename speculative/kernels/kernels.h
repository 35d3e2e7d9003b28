// The files of the CPU kernels: what Python hands over, and what one file computes for the others.
//
//     products.cpp    rows times packed weights
//     attention.cpp   attention over the paged cache
//     vocabulary.cpp  distributions, filters, draws, verification and self-checks over the vocabulary
//     layers.cpp      whole layers in one call, and the drafts of a round
//
// Activations are float32. Every row is computed on its own, in an order that depends neither on the number of rows in
// the call nor on the number of threads: a token's hidden state is the same bits alone, in a batch, or behind drafts.
//
// Weights lie in panels of 32 outputs, so that one pass over a panel serves several rows; a step of a few rows is bound
// by reading them once, one of many by its products. Four-bit weights are multiplied as integers, exactly, with
// activations rounded to 8 bits in blocks of 32, as llama.cpp does; the eight-bit weights of the LM head beside them with
// activations of 16 bits (relative to the block's largest: 2^-16). Bfloat16 weights are multiplied with activations
// rounded to bfloat16: the processor multiplies and adds pairs of those at twice the rate of float32.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <omp.h>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__)
#include "avx2.h"
#endif

namespace truespec {

constexpr int64_t kBlock = 32;       // inputs that share a scale
constexpr int64_t kFewRows = 16;     // up to so many rows, every thread prepares all of them itself: no barrier
constexpr int64_t kPanel = 32;       // outputs
constexpr int64_t kPanelRow = 4 * kPanel;  // bytes of a panel of bfloat16s: for every two inputs, a pair of each output

// Activations have 8 bits in kInt4, and 16 in kInt8, which is for LM heads.
enum Kind : int64_t {
    kFloat32 = 0,
    kBfloat16 = 1,
    kInt4 = 2,
    kInt8 = 3,
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
constexpr bool kWide = true;  // 32 registers of 16 floats; else 16 registers of 8
#else
constexpr bool kWide = false;
#endif

extern "C" {

struct Linear {
    const void* weight;
    const float* bias;  // may be null
    int64_t num_inputs;
    int64_t num_outputs;
    int64_t kind;
};

// What becomes of the product of a query and a key before the softmax.
struct Scores {
    int64_t window;  // positions that a row sees, its own among them; 0 = all
    double scale;    // of the product; 0 = 1 / sqrt(head_dim)
    double cap;      // c of c tanh(score / c); 0 = none
};

struct Layer {
    const float* input_norm;  // [hidden]
    const float* mlp_norm;    // [hidden]
    const float* head_norm;   // [num_heads + num_kv_heads, head_dim], may be null
    Linear qkv;
    Linear output;
    Linear gate_up;
    Linear down;
    Scores scores;
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

// The drafts of a round, entry after entry. Filters are of some entries, as truespec_filter has them.
struct DraftRound {
    int64_t num_entries;
    const int64_t* counts;          // [num_entries] drafts each, at least 1
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
};

}  // extern "C"

struct Range {
    int64_t begin, end;
};

inline Range share(int64_t count, int64_t thread, int64_t num_threads) {
    return {count * thread / num_threads, count * (thread + 1) / num_threads};
}

inline __m512 expand(__m256i bfloat16s) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bfloat16s), 16));
}

inline __m256i round_to_bfloat16(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __m512i halves = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan, _mm512_set1_epi32(0x7FC0));
    return _mm512_cvtepi32_epi16(halves);
}

// e^x to two units in the last place (Cephes' polynomial); NaN stays NaN.
inline __m512 exponential(__m512 x) {
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

inline __mmask16 first_lanes(int64_t count) {
    return count >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << std::max<int64_t>(count, 0)) - 1);
}

#if defined(__AVX512BF16__)

// Floats to pairs of bfloat16s; an odd row ends with a zero.
inline void pair_row(const float* row, int64_t size, int8_t* bytes) {
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 x = _mm512_maskz_loadu_ps(first_lanes(size - i), row + i);
        _mm256_mask_storeu_epi32(bytes + 2 * i, first_lanes((size - i + 1) / 2) & 0xFF, (__m256i)_mm512_cvtneps_pbh(x));
    }
}

#endif

// Calls work with `count`, at most `most`, as a constant.
template <int most, typename Work>
void with_count(int64_t count, const Work& work) {
    if constexpr (most > 1) {
        if (count < most) return with_count<most - 1>(count, work);
    }
    work(std::integral_constant<int, most>{});
}

template <typename Work>
void in_threads(int64_t num_threads, const Work& work) {
    if (num_threads <= 1) {
        work(0, 1);
        return;
    }
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    work(omp_get_thread_num(), omp_get_num_threads());
}

// Buffers of one call, from a whole line of the caches on; grown, never shrunk, by the thread that calls.
struct Buffer {
    std::vector<float> store;
    float* at_least(int64_t size) {
        if (static_cast<int64_t>(store.size()) < size + 15) store.resize(size + 15);
        const uintptr_t place = reinterpret_cast<uintptr_t>(store.data());
        return reinterpret_cast<float*>((place + 63) / 64 * 64);
    }
};

struct Workspace {
    Buffer floats, bytes, scales, sums, zeros, scores, qkv, attended, gate_up, pairs, logits, states;
};

// Of the thread that calls.
Workspace& workspace();

// -- products.cpp -----------------------------------------------------------------------------------------------------

// Rows as a product reads them: floats, or bfloat16s, or integers with a scale and a sum for every block. An integer of
// 16 bits lies in two planes of bytes, 256 high + low: four high ones, then the four low ones beside them.
struct Rows {
    const float* floats;
    int64_t stride;        // of floats
    const int8_t* bytes;   // [rows, inputs / 4, planes, 4] integers, or [rows, inputs / 2, 2] bfloat16s
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

struct Target {
    float* rows;
    int64_t stride;
    bool add;  // to what is there
};

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
        const int64_t whole_tiles = (num_rows + 15) / 16 * 16;  // that many rows are read where there are tiles
        bytes_size = 2 * (whole_tiles * most_inputs + num_rows);  // two bytes a number, and the zeros of odd rows
        bytes = reinterpret_cast<int8_t*>(space.bytes.at_least(num_parts * bytes_size / 4 + 1));
        scales = space.scales.at_least(num_parts * (rows_size / kBlock + 1));
        sums = space.sums.at_least(num_parts * (rows_size / kBlock + 1));
        zeros = reinterpret_cast<int32_t*>(space.zeros.at_least(num_parts * (rows_size / kBlock + 1)));
    }
};

// One thread's share of getting the rows ready. Ends with a barrier where rows were shared out.
Rows prepare(const Source& source, const Linear& linear, int64_t num_rows, const Prepared& to, int thread, int threads);

// One thread's panels of a product.
void multiply(const Rows& rows, int64_t num_rows, const Linear& linear, const Target& to, int thread, int threads);

void norm_row(const float* row, const float* weight, float eps, int64_t size, float* out);

// -- attention.cpp ----------------------------------------------------------------------------------------------------

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

Cache layer_cache(const Shape& shape, void* data, int64_t layer);

// Floats that a thread needs beside the rows.
int64_t scratch_size(const Shape& shape);

// One thread's share of the step's keys and values.
void write_rows(const Cache& cache, const Heads& heads, const Step& step, int thread, int threads);

// Attention of all spans, once everybody's keys and values are written. Pieces go round the threads in turn. Where the
// processor multiplies pairs of bfloat16s, a cache of them has queries and weights rounded to bfloat16.
void attend_spans(const Shape& shape, const Scores& rule, const Cache& cache, const Heads& heads, const Step& step,
                  float* scratch, float* attended, int thread, int threads);

// -- vocabulary.cpp ---------------------------------------------------------------------------------------------------

void divide_row(float* row, int64_t size, float by);

// Filters of one row of logits, in place; one that holds no number stays as it is. scratch: [2, size].
void filter_row(float* row, int64_t size, float log_min_p, int64_t top_k, float top_p, float* scratch);

// The token at `uniform` of the distribution's mass, in double precision; one without mass is never drawn. `runs` has
// room for the sum of every run.
int64_t draw_row(const float* distribution, int64_t size, double uniform, std::vector<double>& runs);

// 52 bits of Philox4x32-10, as in rng.py.
double uniform_of(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2);

extern "C" void truespec_distributions(int64_t num_rows, int64_t size, const float* logits, const uint8_t* greedy,
                                       float* distributions);

// -- what Python mirrors ----------------------------------------------------------------------------------------------

// The size of each struct, and where each of its fields lies. The bindings compare at load.
struct Place {
    const char* name;
    int64_t bytes;
};

#define SIZE(type) {#type, sizeof(type)}
#define AT(type, field) {#type "." #field, offsetof(type, field)}

}  // namespace truespec
