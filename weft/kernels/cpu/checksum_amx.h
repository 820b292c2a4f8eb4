#pragma once
#include <immintrin.h>

#include <cstdint>

namespace weft::kernels::CPU_CAPABILITY {

/// 128 bits over every byte of a run of memory and its place in it. Eight lanes of 64 bits; each line adds to a lane
/// the neighbour lane's value, so that one change is never missed, and the product of its own halves under a key that
/// is another one for every line, so that two changes do not cancel.
class LineSum {
 public:
  void add(const char* p, int64_t bytes) {
    for (; bytes >= 64; p += 64, bytes -= 64) line(_mm512_loadu_si512(p));
    if (bytes > 0) line(_mm512_maskz_loadu_epi8((__mmask64{1} << bytes) - 1, p));
  }
  void finish(uint64_t out[2]) {
    alignas(64) uint64_t lanes[8];
    _mm512_store_si512(lanes, sum_);
    for (int i = 0; i < 8; ++i) {
      uint64_t& half = out[i & 1];
      half = (half ^ lanes[i]) * 0x9e3779b97f4a7c15ULL;
      half ^= half >> 29;
    }
  }

 private:
  void line(__m512i data) {
    const __m512i keyed = _mm512_xor_si512(data, key_);
    sum_ = _mm512_add_epi64(sum_, _mm512_shuffle_epi32(data, _MM_PERM_BADC));
    sum_ = _mm512_add_epi64(sum_, _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32)));
    key_ = _mm512_add_epi64(key_, _mm512_set1_epi64(0x6a09e667f3bcc909LL));
  }

  __m512i sum_ =
      _mm512_set_epi64(0x3c6ef372fe94f82bLL, 0x510e527fade682d1LL, 0x1f83d9abfb41bd6bLL, 0x5be0cd19137e2179LL,
                       0x428a2f98d728ae22LL, 0x7137449123ef65cdLL, 0x59f111f1b605d019LL, 0x12835b0145706fbeLL);
  __m512i key_ =
      _mm512_set_epi64(0x243185be4ee4b28cLL, 0x550c7dc3d5ffb4e2LL, 0x72be5d74f27b896fLL, 0x0fc19dc68b8cd5b5LL,
                       0x240ca1cc77ac9c65LL, 0x2de92c6f592b0275LL, 0x4a7484aa6ea6e483LL, 0x5cb0a9dcbd41fbd4LL);
};

}  // namespace weft::kernels::CPU_CAPABILITY
