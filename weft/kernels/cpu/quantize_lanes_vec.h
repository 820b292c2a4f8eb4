#pragma once
#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/quantize.h"
#include "weft/kernels/quantize_math.h"

// Vectors of 16 lanes, whatever the instruction set: one register of AVX-512, two of AVX2.

namespace weft::kernels {

constexpr int64_t kLanes = 16;
using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Bytes = uint8_t __attribute__((vector_size(16)));

template <>
struct IntsOf<Floats> {
  using type = Ints;
};

}  // namespace weft::kernels

namespace weft::kernels::CPU_CAPABILITY {

#ifndef CPU_CAPABILITY_AVX512
struct FloatHalves {
  __m256 low, high;
};
struct IntHalves {
  __m256i low, high;
};
#endif

// ---- Lanes -------------------------------------------------------------------------------------------------------

/// The first `count` (1 to 16) elements as floats; the other lanes are 0.
template <class T>
WEFT_INLINE Floats load(const T* p, int64_t count) {
#ifdef CPU_CAPABILITY_AVX512
  return std::bit_cast<Floats>(Reg(read(p, count)));
#else
  const Vec low = read(p, std::min(count, kVecSize)), high = count > kVecSize ? read(p + 8, count - 8) : Vec(0.F);
  return std::bit_cast<Floats>(FloatHalves{Reg(low), Reg(high)});
#endif
}
template <class T>
WEFT_INLINE void store(T* p, Floats x, int64_t count) {
#ifdef CPU_CAPABILITY_AVX512
  write(p, Vec(std::bit_cast<Reg>(x)), count);
#else
  const auto halves = std::bit_cast<FloatHalves>(x);
  write(p, Vec(halves.low), std::min(count, kVecSize));
  if (count > kVecSize) write(p + 8, Vec(halves.high), count - 8);
#endif
}

/// The largest lane; no lane is NaN.
WEFT_INLINE float max_lane(Floats x) {
#ifdef CPU_CAPABILITY_AVX512
  return _mm512_reduce_max_ps(std::bit_cast<__m512>(x));
#else
  const auto halves = std::bit_cast<FloatHalves>(x);
  const __m256 v = _mm256_max_ps(halves.low, halves.high);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
#endif
}

/// Round to nearest even to bfloat16.
WEFT_INLINE Floats round_bf16(Floats x) {
  const Ints bits = bits_of(x), rounded = (bits + (((bits >> 16) & 1) + 0x7fff)) & ~0xffff;
  return from_bits<Floats>((bits & kMagnitudeBits) > kInfinityBits ? bits | 0x400000 : rounded);
}

WEFT_INLINE Bytes to_bytes(Ints codes) { return __builtin_convertvector(codes, Bytes); }
WEFT_INLINE Ints to_ints(Bytes codes) { return __builtin_convertvector(codes, Ints); }

/// Two codes per byte, the first one in the low half: 8 bytes.
WEFT_INLINE uint64_t pack_pairs(Bytes codes) {
  const __m128i pairs = _mm_maddubs_epi16(std::bit_cast<__m128i>(codes), _mm_set1_epi16(0x1001));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(pairs, pairs)));
}
WEFT_INLINE Bytes unpack_pairs(uint64_t packed) {
  const __m128i bytes = _mm_cvtsi64_si128(static_cast<int64_t>(packed));
  const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
  return std::bit_cast<Bytes>(_mm_unpacklo_epi8(low, high));
}

/// Copies `size` bytes, mostly `kFull`: that is one instruction.
template <size_t kFull>
WEFT_INLINE void copy_bytes(void* to, const void* from, int64_t size) {
  if (size == kFull) [[likely]] {
    std::memcpy(to, from, kFull);
  } else {
    std::memcpy(to, from, static_cast<size_t>(size));
  }
}

