#pragma once
#include <immintrin.h>

#include <cstdint>

// AMX tiles: eight registers of 16 rows x 64 bytes. Included by *_amx.cpp only.

namespace weft::kernels::CPU_CAPABILITY {

using Bf16 = uint16_t;

constexpr int kTileElems = 512;    // bfloat16 values in a tile: 16 rows of 32
constexpr int kKStep = 32;         // what one tile product takes off the reduction
constexpr int kBlockDim = 32;      // rows or columns of the product that two tiles cover
constexpr int kBlockElems = 1024;  // float32 values of a 32 x 32 square of the product: four tiles of 16 x 16

/// All eight tiles at full size while it lives; one per thread. Smaller operands are padded with zeros.
class TileConfig {
 public:
  TileConfig() { load(); }
  ~TileConfig() { _tile_release(); }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;

  /// Once more, after somebody else has used tiles.
  static void load() {
    static const Data data = [] {
      Data full{};
      full.palette = 1;
      for (int i = 0; i < 8; ++i) {
        full.bytes[i] = 64;
        full.rows[i] = 16;
      }
      return full;
    }();
    _tile_loadconfig(&data);
  }

 private:
  struct alignas(64) Data {
    uint8_t palette, start;
    uint8_t reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
};

/// Keeps the compiler from moving plain loads and stores across tile instructions, which it does not see as such.
inline void tile_fence() { asm volatile("" ::: "memory"); }

/// Tiles 0 to 3 += A B for one step; an operand that is not to stay in L1 is loaded past it.
template <bool kKeepA, bool kKeepB>
[[gnu::always_inline]] inline void microkernel_step(const Bf16* a, const Bf16* b) {
  if constexpr (kKeepB)
    _tile_loadd(6, b, 64);
  else
    _tile_stream_loadd(6, b, 64);
  if constexpr (kKeepA)
    _tile_loadd(4, a, 64);
  else
    _tile_stream_loadd(4, a, 64);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kKeepB)
    _tile_loadd(7, b + kTileElems, 64);
  else
    _tile_stream_loadd(7, b + kTileElems, 64);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kKeepA)
    _tile_loadd(5, a + kTileElems, 64);
  else
    _tile_stream_loadd(5, a + kTileElems, 64);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

/// C (+)= A B for one 32 x 32 square over `steps` steps. A and B are panels of packed tiles, two tiles a step. The
/// operand that the caller walks along (`kStreamedIsA`: A) is used again at once, so its first `kL1Steps` steps stay in
/// L1; everything else is loaded past it. `per_step(step)` runs under the products of each step.
template <bool kStreamedIsA, class PerStep>
[[gnu::always_inline]] inline void gemm_microkernel(const Bf16* a, const Bf16* b, int steps, float* c, bool accumulate,
                                                    PerStep&& per_step) {
  constexpr int kL1Steps = 18;
  if (accumulate) {
    _tile_stream_loadd(0, c, 64);
    _tile_stream_loadd(1, c + 256, 64);
    _tile_stream_loadd(2, c + 512, 64);
    _tile_stream_loadd(3, c + 768, 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  int i = 0;
  for (const int l1_steps = steps < kL1Steps ? steps : kL1Steps; i < l1_steps;
       ++i, a += 2 * kTileElems, b += 2 * kTileElems) {
    microkernel_step<kStreamedIsA, !kStreamedIsA>(a, b);
    per_step(i);
  }
  for (; i < steps; ++i, a += 2 * kTileElems, b += 2 * kTileElems) {
    microkernel_step<false, false>(a, b);
    per_step(i);
  }
  _tile_stored(0, c, 64);
  _tile_stored(1, c + 256, 64);
  _tile_stored(2, c + 512, 64);
  _tile_stored(3, c + 768, 64);
}

}  // namespace weft::kernels::CPU_CAPABILITY
