// Products of rows with packed weights.

#include "kernels.h"
#include "tiles.h"

#include <cmath>
#include <cstring>

namespace truespec {

// Ways to ask for weights ahead of their use. Which one is the fastest is measured where the kernels are compiled
// (prefetch.py): the wrong one makes products of few rows take up to twice as long.
enum Way : int64_t {
    kNone = 0,  // the processor's own prefetching does it
    kPast = 1,  // 8 KiB ahead, past the outer caches
    kNear = 2,  // 2 KiB ahead, into all caches
    kFar = 3,   // 8 KiB ahead, into all caches
};

// By the number of products that each weight takes part in, at most this; for integers and for more products the first
// one, which is always into all caches.
constexpr int kFewProducts = 5;
extern "C" {
int64_t truespec_ways[1 + kFewProducts] = {kNear, kNear, kNear, kNear, kNear, kNear};

// Whether products of bfloat16s are left to tiles, of any number of rows: those round in another order.
int64_t truespec_by_tiles = 0;

// Whether this library has tiles.
int64_t truespec_has_tiles() {
#if defined(TRUESPEC_TILES)
    return 1;
#else
    return 0;
#endif
}

// Whether this process may use them.
int64_t truespec_permit_tiles() { return permit_tiles(); }
}

namespace {

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
        const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1));
        __m256i* place = reinterpret_cast<__m256i*>(bytes + planes * i);
        if constexpr (planes == 1) {
            _mm256_storeu_si256(place, low);
        } else {
            const __m512i half = _mm512_set1_epi32(128);  // a low byte above 127 is a negative one: the high byte has it
            const __m128i h0 = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(q0, half), 8));
            const __m128i h1 = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(q1, half), 8));
            const __m256i high = _mm256_set_m128i(h1, h0);
            const __m256i first = _mm256_unpacklo_epi32(high, low), second = _mm256_unpackhi_epi32(high, low);
            _mm256_storeu_si256(place, _mm256_permute2x128_si256(first, second, 0x20));
            _mm256_storeu_si256(place + 1, _mm256_permute2x128_si256(first, second, 0x31));
        }
        scales[i / kBlock] = scale;
        sums[i / kBlock] = scale * static_cast<float>(sum);
        zeros[i / kBlock] = -128 * sum;
    }
}

void round_row(const float* row, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        _mm512_mask_storeu_ps(out + i, lanes, expand(round_to_bfloat16(_mm512_maskz_loadu_ps(lanes, row + i))));
    }
}

#if defined(TRUESPEC_TILES)

bool by_tiles(const Linear& linear) {
    return truespec_by_tiles && linear.kind == kBfloat16 && linear.num_inputs % kTileInputs == 0;
}

#endif

}  // namespace

Workspace& workspace() {
    thread_local Workspace own;
    return own;
}

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

Rows prepare(const Source& source, const Linear& linear, int64_t num_rows, const Prepared& to, int thread,
             int threads) {
    if (source.input == Input::kPlain && linear.kind == kFloat32) {
        return {source.rows, source.stride, nullptr, nullptr, nullptr, nullptr};
    }
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
        if (linear.kind == kInt8) {
            quantise_row<2>(row, size, bytes + 2 * r * size, scales + at, sums + at, zeros + at);
        } else if (linear.kind == kInt4) {
            quantise_row<1>(row, size, bytes + r * size, scales + at, sums + at, zeros + at);
        } else if (linear.kind == kBfloat16) {
#if defined(__AVX512BF16__)
            pair_row(row, size, bytes + r * ((size + 1) / 2) * 4);
#else
            round_row(row, size, floats + r * size);
#endif
        }
    }
    if (!own) {
#pragma omp barrier
    }
    return {floats, size, bytes, scales, sums, zeros};
}

