#include "benchmarks/driver/anchor.h"

#include <ATen/cpu/Utils.h>
#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "benchmarks/driver/clock.h"

namespace bench {
namespace {

constexpr int kTileSteps = 70'000, kPlainSteps = 400'000;

/// Values of magnitude [1, 2) with random mantissas, as bfloat16 bits. Zeros would draw less power and run faster.
std::vector<uint16_t> random_tile() {
  std::minstd_rand rng(1);  // NOLINT(bugprone-random-generator-seed): the same load in each run
  std::vector<uint16_t> bits(512);
  for (auto& value : bits) value = static_cast<uint16_t>(0x3f80 | (rng() & 0x7f) | ((rng() & 1) << 15));
  return bits;
}

struct alignas(64) TileConfigData {
  uint8_t palette = 1, start_row = 0;
  std::array<uint8_t, 14> reserved{};
  std::array<uint16_t, 16> bytes{64, 64, 64, 64, 64, 64, 64, 64};
  std::array<uint8_t, 16> rows{16, 16, 16, 16, 16, 16, 16, 16};
};

__attribute__((target("amx-tile,amx-bf16"))) void tile_products() {
  static const TileConfigData config;
  static const auto data = random_tile();
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, data.data(), 64);
  _tile_loadd(5, data.data(), 64);
  _tile_loadd(6, data.data(), 64);
  _tile_loadd(7, data.data(), 64);
  for (int i = 0; i < kTileSteps; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

void multiply_adds() {
  static const auto data = random_tile();
  std::array<float, 64> sums{};
  for (int i = 0; i < kPlainSteps; ++i)
    for (size_t j = 0; j < sums.size(); ++j) sums[j] = sums[j] * 0.5F + static_cast<float>(data[(i + j) % 512]);
  volatile float kept = sums[0];
  static_cast<void>(kept);
}

}  // namespace

double compute_rate() {
  static const bool tiles = at::cpu::init_amx();
  const auto start = now(/*threads=*/1);
  if (tiles) {
    tile_products();
  } else {
    multiply_adds();
  }
  return 1 / (now(1) - start);
}

double copy_rate() {
  constexpr size_t kBytes = 8 << 20;
  static const std::vector<char> from(kBytes, 'x');
  static std::vector<char> to(kBytes);
  const auto start = now(/*threads=*/1);
  std::memcpy(to.data(), from.data(), kBytes);
  return 1 / (now(1) - start);
}

}  // namespace bench
