#pragma once
#include <array>
#include <cstdint>

#include "weft/core/fields.h"

// Number formats of quantized tensors.

namespace weft {

/// Formats of quantized values: sign, exponent and mantissa bits as in the name. E2M1 codes are stored two per byte,
/// the first one in the low half.
enum class Format { e4m3, e5m2, e2m1 };
template <>
struct EnumNames<Format> {
  static constexpr std::array<const char*, 3> list = {"e4m3", "e5m2", "e2m1"};
};

struct FormatTraits {
  int mantissa_bits, bias, sign_bit;  // sign_bit: its position in a code
  float max;                          // largest finite value
  int nan;                            // the code that NaN becomes; E2M1 has no NaN, and takes its largest value
};
constexpr FormatTraits traits_of(Format format) {
  if (format == Format::e4m3) return {3, 7, 7, 448.F, 0x7f};
  if (format == Format::e5m2) return {2, 15, 7, 57344.F, 0x7f};
  return {1, 1, 3, 6.F, 0x7};
}

/// Formats of the scales of blocks. `e8m0`: powers of two, code c for 2^(c-127), 255 for NaN. `e4m3`: on top of a
/// float32 scale of the whole tensor.
enum class ScaleFormat { float32, e8m0, e4m3 };
template <>
struct EnumNames<ScaleFormat> {
  static constexpr std::array<const char*, 3> list = {"float32", "e8m0", "e4m3"};
};

}  // namespace weft
