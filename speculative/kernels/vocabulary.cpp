// Distributions, filters, draws, verification and self-checks over the vocabulary.

#include "kernels.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace truespec {

void divide_row(float* row, int64_t size, float by) {
    if (by == 1.0f) return;
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        _mm512_mask_storeu_ps(row + i, lanes, _mm512_div_ps(_mm512_maskz_loadu_ps(lanes, row + i), _mm512_set1_ps(by)));
    }
}

// e^(x - largest) over its sum; NaN everywhere where a logit is NaN or infinite, or all are -infinite.
static void softmax_row(const float* logits, int64_t size, float* out) {
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

namespace {

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

}  // namespace

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

namespace {

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

}  // namespace

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

namespace {

// What a distribution leaves beside q, whose columns stand for the tokens `ids` (null = all of them),
// unnormalised; the distribution itself where nothing is left. left: [size].
const float* residual_row(const float* distribution, int64_t size, const float* q, int64_t width, const int64_t* ids,
                          float* left) {
    std::copy_n(distribution, size, left);
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
        if (!q) return residual_row(distribution(row), size, &one, 1, &drafts[row], left);
        return residual_row(distribution(row), size, draft_probs(row), width, ids, left);
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

}  // namespace

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

namespace {

constexpr int kLanes = 16;
constexpr uint32_t kNoise = 4;  // the purpose

// What Philox makes of the counters (pair, position, kNoise, 0): words [4][kLanes].
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
struct Product {
    __m512i high, low;
};

inline Product product(__m512i words, __m512i by) {
    const __m512i even = _mm512_mul_epu32(words, by), odd = _mm512_mul_epu32(_mm512_srli_epi64(words, 32), by);
    return {_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd),
            _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32))};
}

inline __m512i all(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }

void philox(uint64_t seed, uint32_t position, const uint32_t* pairs, uint32_t words[4][kLanes]) {
    __m512i c0 = _mm512_loadu_si512(pairs), c1 = all(position), c2 = all(kNoise), c3 = _mm512_setzero_si512();
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const Product first = product(c0, all(0xD2511F53)), second = product(c2, all(0xCD9E8D57));
        c0 = _mm512_xor_si512(_mm512_xor_si512(second.high, c1), all(k0));
        c1 = second.low;
        c2 = _mm512_xor_si512(_mm512_xor_si512(first.high, c3), all(k1));
        c3 = first.low;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    _mm512_storeu_si512(words[0], c0);
    _mm512_storeu_si512(words[1], c1);
    _mm512_storeu_si512(words[2], c2);
    _mm512_storeu_si512(words[3], c3);
}
#else
void philox(uint64_t seed, uint32_t position, const uint32_t* pairs, uint32_t words[4][kLanes]) {
    uint32_t *c0 = words[0], *c1 = words[1], *c2 = words[2], *c3 = words[3];
    for (int lane = 0; lane < kLanes; ++lane) {
        c0[lane] = pairs[lane];
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
}
#endif

// The uniforms of the coupled verifier's noise, as in rng.py, of kLanes pairs of tokens: those of the first tokens, then
// those of the second ones.
void noise_of(uint64_t seed, uint32_t position, const uint32_t* pairs, double* first_ones, double* second_ones) {
    uint32_t words[4][kLanes];
    philox(seed, position, pairs, words);
    for (int lane = 0; lane < kLanes; ++lane) {
        first_ones[lane] = unit_of(words[0][lane], words[1][lane]);
        second_ones[lane] = unit_of(words[2][lane], words[3][lane]);
    }
}

// The uniforms of tokens begin to begin + 2 kLanes, of which begin is even, in order.
void noise_from(uint64_t seed, uint32_t position, int64_t begin, double* drawn) {
    uint32_t pairs[kLanes];
    double first_ones[kLanes], second_ones[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) pairs[lane] = static_cast<uint32_t>(begin / 2 + lane);
    noise_of(seed, position, pairs, first_ones, second_ones);
    for (int lane = 0; lane < kLanes; ++lane) {
        drawn[2 * lane] = first_ones[lane];
        drawn[2 * lane + 1] = second_ones[lane];
    }
}

void noise_row(uint64_t seed, uint32_t position, int64_t size, double* out) {
    for (int64_t begin = 0; begin < size; begin += 2 * kLanes) {
        double drawn[2 * kLanes];
        noise_from(seed, position, begin, drawn);
        std::memcpy(out + begin, drawn, std::min<int64_t>(2 * kLanes, size - begin) * sizeof(double));
    }
}

// The uniforms of `count` tokens, at most 2 kLanes.
void noise_at(uint64_t seed, uint32_t position, const int64_t* tokens, int64_t count, double* drawn) {
    for (int64_t begin = 0; begin < count; begin += kLanes) {
        uint32_t pairs[kLanes] = {};
        double first_ones[kLanes], second_ones[kLanes];
        const int64_t own = std::min<int64_t>(kLanes, count - begin);
        for (int64_t lane = 0; lane < own; ++lane) pairs[lane] = static_cast<uint32_t>(tokens[begin + lane] / 2);
        noise_of(seed, position, pairs, first_ones, second_ones);
        for (int64_t lane = 0; lane < own; ++lane) {
            drawn[begin + lane] = tokens[begin + lane] % 2 ? second_ones[lane] : first_ones[lane];
        }
    }
}

// The columns with the `count` largest log p + noise of one row, the largest first; -1 where p is 0 in all others.
//
// With u the uniform of a token its noise is -log(-log u), and -log u >= 1 - u, so log p + noise <= log(p / (1 - u)):
// what cannot be among the largest by that needs no logarithm.
void choose_row(const float* probs, int64_t width, const int64_t* ids, uint64_t seed, uint32_t position, int64_t count,
                int64_t* columns, double* scores) {
    std::fill(columns, columns + count, -1);
    std::fill(scores, scores + count, -INFINITY);
    double least = 0;  // exp of the last score, and a little less: scores are rounded
    for (int64_t begin = 0; begin < width; begin += 2 * kLanes) {
        const int64_t own = std::min<int64_t>(2 * kLanes, width - begin);
        const float* p = probs + begin;
        float highest = 0;
        for (int64_t i = 0; i < own; ++i) highest = std::max(highest, p[i]);
        if (!(highest > 0)) continue;
        double drawn[2 * kLanes];
        if (ids) noise_at(seed, position, ids + begin, own, drawn);
        else noise_from(seed, position, begin, drawn);
        uint32_t may_win = 0;
        for (int64_t i = 0; i < own; ++i) may_win |= uint32_t{p[i] > least * (1 - drawn[i])} << i;
        for (; may_win; may_win &= may_win - 1) {
            const int64_t i = __builtin_ctz(may_win);
            if (!(p[i] > 0)) continue;
            const double score = static_cast<double>(std::log(p[i])) - std::log(-std::log(drawn[i]));
            if (!(score > scores[count - 1])) continue;
            int64_t place = count - 1;
            for (; place > 0 && score > scores[place - 1]; --place) {
                scores[place] = scores[place - 1];
                columns[place] = columns[place - 1];
            }
            scores[place] = score;
            columns[place] = begin + i;
            least = std::exp(scores[count - 1]) * (1 - 1e-4);
        }
    }
}

}  // namespace

