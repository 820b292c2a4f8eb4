#pragma once
#include <algorithm>
#include <cstring>

#include "weft/kernels/cpu/io_vec.h"
#include "weft/kernels/cpu/loops.h"

namespace weft::kernels::CPU_CAPABILITY {

/// Rotates pairs (i, i + pairs).
template <class T>
void rotate_halves(const T* x, T* y, const float* cos, const float* sin, int64_t pairs, const Vec& sign) {
  for_each_vector(pairs, [&](int64_t i, auto count) {
    const Vec a = read(x + i, count), b = read(x + pairs + i, count);
    const Vec c = read(cos + i, count), s = read(sin + i, count) * sign;
    write(y + i, a * c - b * s, count);
    write(y + pairs + i, b * c + a * s, count);
  });
}

/// Rotates pairs (2i, 2i+1).
template <class T>
void rotate_interleaved(const T* x, T* y, const float* cos, const float* sin, int64_t pairs, const Vec& sign) {
  for_each_vector(pairs, [&](int64_t i, auto count) {
    const int64_t values = 2 * count, lower = std::min<int64_t>(values, kVecSize), upper = values - lower;
    const Vec first = read(x + 2 * i, lower), second = upper > 0 ? read(x + 2 * i + lower, upper) : Vec(0.F);
    const auto [a, b] = at::vec::deinterleave2(first, second);
    const Vec c = read(cos + i, count), s = read(sin + i, count) * sign;
    const auto [low, high] = at::vec::interleave2<float>(a * c - b * s, b * c + a * s);
    write(y + 2 * i, low, lower);
    if (upper > 0) write(y + 2 * i + lower, high, upper);
  });
}

template <class T>
void rotary_typed(const RotaryCall& call, int64_t begin, int64_t end) {
  const auto& h = call.heads;
  const Vec sign(call.sign);
  for (int64_t row = begin; row < end; ++row) {
    const auto position = row / call.rows_per_position % call.positions;
    const float *cos = call.cos + position * h.pairs(), *sin = call.sin + position * h.pairs();
    const T* x = static_cast<const T*>(call.x) + row * h.width();
    T* y = static_cast<T*>(call.out) + row * h.width();
    const auto copy = [&](int64_t count) { std::memcpy(y, x, static_cast<size_t>(count) * sizeof(T)); };
    const auto advance = [&](int64_t count) { x += count, y += count; };
    for (int64_t block = 0; block < h.blocks; ++block) {
      for (int64_t head = 0; head < h.rotated; ++head) {
        if (h.interleaved)
          rotate_interleaved(x, y, cos, sin, h.pairs(), sign);
        else
          rotate_halves(x, y, cos, sin, h.pairs(), sign);
        advance(h.rotary_dim);
        copy(h.head_dim - h.rotary_dim);
        advance(h.head_dim - h.rotary_dim);
      }
      copy(h.kept * h.head_dim);
      advance(h.kept * h.head_dim);
    }
  }
}

static void rotary(const RotaryCall& call, int64_t begin, int64_t end) {
  with_dtype(call.dtype, [&](auto t) { rotary_typed<decltype(t)>(call, begin, end); });
}

const RotaryLoop rotary_loop = rotary;

}  // namespace weft::kernels::CPU_CAPABILITY