namespace {

inline void store(__m512 sum, const Linear& linear, const Target& target, int64_t row, int64_t output) {
    const __mmask16 lanes = first_lanes(linear.num_outputs - output);
    float* out = target.rows + row * target.stride + output;
    if (linear.bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(lanes, linear.bias + output));
    if (target.add) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, out), sum);
    _mm512_mask_storeu_ps(out, lanes, sum);
}

// Sums of H halves of a panel, of 16 outputs each, from `output` on.
template <int R, int H>
void store_each(const __m512 (&sums)[R][H], const Linear& linear, const Target& target, int64_t row, int64_t output) {
    for (int r = 0; r < R; ++r) {
        for (int h = 0; h < H; ++h) store(sums[r][h], linear, target, row + r, output + 16 * h);
    }
}

// The same, from the half `first` of a panel on. Inlined, so that sums of whole vectors go from their registers to where
// they belong.
template <int R, int H>
[[gnu::always_inline]] inline void store_halves(const __m512 (&sums)[R][H], const Linear& linear, const Target& target,
                                                int64_t row, int64_t panel, int first) {
    const int64_t output = panel * kPanel + 16 * first;
    if (linear.bias || linear.num_outputs - output < 16 * H) return store_each(sums, linear, target, row, output);
    float* out = target.rows + row * target.stride + output;
    if (target.add) {
        for (int r = 0; r < R; ++r, out += target.stride) {
            for (int h = 0; h < H; ++h) {
                _mm512_storeu_ps(out + 16 * h, _mm512_add_ps(_mm512_loadu_ps(out + 16 * h), sums[r][h]));
            }
        }
    } else {
        for (int r = 0; r < R; ++r, out += target.stride) {
            for (int h = 0; h < H; ++h) _mm512_storeu_ps(out + 16 * h, sums[r][h]);
        }
    }
}

// Rows that share one pass over a panel: what two sums for each and plane need of 32 registers, or one sum of 16
// registers of half the size.
constexpr int kFloatRows = kWide ? 12 : 6, kPairRows = kWide ? 8 : 6;
constexpr int kQuadRows = kWide ? 6 : 4, kSplitQuadRows = kWide ? 4 : 2;

// Halves of a panel that R rows are multiplied with at once.
template <int R>
constexpr int kHalves = kWide || R <= 2 ? 2 : 1;

// Which of the passes over a panel.
struct Turn {
    int64_t index, count;
};

// Asks for weights line by line.
//
// One pass reads its panels in order. Of several passes over a panel only the first would wait for memory, so each asks
// for half of the next panel.
template <int products>
class Ahead {
   public:
    Ahead(const char* weights, int64_t panel_bytes, Turn turn) : again_(turn.count > 1), step_(again_ ? 32 : 64) {
        const int64_t way = truespec_ways[kIndex], distance = way == kPast || way == kFar ? 8192 : 2048;
        into_all_ = kIndex == 0 || again_ || way >= kNear;
        past_ = way == kPast;
        place_ = weights + (again_ ? panel_bytes + panel_bytes * turn.index / turn.count : distance);
    }

    void fetch_line() {
        if (into_all_) _mm_prefetch(place_, _MM_HINT_T0);
        else if (past_) _mm_prefetch(place_, _MM_HINT_NTA);
        place_ += step_;
    }

   private:
    static constexpr int kIndex = products <= kFewProducts ? products : 0;
    bool again_, into_all_, past_;
    int64_t step_;
    const char* place_;
};

