// The AVX-512 intrinsics that the kernels use, for processors that have AVX2, FMA and F16C but no AVX-512.
//
// Each vector of 512 bits is two of 256, and each function does what Intel's of the same name does, sums of lanes in the
// same order. They stand in the namespace of the kernels, where they hide Intel's.

#pragma once

#include <immintrin.h>

#include <cstdint>

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "These kernels need AVX-512 (F, BW, DQ), or AVX2 with FMA and F16C."
#endif

// Clang has macros for those that take a constant.
#undef _mm512_cmp_ps_mask
#undef _mm512_extractf32x8_ps
#undef _mm512_insertf32x8
#undef _mm512_mask_cmp_ps_mask
#undef _mm512_mask_i64gather_ps
#undef _mm512_roundscale_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_ps

#define INLINE [[gnu::always_inline]] inline

namespace truespec {

struct __m512 {
    __m256 low, high;
};

struct __m512d {
    __m256d low, high;
};

struct __m512i {
    __m256i low, high;
};

// -- masks ------------------------------------------------------------------------------------------------------------

// All bits of the lanes that a mask has.
INLINE __m256i lanes_of(unsigned mask) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask)), bits), bits);
}

INLINE __m256 blend(__m256 otherwise, __m256 value, unsigned mask) {
    return _mm256_blendv_ps(otherwise, value, _mm256_castsi256_ps(lanes_of(mask)));
}

INLINE __m256 compare(__m256 a, __m256 b, int how) {
    switch (how) {
        case _CMP_UNORD_Q: return _mm256_cmp_ps(a, b, _CMP_UNORD_Q);
        case _CMP_EQ_OQ: return _mm256_cmp_ps(a, b, _CMP_EQ_OQ);
        case _CMP_GE_OQ: return _mm256_cmp_ps(a, b, _CMP_GE_OQ);
        default: return _mm256_cmp_ps(a, b, _CMP_LT_OQ);
    }
}

INLINE __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    const int low = _mm256_movemask_ps(compare(a.low, b.low, how)), high = _mm256_movemask_ps(compare(a.high, b.high, how));
    return static_cast<__mmask16>(low | high << 8);
}

INLINE __mmask16 _mm512_mask_cmp_ps_mask(__mmask16 mask, __m512 a, __m512 b, int how) {
    return mask & _mm512_cmp_ps_mask(a, b, how);
}

INLINE __m512 _mm512_mask_mov_ps(__m512 otherwise, __mmask16 mask, __m512 value) {
    return {blend(otherwise.low, value.low, mask), blend(otherwise.high, value.high, mask >> 8)};
}

INLINE __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 value) {
    if (mask == 0xFFFF) return value;
    return _mm512_mask_mov_ps({_mm256_setzero_ps(), _mm256_setzero_ps()}, mask, value);
}

INLINE __m512i _mm512_mask_mov_epi32(__m512i otherwise, __mmask16 mask, __m512i value) {
    return {_mm256_blendv_epi8(otherwise.low, value.low, lanes_of(mask)),
            _mm256_blendv_epi8(otherwise.high, value.high, lanes_of(mask >> 8))};
}

// -- loads and stores -------------------------------------------------------------------------------------------------

INLINE __m512 _mm512_loadu_ps(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }

INLINE void _mm512_storeu_ps(float* to, __m512 x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}

INLINE __m512i _mm512_loadu_si512(const void* from) {
    const __m256i* halves = static_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}

INLINE __m256 _mm256_maskz_loadu_ps(__mmask8 mask, const float* from) {
    return mask == 0xFF ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, lanes_of(mask));
}

INLINE __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* from) {
    if (mask == 0xFFFF) return _mm512_loadu_ps(from);
    return {_mm256_maskload_ps(from, lanes_of(mask)), _mm256_maskload_ps(from + 8, lanes_of(mask >> 8))};
}

INLINE void _mm512_mask_storeu_ps(float* to, __mmask16 mask, __m512 x) {
    if (mask == 0xFFFF) return _mm512_storeu_ps(to, x);
    _mm256_maskstore_ps(to, lanes_of(mask), x.low);
    _mm256_maskstore_ps(to + 8, lanes_of(mask >> 8), x.high);
}

INLINE void _mm512_mask_compressstoreu_ps(float* to, __mmask16 mask, __m512 x) {
    float lanes[16];
    _mm512_storeu_ps(lanes, x);
    for (unsigned left = mask; left; left &= left - 1) *to++ = lanes[__builtin_ctz(left)];
}

