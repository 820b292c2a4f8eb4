#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

// The AMX and AVX512-BF16 instructions that *_amx.cpp uses, in AVX-512 instructions: the same bits, about a hundredth
// of the speed. Only in builds with WEFT_EMULATE_AMX, to test the AMX kernels on other CPUs.

namespace weft::kernels::CPU_CAPABILITY::emulated {

/// This thread's tiles. As on the CPU, an instruction on tiles that are not configured is invalid.
class Tiles {
 public:
  void configure(const void* config) { configured_ = *static_cast<const uint8_t*>(config) == 1; }
  void release() {
    configured_ = false;
    std::memset(tiles_, 0xff, sizeof tiles_);  // NaN
  }
  void zero(int t) { std::memset(tile(t), 0, kTileBytes); }
  void load(int t, const void* from, int64_t stride) {
    for (int row = 0; row < 16; ++row)
      std::memcpy(tile(t) + row * 64, static_cast<const char*>(from) + row * stride, 64);
  }
  void store(int t, void* to, int64_t stride) {
    for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, tile(t) + row * 64, 64);
  }
  /// c += a b. Sums the even and the odd elements of K separately, with subnormal numbers as zero.
  [[gnu::optimize("O2"), gnu::no_sanitize("address", "undefined")]] void dpbf16ps(int c, int a, int b) {
    const auto csr = _mm_getcsr();
    _mm_setcsr(_MM_MASK_MASK | _MM_FLUSH_ZERO_ON | 0x40 /* denormals are zero */);
    const auto high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    for (int row = 0; row < 16; ++row) {
      auto even = _mm512_setzero_ps(), odd = even;
      for (int k = 0; k < 16; ++k) {
        int32_t pair = 0;
        std::memcpy(&pair, tile(a) + row * 64 + k * 4, 4);
        const auto x = _mm512_set1_epi32(pair), y = _mm512_loadu_si512(tile(b) + k * 64);
        even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                               _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), even);
        odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, high)),
                              _mm512_castsi512_ps(_mm512_and_si512(y, high)), odd);
      }
      auto* const sum = reinterpret_cast<float*>(tile(c) + row * 64);
      _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), _mm512_add_ps(even, odd)));
    }
    _mm_setcsr(csr);
  }

 private:
  static constexpr int kTileBytes = 1024;
  char* tile(int t) {
    if (!configured_) __builtin_trap();
    return tiles_[t];
  }

  alignas(64) char tiles_[8][kTileBytes];
  bool configured_ = false;
};
inline thread_local Tiles tiles;

/// Float32 to bfloat16, rounded to nearest even; subnormal numbers become zero, NaN stays NaN.
inline __m256i to_bf16(__m512 v) {
  const auto bits = _mm512_castps_si512(v);
  const auto lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  auto out = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff))), 16);
  const auto subnormal = _mm512_fpclass_ps_mask(v, 0x20), nan = _mm512_fpclass_ps_mask(v, 0x81);
  out = _mm512_mask_and_epi32(out, subnormal, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x8000));
  out = _mm512_mask_or_epi32(out, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(out);
}
inline __m512i to_bf16(__m512 high, __m512 low) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(to_bf16(low)), to_bf16(high), 1);
}

}  // namespace weft::kernels::CPU_CAPABILITY::emulated

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated::tiles.configure(config)
#define _tile_release() emulated::tiles.release()
#define _tile_zero(t) emulated::tiles.zero(t)
#define _tile_loadd(t, from, stride) emulated::tiles.load(t, from, stride)
#define _tile_stream_loadd(t, from, stride) emulated::tiles.load(t, from, stride)
#define _tile_stored(t, to, stride) emulated::tiles.store(t, to, stride)
#define _tile_dpbf16ps(c, a, b) emulated::tiles.dpbf16ps(c, a, b)
#define _mm512_cvtneps_pbh(v) emulated::to_bf16(v)
#define _mm512_cvtne2ps_pbh(high, low) emulated::to_bf16(high, low)