extern "C" {

// logits [num_rows, size] -> distributions [num_rows, size]: softmax, or all mass on the likeliest token where
// `greedy`.
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

// What is recorded of a round: q of the draft at each row, and of each entry's last token; and in `before`, if it is
// not null, the mass of q before each draft. column_of [size]: the column of each token, -1 = none; null where it is
// the token.
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
// chosen ones d a r g, summed up (TermSums); what could be accepted of the drafts that were reached; and rows [3,
// num_rows] of each row's chance, and the place of the last tokens.
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

// Of each row of probs [num_rows, width] the columns [num_rows, count] with the largest log p + noise, the largest first;
// -1 where all other p are 0. ids [width]: the tokens of the columns, or null where they are the columns.
void truespec_choose(int64_t num_rows, int64_t width, const float* probs, const int64_t* ids, const int64_t* seeds,
                     const int64_t* positions, int64_t count, int64_t* columns, int64_t num_threads) {
    in_threads(std::min(num_rows, num_threads), [&](int64_t thread, int64_t threads) {
        std::vector<double> scores(count);
        for (int64_t r = thread; r < num_rows; r += threads) {
            choose_row(probs + r * width, width, ids, static_cast<uint64_t>(seeds[r]), static_cast<uint32_t>(positions[r]),
                       count, columns + r * count, scores.data());
        }
    });
}

const Place kVocabularyPlaces[] = {
    SIZE(VerifyStep),
    AT(VerifyStep, num_rows), AT(VerifyStep, num_entries), AT(VerifyStep, size), AT(VerifyStep, p), AT(VerifyStep, q),
    AT(VerifyStep, width), AT(VerifyStep, ids), AT(VerifyStep, columns), AT(VerifyStep, drafts),
    AT(VerifyStep, packed), AT(VerifyStep, entries), AT(VerifyStep, first_rows),
    SIZE(TermRules),
    AT(TermRules, stakes), AT(TermRules, num_stakes), AT(TermRules, least_residual), AT(TermRules, least_spread),
    AT(TermRules, equal), AT(TermRules, rounding),
    {nullptr, 0},
};

// The table above; its last entry has no name.
const Place* truespec_vocabulary_places() { return kVocabularyPlaces; }

}  // extern "C"

}  // namespace truespec