INLINE __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const uint16_t* from) {
    uint16_t lanes[16] = {};
    for (unsigned left = mask; left; left &= left - 1) lanes[__builtin_ctz(left)] = from[__builtin_ctz(left)];
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes));
}

INLINE __m512i _mm512_maskz_loadu_epi64(__mmask8 mask, const int64_t* from) {
    const auto quads = [](unsigned four) { return _mm256_cvtepi32_epi64(_mm256_castsi256_si128(lanes_of(four))); };
    const long long* places = reinterpret_cast<const long long*>(from);
    return {_mm256_maskload_epi64(places, quads(mask)), _mm256_maskload_epi64(places + 4, quads(mask >> 4))};
}

// scale: 4.
INLINE __m256 _mm512_mask_i64gather_ps(__m256 otherwise, __mmask8 mask, __m512i places, const float* from, int) {
    int64_t at[8];
    float lanes[8];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), places.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + 4), places.high);
    _mm256_storeu_ps(lanes, otherwise);
    for (unsigned left = mask; left; left &= left - 1) lanes[__builtin_ctz(left)] = from[at[__builtin_ctz(left)]];
    return _mm256_loadu_ps(lanes);
}

// -- floats -----------------------------------------------------------------------------------------------------------

INLINE __m512 _mm512_setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE __m512 _mm512_set1_ps(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }

INLINE __m512 _mm512_add_ps(__m512 a, __m512 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
INLINE __m512 _mm512_sub_ps(__m512 a, __m512 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
INLINE __m512 _mm512_mul_ps(__m512 a, __m512 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
INLINE __m512 _mm512_div_ps(__m512 a, __m512 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
INLINE __m512 _mm512_max_ps(__m512 a, __m512 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
INLINE __m512 _mm512_min_ps(__m512 a, __m512 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }

INLINE __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

INLINE __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) {
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}

INLINE __m512 _mm512_mask_max_ps(__m512 otherwise, __mmask16 mask, __m512 a, __m512 b) {
    const __m512 larger = _mm512_max_ps(a, b);
    return mask == 0xFFFF ? larger : _mm512_mask_mov_ps(otherwise, mask, larger);
}

INLINE __m512 _mm512_abs_ps(__m512 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}

// how: 8, to the nearest integer.
INLINE __m512 _mm512_roundscale_ps(__m512 x, int) { return {_mm256_round_ps(x.low, 8), _mm256_round_ps(x.high, 8)}; }

// 2 to the power of an integer between -126 and 127.
INLINE __m256 power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

// x 2^n for integers n between -252 and 254, in two factors: only the second one can round.
INLINE __m256 scale_by(__m256 x, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    return _mm256_mul_ps(_mm256_mul_ps(x, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}

INLINE __m512 _mm512_scalef_ps(__m512 x, __m512 n) { return {scale_by(x.low, n.low), scale_by(x.high, n.high)}; }

INLINE float _mm512_cvtss_f32(__m512 x) { return _mm256_cvtss_f32(x.low); }

INLINE float _mm512_reduce_add_ps(__m512 x) {
    const __m256 eight = _mm256_add_ps(x.high, x.low);
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float _mm512_reduce_max_ps(__m512 x) {
    const __m256 eight = _mm256_max_ps(x.high, x.low);
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

INLINE __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) {
    return {_mm256_unpacklo_ps(a.low, b.low), _mm256_unpacklo_ps(a.high, b.high)};
}

INLINE __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) {
    return {_mm256_unpackhi_ps(a.low, b.low), _mm256_unpackhi_ps(a.high, b.high)};
}

// which: 0x44 or 0xEE.
INLINE __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int which) {
    if (which == 0x44) return {_mm256_shuffle_ps(a.low, b.low, 0x44), _mm256_shuffle_ps(a.high, b.high, 0x44)};
    return {_mm256_shuffle_ps(a.low, b.low, 0xEE), _mm256_shuffle_ps(a.high, b.high, 0xEE)};
}

// which: 0x44, 0xEE, 0x88 or 0xDD.
INLINE __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int which) {
    switch (which) {
        case 0x44: return {a.low, b.low};
        case 0xEE: return {a.high, b.high};
        case 0x88: return {_mm256_permute2f128_ps(a.low, a.high, 0x20), _mm256_permute2f128_ps(b.low, b.high, 0x20)};
        default: return {_mm256_permute2f128_ps(a.low, a.high, 0x31), _mm256_permute2f128_ps(b.low, b.high, 0x31)};
    }
}

INLINE __m256 _mm512_castps512_ps256(__m512 x) { return x.low; }
INLINE __m512 _mm512_castps256_ps512(__m256 low) { return {low, low}; }

// which: 1, the upper half.
INLINE __m256 _mm512_extractf32x8_ps(__m512 x, int) { return x.high; }
INLINE __m512 _mm512_insertf32x8(__m512 x, __m256 high, int) { return {x.low, high}; }

// -- doubles ----------------------------------------------------------------------------------------------------------

INLINE __m512d _mm512_setzero_pd() { return {_mm256_setzero_pd(), _mm256_setzero_pd()}; }

INLINE __m512d _mm512_add_pd(__m512d a, __m512d b) {
    return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)};
}

INLINE __m512d _mm512_cvtps_pd(__m256 x) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}

INLINE double _mm512_reduce_add_pd(__m512d x) {
    const __m256d four = _mm256_add_pd(x.high, x.low);
    const __m128d two = _mm_add_pd(_mm256_extractf128_pd(four, 1), _mm256_castpd256_pd128(four));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

// -- integers ---------------------------------------------------------------------------------------------------------

INLINE __m512i _mm512_setzero_si512() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE __m512i _mm512_set1_epi8(char x) { return {_mm256_set1_epi8(x), _mm256_set1_epi8(x)}; }
INLINE __m512i _mm512_set1_epi16(short x) { return {_mm256_set1_epi16(x), _mm256_set1_epi16(x)}; }
INLINE __m512i _mm512_set1_epi32(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }

INLINE __m512i _mm512_and_si512(__m512i a, __m512i b) {
    return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}

INLINE __m512i _mm512_add_epi32(__m512i a, __m512i b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}

INLINE __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
    return {_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high)};
}

