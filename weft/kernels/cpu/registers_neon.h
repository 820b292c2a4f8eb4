#pragma once
#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <cstring>

// The functions of registers_x86.h in NEON instructions of AArch64. Included by io_vec.h.

namespace weft::kernels::CPU_CAPABILITY {

using Vec = at::vec::Vectorized<float>;
using Reg = float32x4_t;
using IntReg = uint32x4_t;
using ByteReg = uint8x16_t;
using Half16 = uint16x4_t;

inline Half16 load16(const void* p) { return vld1_u16(static_cast<const uint16_t*>(p)); }
inline void store16(void* p, Half16 v) { vst1_u16(static_cast<uint16_t*>(p), v); }
inline Half16 load16(const void* p, int64_t count) {
  Half16 bits = vdup_n_u16(0);
  std::memcpy(&bits, p, static_cast<size_t>(count) * 2);
  return bits;
}
inline void store16(void* p, Half16 v, int64_t count) { std::memcpy(p, &v, static_cast<size_t>(count) * 2); }

inline Reg widen_bf16(Half16 bits) { return vreinterpretq_f32_u32(vshll_n_u16(bits, 16)); }
inline Reg widen_fp16(Half16 bits) { return vcvt_f32_f16(vreinterpret_f16_u16(bits)); }
/// Rounds to nearest even; a NaN stays a NaN.
inline Half16 narrow_bf16(Reg v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, nan), 16);
}
inline Half16 narrow_fp16(Reg v) { return vreinterpret_u16_f16(vcvt_f16_f32(v)); }

inline Vec fraction(const Vec& t) { return t - t.floor(); }
/// p·2^floor(t) for |t| ≤ 126.
inline Vec multiply_exp2(const Vec& p, const Vec& t) {
  const int32x4_t exponent = vaddq_s32(vcvtmq_s32_f32(t), vdupq_n_s32(127));
  return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
}
inline Vec exact_reciprocal(const Vec& d) { return vdivq_f32(vdupq_n_f32(1), d); }
inline Vec approximate_reciprocal(const Vec& d) { return exact_reciprocal(d); }
inline Vec larger(const Vec& a, const Vec& b) { return vmaxq_f32(a, b); }
inline float max_lane(const Vec& v) { return vmaxvq_f32(v); }
inline float sum_lanes(const Vec& v) { return vaddvq_f32(v); }
inline IntReg multiply_high(IntReg x, uint32_t factor) {
  const uint64x2_t low = vmull_n_u32(vget_low_u32(x), factor), high = vmull_n_u32(vget_high_u32(x), factor);
  return vcombine_u32(vshrn_n_u64(low, 32), vshrn_n_u64(high, 32));
}

inline Vec from_bools(const void* aligned) {
  const uint8x8_t bytes = vld1_u8(static_cast<const uint8_t*>(aligned));
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
}

inline uint64_t pack_pairs(ByteReg codes) {
  const uint16x8_t pairs = vreinterpretq_u16_u8(codes);
  return vget_lane_u64(vreinterpret_u64_u8(vmovn_u16(vorrq_u16(pairs, vshrq_n_u16(pairs, 4)))), 0);
}
inline ByteReg unpack_pairs(uint64_t packed) {
  const uint8x8_t bytes = vcreate_u8(packed), low = vand_u8(bytes, vdup_n_u8(15)), high = vshr_n_u8(bytes, 4);
  return vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
}

}  // namespace weft::kernels::CPU_CAPABILITY