/// Stores `count` codes.
template <Format kCodes>
WEFT_INLINE void store_codes(Bytes codes, uint8_t* to, int64_t count) {
  if constexpr (kCodes == Format::e2m1) {
    const auto packed = pack_pairs(codes);
    copy_bytes<8>(to, &packed, (count + 1) / 2);
  } else {
    copy_bytes<16>(to, &codes, count);
  }
}
template <Format kCodes>
WEFT_INLINE Ints load_codes(const uint8_t* from, int64_t count) {
  if constexpr (kCodes == Format::e2m1) {
    uint64_t packed = 0;
    copy_bytes<8>(&packed, from, (count + 1) / 2);
    return to_ints(unpack_pairs(packed));
  } else {
    Bytes codes = {};
    copy_bytes<16>(&codes, from, count);
    return to_ints(codes);
  }
}
/// Offset in bytes of a code in its row.
template <Format kCodes>
constexpr int64_t code_offset(int64_t column) {
  return kCodes == Format::e2m1 ? column / 2 : column;
}

/// Transposes 16 × 16 bytes in place.
inline void transpose_bytes(Bytes* rows) {
  auto* const r = reinterpret_cast<__m128i*>(rows);
  for (int stage = 0; stage < 4; ++stage) {  // each interleaves rows i and i + 8
    __m128i next[16];
    for (int i = 0; i < 8; ++i) {
      next[2 * i] = _mm_unpacklo_epi8(r[i], r[i + 8]);
      next[2 * i + 1] = _mm_unpackhi_epi8(r[i], r[i + 8]);
    }
    std::memcpy(r, next, sizeof next);
  }
}

// ---- Hadamard transform, random numbers ----------------------------------------------------------------------------

/// y = x diag(s) H/4 over the 16 values of each lane, rounded to bfloat16.
WEFT_INLINE void hadamard_16(Floats* values) {
  hadamard_sums(values);
  for (int i = 0; i < 16; ++i) values[i] = round_bf16(values[i] * 0.25F);
}

/// The high halves of 32-bit products.
WEFT_INLINE Words multiply_high(Words a, uint32_t b) {
#ifdef CPU_CAPABILITY_AVX512
  const __m512i x = std::bit_cast<__m512i>(a), y = _mm512_set1_epi64(b);
  const __m512i even = _mm512_mul_epu32(x, y), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), y);
  return std::bit_cast<Words>(_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd));
#else
  const auto halves = std::bit_cast<IntHalves>(a);
  const __m256i y = _mm256_set1_epi64x(b);
  const auto high = [y](__m256i x) {
    const __m256i even = _mm256_mul_epu32(x, y), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
    return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  };
  return std::bit_cast<Words>(IntHalves{high(halves.low), high(halves.high)});
#endif
}

/// Eight uniform numbers per lane, of 16 bits each: those of Philox4x32-10 with counter (position of the lane, row,
/// offset), in order from the low half of the first word.
class Uniforms {
 public:
  static constexpr int64_t kNumbers = 8 * kLanes;

  WEFT_INLINE void draw(const RandomStream& random, bool columnwise, Words position, uint32_t row) {
    Words c0 = position, c1 = Words{} + row, c2 = Words{} + static_cast<uint32_t>(random.offset);
    Words c3 = Words{} + (static_cast<uint32_t>(random.offset >> 32) | (columnwise ? 1U << 31 : 0));
    uint32_t k0 = static_cast<uint32_t>(random.seed), k1 = static_cast<uint32_t>(random.seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9e3779b9, k1 += 0xbb67ae85) {
      const Words high0 = multiply_high(c0, 0xd2511f53), low0 = c0 * 0xd2511f53;
      const Words high1 = multiply_high(c2, 0xcd9e8d57), low1 = c2 * 0xcd9e8d57;
      c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    }
    words_[0] = c0, words_[1] = c1, words_[2] = c2, words_[3] = c3;
  }
  /// Number i of each lane, centred in its interval of [0, 1).
  WEFT_INLINE Floats operator[](int64_t i) const {
    const Words half = (words_[i / 2] >> (i % 2 * 16)) & 0xffff;
    return (to_float<Floats>(std::bit_cast<Ints>(half)) + 0.5F) * power_of_two(-16);
  }

 private:
  Words words_[4];
};

}  // namespace weft::kernels::CPU_CAPABILITY