INLINE __m512i _mm512_maddubs_epi16(__m512i a, __m512i b) {
    return {_mm256_maddubs_epi16(a.low, b.low), _mm256_maddubs_epi16(a.high, b.high)};
}

INLINE __m512i _mm512_slli_epi16(__m512i x, int n) { return {_mm256_slli_epi16(x.low, n), _mm256_slli_epi16(x.high, n)}; }
INLINE __m512i _mm512_srli_epi16(__m512i x, int n) { return {_mm256_srli_epi16(x.low, n), _mm256_srli_epi16(x.high, n)}; }
INLINE __m512i _mm512_srai_epi16(__m512i x, int n) { return {_mm256_srai_epi16(x.low, n), _mm256_srai_epi16(x.high, n)}; }
INLINE __m512i _mm512_slli_epi32(__m512i x, int n) { return {_mm256_slli_epi32(x.low, n), _mm256_slli_epi32(x.high, n)}; }
INLINE __m512i _mm512_srli_epi32(__m512i x, int n) { return {_mm256_srli_epi32(x.low, n), _mm256_srli_epi32(x.high, n)}; }
INLINE __m512i _mm512_srai_epi32(__m512i x, int n) { return {_mm256_srai_epi32(x.low, n), _mm256_srai_epi32(x.high, n)}; }

INLINE int _mm512_reduce_add_epi32(__m512i x) {
    const __m256i eight = _mm256_add_epi32(x.high, x.low);
    const __m128i four = _mm_add_epi32(_mm256_extracti128_si256(eight, 1), _mm256_castsi256_si128(eight));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}

// -- from one type to another -----------------------------------------------------------------------------------------

INLINE __m512 _mm512_castsi512_ps(__m512i x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }
INLINE __m512i _mm512_castps_si512(__m512 x) { return {_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)}; }
INLINE __m512i _mm512_cvtps_epi32(__m512 x) { return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)}; }
INLINE __m512 _mm512_cvtepi32_ps(__m512i x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }

INLINE __m512 _mm512_cvtph_ps(__m256i x) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}

INLINE __m512i _mm512_cvtepu16_epi32(__m256i x) {
    return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
}

// The lower 16 bits of each lane.
INLINE __m256i _mm512_cvtepi32_epi16(__m512i x) {
    const __m512i lower = _mm512_and_si512(x, _mm512_set1_epi32(0xFFFF));
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(lower.low, lower.high), 0xD8);
}

// The lower 8 bits of each lane.
INLINE __m128i _mm512_cvtepi32_epi8(__m512i x) {
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_and_si512(x, _mm512_set1_epi32(0xFF)));
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

}  // namespace truespec

#undef INLINE