template <int R>
void float_tile(const Rows& rows, int64_t row, const Linear& linear, int64_t panel, Turn turn, const Target& target) {
    constexpr int H = kHalves<R>;
    const int64_t size = linear.num_inputs;
    const float* a[R];
    for (int r = 0; r < R; ++r) a[r] = rows.floats + (row + r) * rows.stride;
    for (int first = 0; first < 2; first += H) {
        __m512 sums[R][H];
        for (int r = 0; r < R; ++r) {
            for (int h = 0; h < H; ++h) sums[r][h] = _mm512_setzero_ps();
        }
        const float* weight = static_cast<const float*>(linear.weight) + panel * size * kPanel + 16 * first;
        Ahead<R> ahead(reinterpret_cast<const char*>(weight), size * kPanel * 4, turn);
        for (int64_t k = 0; k < size; ++k, weight += kPanel) {
            if (!kWide && R > 1 && first == 0) ahead.fetch_line(), ahead.fetch_line();
            __m512 w[H];
            for (int h = 0; h < H; ++h) w[h] = _mm512_loadu_ps(weight + 16 * h);
            for (int r = 0; r < R; ++r) {
                const __m512 x = _mm512_set1_ps(a[r][k]);
                for (int h = 0; h < H; ++h) sums[r][h] = _mm512_fmadd_ps(w[h], x, sums[r][h]);
            }
        }
        store_halves<R, H>(sums, linear, target, row, panel, first);
    }
}

// A panel of bfloat16 weights: for every two inputs, a pair for each of 32 outputs. An odd last input is paired with 0.
#if defined(__AVX512BF16__)

template <int R>
void pair_tile(const Rows& rows, int64_t row, const Linear& linear, int64_t panel, Turn turn, const Target& target) {
    const int64_t pairs = (linear.num_inputs + 1) / 2;
    const int8_t* a[R];
    __m512 sums[R][2];
    for (int r = 0; r < R; ++r) {
        a[r] = rows.bytes + (row + r) * pairs * 4;
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    }
    const char* weight = static_cast<const char*>(linear.weight) + panel * pairs * kPanel * 4;
    Ahead<R> ahead(weight, pairs * kPanel * 4, turn);
    for (int64_t k = 0; k < pairs; ++k, weight += kPanel * 4) {
        ahead.fetch_line(), ahead.fetch_line();
        const __m512bh w0 = (__m512bh)_mm512_loadu_si512(weight), w1 = (__m512bh)_mm512_loadu_si512(weight + 64);
        for (int r = 0; r < R; ++r) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(*reinterpret_cast<const int32_t*>(a[r] + k * 4));
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, x);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, x);
        }
    }
    store_halves<R, 2>(sums, linear, target, row, panel, 0);
}

#else

template <int R>
void pair_tile(const Rows& rows, int64_t row, const Linear& linear, int64_t panel, Turn turn, const Target& target) {
    constexpr int H = kHalves<R>;
    const int64_t size = linear.num_inputs;
    const float* a[R];
    for (int r = 0; r < R; ++r) a[r] = rows.floats + (row + r) * rows.stride;
    const int64_t panel_bytes = (size + 1) / 2 * kPanel * 4;
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
    for (int first = 0; first < 2; first += H) {
        __m512 sums[R][H];
        for (int r = 0; r < R; ++r) {
            for (int h = 0; h < H; ++h) sums[r][h] = _mm512_setzero_ps();
        }
        const char* weight = static_cast<const char*>(linear.weight) + panel * panel_bytes + 64 * first;
        Ahead<R> ahead(weight, panel_bytes, turn);
        for (int64_t k = 0; k < size; k += 2, weight += kPanel * 4) {
            if (first == 0) ahead.fetch_line(), ahead.fetch_line();
            __m512 w[H];
            for (int h = 0; h < H; ++h) {
                w[h] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(weight + 64 * h), 16));
            }
            for (int r = 0; r < R; ++r) {
                const __m512 x = _mm512_set1_ps(a[r][k]);
                for (int h = 0; h < H; ++h) sums[r][h] = _mm512_fmadd_ps(w[h], x, sums[r][h]);
            }
            for (int h = 0; h < H; ++h) {
                w[h] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(weight + 64 * h), upper));
            }
            for (int r = 0; r < R; ++r) {
                const __m512 x = _mm512_set1_ps(k + 1 < size ? a[r][k + 1] : 0.0f);
                for (int h = 0; h < H; ++h) sums[r][h] = _mm512_fmadd_ps(w[h], x, sums[r][h]);
            }
        }
        store_halves<R, H>(sums, linear, target, row, panel, first);
    }
}

