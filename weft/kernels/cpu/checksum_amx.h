#pragma once
#include <immintrin.h>

#include <array>
#include <cstdint>

namespace weft::kernels::CPU_CAPABILITY {

/// 128 bits over every byte of a run of memory and its place in it. Eight lanes of 64 bits; each line adds to a lane
/// the neighbour lane's value, so that one change is never missed, and the product of its own halves under a key that
/// is another one for every line, so that two changes do not cancel.
/// The sums of the parts of a memory add up to that of the whole.
class LineSum {
 public:
  /// To go on with line number `first`.
  explicit LineSum(int64_t first = 0)
      : key_(_mm512_add_epi64(start(), _mm512_set1_epi64(static_cast<int64_t>(kNext * static_cast<uint64_t>(first))))) {
  }

  void add(const char* p, int64_t bytes) {
    for (; bytes >= 64; p += 64, bytes -= 64) line(_mm512_loadu_si512(p));
    if (bytes > 0) line(_mm512_maskz_loadu_epi8((__mmask64{1} << bytes) - 1, p));
  }
  void add(const LineSum& part) { sum_ = _mm512_add_epi64(sum_, part.sum_); }
  std::array<uint64_t, 2> finish() const {
    std::array<uint64_t, 2> out{};
    alignas(64) uint64_t lanes[8];
    _mm512_store_si512(lanes, sum_);
    for (int i = 0; i < 8; ++i) {
      uint64_t& half = out[i & 1];
      half = (half ^ lanes[i]) * 0x9e3779b97f4a7c15ULL;
      half ^= half >> 29;
    }
    return out;
  }

  [[gnu::always_inline]] void line(__m512i data) {
    const __m512i keyed = _mm512_xor_si512(data, key_);
    sum_ = _mm512_add_epi64(sum_, _mm512_shuffle_epi32(data, _MM_PERM_BADC));
    sum_ = _mm512_add_epi64(sum_, _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32)));
    key_ = _mm512_add_epi64(key_, _mm512_set1_epi64(static_cast<int64_t>(kNext)));
  }

 private:
  static constexpr uint64_t kNext = 0x6a09e667f3bcc909ULL;
  static __m512i start() {
    return _mm512_set_epi64(0x243185be4ee4b28cLL, 0x550c7dc3d5ffb4e2LL, 0x72be5d74f27b896fLL, 0x0fc19dc68b8cd5b5LL,
                            0x240ca1cc77ac9c65LL, 0x2de92c6f592b0275LL, 0x4a7484aa6ea6e483LL, 0x5cb0a9dcbd41fbd4LL);
  }
  __m512i sum_ = _mm512_setzero_si512(), key_;
};

}  // namespace weft::kernels::CPU_CAPABILITY
