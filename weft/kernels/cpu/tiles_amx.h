#pragma once
#include <immintrin.h>

#include <cstdint>

#include "weft/kernels/cpu/blocking.h"
#ifdef WEFT_EMULATE_AMX
#include "weft/kernels/cpu/emulated_amx.h"
#endif

// AMX tiles: eight registers of 16 rows × 64 bytes. Included by *_amx.cpp only.

namespace weft::kernels::CPU_CAPABILITY {

using Bf16 = uint16_t;

constexpr int kRightTile = 256;   // elements from columns 0 to 15 of a row of an accumulator block to columns 16 to 31
constexpr int kLowerTiles = 512;  // elements from rows 0 to 15 of an accumulator block to rows 16 to 31

/// Columns 0 to 15 of a row of an accumulator block.
template <class T>
T* block_row(T* block, int64_t row) {
  return block + row / 16 * kLowerTiles + row % 16 * 16;
}

/// Configures all eight tiles at full size for this thread in its scope. Smaller operands are padded with zeros.
class TileConfig {
 public:
  TileConfig() { load(); }
  ~TileConfig() { _tile_release(); }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;

  /// Restores the configuration after other code has used AMX.
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

/// Keeps the compiler from moving loads and stores across tile intrinsics, whose memory accesses it does not see.
inline void tile_fence() { asm volatile("" ::: "memory"); }

/// Tiles 0 to 3 += A B for one k-step. An operand stays in L1 if `kKeepA` (`kKeepB`); otherwise its loads use the T1
/// hint.
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

[[gnu::always_inline]] inline void zero_accumulators() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
[[gnu::always_inline]] inline void store_accumulators(float* c) {
  _tile_stored(0, c, 64);
  _tile_stored(1, c + 256, 64);
  _tile_stored(2, c + 512, 64);
  _tile_stored(3, c + 768, 64);
}

/// C (+)= A B for one accumulator block over `steps` k-steps. A and B are packed panels, two tiles per k-step. The next
/// call reads the same streamed panel (A if `kStreamedIsA`), so its first `kL1Steps` k-steps stay in L1; other loads
/// use the T1 hint. `per_step(step)` overlaps with the tile multiplications of each k-step.
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
    zero_accumulators();
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
  store_accumulators(c);
}

}  // namespace weft::kernels::CPU_CAPABILITY