#endif

// Adds to each of 16 sums the products of four weights (unsigned bytes) with four activations (signed).
template <bool is_int4>
inline __m512i multiply_quads(__m512i sum, __m512i weights, __m512i activations) {
#if defined(__AVX512VNNI__)
    return _mm512_dpbusd_epi32(sum, weights, activations);
#else
    if constexpr (is_int4) {  // two products of at most 15 x 128 have room in 16 bits
        const __m512i twos = _mm512_maddubs_epi16(weights, activations);
        return _mm512_add_epi32(sum, _mm512_madd_epi16(twos, _mm512_set1_epi16(1)));
    }
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
template <int R, bool is_int4>
void int_tile(const Rows& rows, int64_t row, const Linear& linear, int64_t panel, Turn turn, const Target& target) {
    constexpr int H = kHalves<R>, planes = is_int4 ? 1 : 2;
    constexpr int64_t kNumbers = is_int4 ? 512 : 1024, kBytes = is_int4 ? kInt4Bytes : kInt8Bytes;
    const int64_t size = linear.num_inputs, blocks = size / kBlock;
    const int8_t* a[R];
    for (int r = 0; r < R; ++r) a[r] = rows.bytes + (row + r) * planes * size;
    const __m512i low_half = _mm512_set1_epi8(15);
    for (int first = 0; first < 2; first += H) {
        const char* block = static_cast<const char*>(linear.weight) + panel * blocks * kBytes;
        Ahead<kFewProducts + 1> ahead(block, blocks * kBytes, turn);
        __m512 sums[R][H];
        for (int r = 0; r < R; ++r) {
            for (int h = 0; h < H; ++h) sums[r][h] = _mm512_setzero_ps();
        }
        for (int64_t b = 0; b < blocks; ++b, block += kBytes) {
            for (int64_t line = 0; first == 0 && line < kBytes; line += 64) ahead.fetch_line();
            __m512i products[R][planes][H];
            for (int r = 0; r < R; ++r) {
                for (int h = 0; h < H; ++h) {
                    for (int p = 0; p < planes; ++p) products[r][p][h] = _mm512_setzero_si512();
                    if (!is_int4) products[r][planes - 1][h] = _mm512_set1_epi32(rows.zeros[(row + r) * blocks + b]);
                }
            }
#pragma GCC unroll 8
            for (int z = 0; z < 8; ++z) {
                __m512i weights[H];
                for (int h = 0; h < H; ++h) {
                    if constexpr (is_int4) {
                        const __m512i packed = _mm512_loadu_si512(block + z / 2 * 128 + 64 * (first + h));
                        weights[h] = _mm512_and_si512(z % 2 ? _mm512_srli_epi16(packed, 4) : packed, low_half);
                    } else {
                        weights[h] = _mm512_loadu_si512(block + z * 128 + 64 * (first + h));
                    }
                }
                for (int r = 0; r < R; ++r) {
                    for (int p = 0; p < planes; ++p) {
                        const int8_t* quad = a[r] + planes * (b * kBlock + 4 * z) + 4 * p;
                        const __m512i four = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(quad));
                        for (int h = 0; h < H; ++h) {
                            products[r][p][h] = multiply_quads<is_int4>(products[r][p][h], weights[h], four);
                        }
                    }
                }
            }
            for (int h = 0; h < H; ++h) {
                const __m512 scale = load_halves(block + kNumbers + 32 * (first + h));
                for (int r = 0; r < R; ++r) {
                    const int64_t at = (row + r) * blocks + b;
                    __m512i product = products[r][planes - 1][h];
                    if constexpr (planes == 2) product = _mm512_add_epi32(product, _mm512_slli_epi32(products[r][0][h], 8));
                    const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(rows.scales[at]));
                    sums[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(product), both, sums[r][h]);
                    if constexpr (is_int4) {
                        const __m512 least = load_halves(block + kNumbers + 64 + 32 * (first + h));
                        sums[r][h] = _mm512_fmadd_ps(least, _mm512_set1_ps(rows.sums[at]), sums[r][h]);
                    }
                }
            }
        }
        store_halves<R, H>(sums, linear, target, row, panel, first);
    }
}

