// The tiles of AMX that products and attention use: eight registers of 16 rows of 64 bytes.
//
// With TRUESPEC_EMULATE_TILES plain C++ computes what the instructions do, for tests on processors without AMX.
//
// The instructions are written out because the intrinsics of GCC 12 do not tell the compiler which memory they read: it
// drops stores to a configuration that `_tile_loadconfig` is to load.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) && defined(TRUESPEC_EMULATE_TILES)
#define TRUESPEC_TILES
#include <atomic>
#elif defined(__AVX512BF16__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define TRUESPEC_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace truespec {

struct TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

#if !defined(TRUESPEC_TILES)

inline bool permit_tiles() { return false; }

#elif defined(TRUESPEC_EMULATE_TILES)

// Denormals are read and written as 0.
inline float without_denormal(float x) { return __builtin_isnormal(x) || x != x || x - x != 0 ? x : 0.0f; }

struct EmulatedTile {
    int64_t rows, row_bytes;
    char bytes[16][64];

    void load(const void* from, int64_t stride) {
        const char* place = static_cast<const char*>(from);
        for (int64_t r = 0; r < rows; ++r) std::memcpy(bytes[r], place + r * stride, row_bytes);
    }

    void store(void* to, int64_t stride) const {
        char* place = static_cast<char*>(to);
        for (int64_t r = 0; r < rows; ++r) std::memcpy(place + r * stride, bytes[r], row_bytes);
    }

    float bfloat16(int64_t row, int64_t index) const {
        uint32_t bits = 0;
        std::memcpy(reinterpret_cast<char*>(&bits) + 2, bytes[row] + 2 * index, 2);
        float x;
        std::memcpy(&x, &bits, 4);
        return without_denormal(x);
    }

    // TDPBF16PS: the products of even numbers add up apart from those of odd ones, then both are added, and that to
    // what is there. Each step rounds once.
    void add_products(const EmulatedTile& a, const EmulatedTile& b) {
        for (int64_t m = 0; m < rows; ++m) {
            for (int64_t n = 0; n < row_bytes / 4; ++n) {
                float sums[2] = {}, sum;
                for (int64_t k = 0; k < a.row_bytes / 4; ++k) {
                    for (int i = 0; i < 2; ++i) {
                        const float x = a.bfloat16(m, 2 * k + i), y = b.bfloat16(k, 2 * n + i);
                        sums[i] = without_denormal(__builtin_fmaf(x, y, sums[i]));
                    }
                }
                std::memcpy(&sum, bytes[m] + 4 * n, 4);
                sum = without_denormal(without_denormal(sum) + without_denormal(sums[0] + sums[1]));
                std::memcpy(bytes[m] + 4 * n, &sum, 4);
            }
        }
    }
};

inline thread_local EmulatedTile emulated_tiles[8];

// Products of two tiles so far, for tests of who computed what comes to the same bits.
extern "C" inline std::atomic<int64_t> truespec_emulated_products{0};

inline void multiply_emulated(int to, int a, int b) {
    emulated_tiles[to].add_products(emulated_tiles[a], emulated_tiles[b]);
    ++truespec_emulated_products;
}

inline bool permit_tiles() { return true; }

inline void shape_tiles(const TileShapes& shapes) {
    for (int t = 0; t < 8; ++t) emulated_tiles[t] = {shapes.rows[t], shapes.row_bytes[t], {}};
}

inline void release_tiles() {}

#define CLEAR_TILE(t) std::memset(emulated_tiles[t].bytes, 0, sizeof(emulated_tiles[t].bytes))
#define LOAD_TILE(t, from, stride) emulated_tiles[t].load(from, stride)
#define STORE_TILE(t, to, stride) emulated_tiles[t].store(to, stride)
#define MULTIPLY_TILES(to, a, b) multiply_emulated(to, a, b)

#else

// Linux gives a process the registers when it asks for them, once for all of its threads.
inline bool permit_tiles() {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Of the thread that calls.
inline void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }

inline void release_tiles() { asm volatile("tilerelease" : :); }

#define CLEAR_TILE(t) asm volatile("tilezero %%tmm" #t : :)
#define LOAD_TILE(t, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(from), "r"(static_cast<int64_t>(stride)) : "memory")
#define STORE_TILE(t, to, stride) \
    asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(to), "r"(static_cast<int64_t>(stride)) : "memory")
#define MULTIPLY_TILES(to, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #to : :)

#endif

#if defined(TRUESPEC_TILES)

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileInputs = 32;  // bfloat16s of a row of a tile

// For `add_panel`: tiles 0 to 3 are sums, of two times so many rows and 16 outputs; 4 and 5 rows; 6 and 7 a panel.
inline void shape_for_panels(int64_t rows) {
    TileShapes shapes;
    for (int t = 0; t < 8; ++t) {
        shapes.row_bytes[t] = 64;
        shapes.rows[t] = t < 6 ? rows : kTileInputs / 2;
    }
    shape_tiles(shapes);
}

inline void clear_sums() {
    CLEAR_TILE(0);
    CLEAR_TILE(1);
    CLEAR_TILE(2);
    CLEAR_TILE(3);
}

// Adds the products of rows, as `pair_row` has them, `stride` bytes apart, with a panel of so many inputs to
// the sums: of rows from `first` on, and of others from `second` on, unless it is null. each_step: done before each 32
// inputs.
template <typename Work>
void add_panel(const int8_t* first, const int8_t* second, int64_t stride, const char* panel, int64_t inputs,
               const Work& each_step) {
    for (int64_t k = 0; k < inputs; k += kTileInputs, panel += kTileInputs / 2 * kPanelRow) {
        each_step();
        LOAD_TILE(6, panel, kPanelRow);
        LOAD_TILE(7, panel + 64, kPanelRow);
        LOAD_TILE(4, first, stride);
        MULTIPLY_TILES(0, 4, 6);
        MULTIPLY_TILES(1, 4, 7);
        first += 64;
        if (!second) continue;
        LOAD_TILE(5, second, stride);
        MULTIPLY_TILES(2, 5, 6);
        MULTIPLY_TILES(3, 5, 7);
        second += 64;
    }
}

#endif

}  // namespace truespec
