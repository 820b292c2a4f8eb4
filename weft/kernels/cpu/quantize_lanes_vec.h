#pragma once
#include <algorithm>
#include <bit>
#include <cstring>

#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/quantize.h"
#include "weft/kernels/quantize_math.h"

// Vectors of 16 lanes, whatever the instruction set: one register of AVX-512, two of AVX2, four of NEON.

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

/// The registers that hold kLanes lanes.
constexpr int64_t kRegisters = kLanes / kVecSize;
struct FloatRegisters {
  Reg r[kRegisters];
};
struct IntRegisters {
  IntReg r[kRegisters];
};

// ---- Lanes -------------------------------------------------------------------------------------------------------

template <class T>
WEFT_INLINE Floats load_all(const T* p) {
  FloatRegisters x;
  for (int64_t i = 0; i < kRegisters; ++i) x.r[i] = read(p + i * kVecSize);
  return std::bit_cast<Floats>(x);
}
template <class T>
WEFT_INLINE void store_all(T* p, Floats values) {
  const auto x = std::bit_cast<FloatRegisters>(values);
  for (int64_t i = 0; i < kRegisters; ++i) write(p + i * kVecSize, Vec(x.r[i]));
}

/// The first `count` (1 to 16) elements as floats; the other lanes are 0.
template <class T>
WEFT_INLINE Floats load(const T* p, int64_t count) {
  if (count == kLanes) [[likely]]
    return load_all(p);
  if constexpr (kRegisters == 1) {
    return std::bit_cast<Floats>(FloatRegisters{{read(p, count)}});
  } else {
    T padded[kLanes] = {};
    std::copy_n(p, count, padded);
    return load_all(padded);
  }
}
template <class T>
WEFT_INLINE void store(T* p, Floats values, int64_t count) {
  if (count == kLanes) [[likely]]
    return store_all(p, values);
  if constexpr (kRegisters == 1) {
    write(p, Vec(std::bit_cast<FloatRegisters>(values).r[0]), count);
  } else {
    T padded[kLanes];
    store_all(padded, values);
    std::copy_n(padded, count, p);
  }
}

/// The largest lane; no lane is NaN.
WEFT_INLINE float max_lane(Floats values) {
  const auto x = std::bit_cast<FloatRegisters>(values);
  Vec largest = x.r[0];
  for (int64_t i = 1; i < kRegisters; ++i) largest = larger(largest, x.r[i]);
  return max_lane(largest);
}

/// Round to nearest even to bfloat16.
WEFT_INLINE Floats round_bf16(Floats x) {
  const Ints bits = bits_of(x), rounded = (bits + (((bits >> 16) & 1) + 0x7fff)) & ~0xffff;
  return from_bits<Floats>((bits & kMagnitudeBits) > kInfinityBits ? bits | 0x400000 : rounded);
}

WEFT_INLINE Bytes to_bytes(Ints codes) { return __builtin_convertvector(codes, Bytes); }
WEFT_INLINE Ints to_ints(Bytes codes) { return __builtin_convertvector(codes, Ints); }

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
    const auto packed = pack_pairs(std::bit_cast<ByteReg>(codes));
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
    return to_ints(std::bit_cast<Bytes>(unpack_pairs(packed)));
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
  for (int stage = 0; stage < 4; ++stage) {  // each interleaves rows i and i + 8
    Bytes next[16];
    for (int i = 0; i < 8; ++i) {
      const Bytes a = rows[i], b = rows[i + 8];
      next[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    std::memcpy(rows, next, sizeof next);
  }
}

// ---- Hadamard transform, random numbers ----------------------------------------------------------------------------

/// y = x diag(s) H/4 over the 16 values of each lane, rounded to bfloat16.
WEFT_INLINE void hadamard_16(Floats* values) {
  hadamard_sums(values);
  for (int i = 0; i < 16; ++i) values[i] = round_bf16(values[i] * 0.25F);
}

/// The high halves of 32-bit products.
WEFT_INLINE Words multiply_high(Words words, uint32_t factor) {
  auto x = std::bit_cast<IntRegisters>(words);
  for (auto& part : x.r) part = multiply_high(part, factor);
  return std::bit_cast<Words>(x);
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