#if defined(TRUESPEC_TILES)

// One thread's panels, 32 rows at a time. Rows behind the last one up to whole tiles are multiplied too, whatever is in
// them: a row of a tile touches no other.
void multiply_by_tiles(const Rows& rows, int64_t num_rows, const Linear& linear, Range panels, const Target& target) {
    constexpr int64_t kStep = kTileInputs / 2 * kPanelRow;  // bytes of a panel that a row's tile goes with
    const int64_t stride = 2 * linear.num_inputs, panel_bytes = 2 * kPanel * linear.num_inputs;
    const int64_t turns = (num_rows + 2 * kTileRows - 1) / (2 * kTileRows);
    shape_for_panels(std::min(kTileRows, num_rows));
    alignas(64) float sums[2][2][16][16] = {};
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
        for (int64_t turn = 0; turn < turns; ++turn) {
            const int64_t row = turn * 2 * kTileRows, count = std::min(2 * kTileRows, num_rows - row);
            const int8_t* a = rows.bytes + row * stride;
            const int8_t* second = count > kTileRows ? a + kTileRows * stride : nullptr;
            const char* weight = static_cast<const char*>(linear.weight) + panel * panel_bytes;
            Ahead<kFewProducts + 1> ahead(weight, panel_bytes, Turn{turn, turns});
            clear_sums();
            add_panel(a, second, stride, weight, linear.num_inputs, [&] {
                for (int64_t line = 0; line < kStep; line += 64) ahead.fetch_line();
            });
            STORE_TILE(0, sums[0][0], 64);
            STORE_TILE(1, sums[0][1], 64);
            STORE_TILE(2, sums[1][0], 64);
            STORE_TILE(3, sums[1][1], 64);
            for (int64_t r = 0; r < count; ++r) {
                for (int half = 0; half < 2; ++half) {
                    const __m512 sum = _mm512_load_ps(sums[r / kTileRows][half][r % kTileRows]);
                    store(sum, linear, target, row + r, panel * kPanel + 16 * half);
                }
            }
        }
    }
    release_tiles();
}

#endif

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

}  // namespace

void multiply(const Rows& rows, int64_t num_rows, const Linear& linear, const Target& to, int thread, int threads) {
    const Range panels = share((linear.num_outputs + kPanel - 1) / kPanel, thread, threads);
#if defined(TRUESPEC_TILES)
    if (num_rows > 0 && by_tiles(linear)) {
        return multiply_by_tiles(rows, num_rows, linear, panels, to);
    }
#endif
    const auto floats = [&](auto R, int64_t row, int64_t panel, Turn turn) {
        float_tile<R()>(rows, row, linear, panel, turn, to);
    };
    const auto pairs = [&](auto R, int64_t row, int64_t panel, Turn turn) {
        pair_tile<R()>(rows, row, linear, panel, turn, to);
    };
    const auto ints = [&](auto is_int4) {
        return [&](auto R, int64_t row, int64_t panel, Turn turn) {
            int_tile<R(), is_int4()>(rows, row, linear, panel, turn, to);
        };
    };
    switch (linear.kind) {
        case kFloat32: return multiply_tiles<kFloatRows>(num_rows, panels, floats);
        case kBfloat16: return multiply_tiles<kPairRows>(num_rows, panels, pairs);
        case kInt4: return multiply_tiles<kQuadRows>(num_rows, panels, ints(std::true_type()));
        default: return multiply_tiles<kSplitQuadRows>(num_rows, panels, ints(std::false_type()));
    }
}

}  // namespace truespec
