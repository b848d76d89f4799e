// AMX's tiles in plain C++, for the test of matmul_amx.cpp on machines without them: slow, and as the manual says
// (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TILELOADD, TDPBF16PS and their kin).
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "lanes.h"

namespace meterhouse::emulated {

struct Tiles {
    bool configured = false;
    uint16_t row_bytes[8] = {};
    uint8_t rows[8] = {};
    alignas(64) uint8_t data[8][16][64] = {};

    void require(int tile) const {  // what would be a fault
        if (!configured || rows[tile] == 0) std::abort();
    }
};

inline thread_local Tiles tiles;

inline void load_config(const void* from) {
    const auto* bytes = static_cast<const uint8_t*>(from);
    if (bytes[0] != 1) std::abort();
    tiles = {};
    tiles.configured = true;
    std::memcpy(tiles.row_bytes, bytes + 16, sizeof tiles.row_bytes);
    std::memcpy(tiles.rows, bytes + 48, sizeof tiles.rows);
}

inline void release() { tiles = {}; }

inline void zero(int tile) {
    tiles.require(tile);
    std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}

inline void load_tile(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int row = 0; row < tiles.rows[tile]; row++) {
        std::memcpy(tiles.data[tile][row], static_cast<const char*>(from) + row * stride, tiles.row_bytes[tile]);
    }
}

inline void store_tile(int tile, void* to, int64_t stride) {
    tiles.require(tile);
    for (int row = 0; row < tiles.rows[tile]; row++) {
        std::memcpy(static_cast<char*>(to) + row * stride, tiles.data[tile][row], tiles.row_bytes[tile]);
    }
}

inline void dot_bf16(int sum, int a, int b) {
    for (int tile : {sum, a, b}) tiles.require(tile);
    const int depth = tiles.row_bytes[a] / 4;
    if (tiles.rows[sum] != tiles.rows[a] || tiles.rows[b] != depth || tiles.row_bytes[sum] != tiles.row_bytes[b]) {
        std::abort();
    }
    for (int m = 0; m < tiles.rows[sum]; m++) {
        auto* total = reinterpret_cast<float*>(tiles.data[sum][m]);
        for (int k = 0; k < depth; k++) {
            const auto* x = reinterpret_cast<const uint16_t*>(tiles.data[a][m]) + 2 * k;
            const auto* w = reinterpret_cast<const uint16_t*>(tiles.data[b][k]);
            for (int n = 0; n < tiles.row_bytes[sum] / 4; n++) {
                total[n] += widened(x[0]) * widened(w[2 * n]) + widened(x[1]) * widened(w[2 * n + 1]);
            }
        }
    }
}

}  // namespace meterhouse::emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) meterhouse::emulated::load_config(from)
#define _tile_release() meterhouse::emulated::release()
#define _tile_zero(tile) meterhouse::emulated::zero(tile)
#define _tile_loadd(tile, from, stride) meterhouse::emulated::load_tile(tile, from, stride)
#define _tile_stored(tile, to, stride) meterhouse::emulated::store_tile(tile, to, stride)
#define _tile_dpbf16ps(sum, a, b) meterhouse::emulated::dot_bf16(sum, a, b)
