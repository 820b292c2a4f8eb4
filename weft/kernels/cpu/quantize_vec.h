#pragma once
#include "weft/kernels/cpu/quantize_lanes_vec.h"
#include "weft/kernels/cpu/quantize_loops.h"

namespace weft::kernels::CPU_CAPABILITY {

// ---- Scales --------------------------------------------------------------------------------------------------------

/// The scale of a block, or of one block per lane.
template <class F>
struct BlockScale {
  F factor = F{};                                              // of the values
  F inverse = F{};                                             // float32 scales
  typename IntsOf<F>::type code = typename IntsOf<F>::type{};  // of other scales
};

/// From the maximum magnitude of a block.
template <Format kCodes, ScaleFormat kScales, class F>
WEFT_INLINE BlockScale<F> block_scale(const QuantizeCall& c, F amax, const TwoLevelScale& tensor) {
  constexpr float max = traits_of(kCodes).max;
  if constexpr (kScales == ScaleFormat::float32) {
    const F scale = float32_scale(amax, max, c.how.epsilon, c.scale_limit, c.how.power_of_two);
    return {.factor = scale, .inverse = splat<F>(1) / scale};
  } else if constexpr (kScales == ScaleFormat::e8m0) {
    const auto code = e8m0_scale(amax, 1.F / max);
    return {.factor = e8m0_factor<F>(code), .code = code};
  } else {
    const auto code = e4m3_scale(amax, splat<F>(tensor.sixth));
    return {.factor = e4m3_factor(decode<Format::e4m3, F>(code), splat<F>(tensor.inverse)), .code = code};
  }
}

/// The error of one row of 16 values with the factor and the E4M3 scale of a candidate.
inline float candidate_error(const QuantizeCall& c, const float* values, int64_t count, float factor, float scale,
                             float amax) {
  float error = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float code_value = decode<Format::e2m1, float>(encode<Format::e2m1>(values[i] * factor));
    const float d = code_value * scale * amax / (6 * c.how.scale_bound) - values[i];
    error += c.how.four_over_six == FourOverSix::squared ? d * d : std::fabs(d);
  }
  return error;
}

/// The better of the scales that map the largest value of a block to 6 and to 4. `values`: rows of 16, up to 16 rows.
inline BlockScale<float> four_over_six_scale(const QuantizeCall& c, const float* values, int64_t rows, int64_t count,
                                             float block_amax, float amax, const TwoLevelScale& tensor) {
  const float base = block_amax / 6 * tensor.scale;
  BlockScale<float> best{};
  float least = 0;
  for (const bool to_four : {false, true}) {
    const auto code = encode<Format::e4m3>(std::min(to_four ? 1.5F * base : base, 448.F));
    const float scale = decode<Format::e4m3, float>(code), factor = e4m3_factor(scale, tensor.inverse);
    float errors[16] = {};
    for (int64_t row = 0; row < rows; ++row)
      errors[row] = candidate_error(c, values + row * kLanes, count, factor, scale, amax);
    if (rows > 1)
      for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) errors[i] += errors[i + half];
    if (!to_four || errors[0] < least) best = {factor, 0, code}, least = errors[0];
  }
  return best;
}

// ---- Regions -------------------------------------------------------------------------------------------------------

template <Format kCodes, ScaleFormat kScales, class T>
class RegionQuantizer {
 public:
  RegionQuantizer(const QuantizeCall& call, int64_t row, int64_t column)
      : c_(call),
        row_(row),
        column_(column),
        rows_(std::min(call.region_rows, call.rows - row)),
        columns_(std::min(call.region_columns, call.columns - column)) {}

  void run() {
    if (c_.how.two_dimensional || c_.how.block == 0) return quantize_tiles();
    if (c_.rowwise.data) quantize_rows();
    if (c_.columnwise.data) quantize_columns();
  }

 private:
  static constexpr bool kTwoLevel = kScales == ScaleFormat::e4m3;

  const T* at(int64_t row, int64_t column) const { return static_cast<const T*>(c_.x) + row * c_.columns + column; }
  TwoLevelScale tensor_scale(const CopyPointers& to, int64_t row) const {
    if constexpr (!kTwoLevel) return {};
    return TwoLevelScale::of(amax_of(to, row), c_.how.scale_bound);
  }
  float amax_of(const CopyPointers& to, int64_t row) const { return to.amax[c_.how.row_scaled ? row : 0]; }
  bool four_over_six() const { return kTwoLevel && c_.how.four_over_six != FourOverSix::none; }
  WEFT_INLINE Ints encode_values(Floats values, Floats factor, const Uniforms& uniforms, int64_t i) const {
    if constexpr (kCodes == Format::e2m1)
      if (c_.how.stochastic_rounding) return encode_stochastic(values * factor, uniforms[i]);
    return encode<kCodes>(values * factor);
  }
  static void store_scale(const CopyPointers& to, int64_t index, float inverse, int32_t code) {
    if constexpr (kScales == ScaleFormat::float32) {
      to.float32_scales[index] = inverse;
    } else {
      to.scale_codes[index] = static_cast<uint8_t>(code);
    }
  }

  // ---- blocks along rows ----

  void quantize_rows() {
    auto tensor = tensor_scale(c_.rowwise, 0);
    Uniforms uniforms;
    for (int64_t row = row_; row < row_ + rows_; ++row) {
      if (c_.how.row_scaled) tensor = tensor_scale(c_.rowwise, row);
      auto index = row * c_.rowwise.scales_ld + column_ / c_.how.block;  // of the scale
      for (int64_t column = column_; column < column_ + columns_; column += c_.how.block) {
        if (c_.how.stochastic_rounding && column % Uniforms::kNumbers == 0)
          uniforms.draw(c_.random, /*columnwise=*/false, lane_positions(column / 8), static_cast<uint32_t>(row));
        quantize_row_block(row, column, index++, tensor, uniforms);
      }
    }
  }
  void quantize_row_block(int64_t row, int64_t column, int64_t index, const TwoLevelScale& tensor,
                          const Uniforms& uniforms) {
    const auto& to = c_.rowwise;
    const auto count = std::min(c_.how.block, column_ + columns_ - column);
    Floats values[8], largest = {};
    for (int64_t i = 0; i * kLanes < count; ++i) {
      values[i] = load(at(row, column + i * kLanes), std::min(kLanes, count - i * kLanes));
      largest = max_magnitude(largest, values[i]);
    }
    const float amax = max_lane(largest);
    const auto scale = four_over_six() ? four_over_six_scale(c_, reinterpret_cast<const float*>(values), 1, count, amax,
                                                             amax_of(to, row), tensor)
                                       : block_scale<kCodes, kScales>(c_, amax, tensor);
    store_scale(to, index, scale.inverse, scale.code);
    uint8_t* const codes = to.data + row * to.ld + code_offset<kCodes>(column);
    for (int64_t i = 0; i * kLanes < count; ++i)
      store_codes<kCodes>(to_bytes(encode_values(values[i], splat<Floats>(scale.factor), uniforms,
                                                 column % Uniforms::kNumbers / kLanes + i)),
                          codes + code_offset<kCodes>(i * kLanes), std::min(kLanes, count - i * kLanes));
  }

  // ---- blocks along columns ----

  void quantize_columns() {
    const auto tensor = tensor_scale(c_.columnwise, 0);
    for (int64_t column = column_; column < column_ + columns_; column += kLanes)
      for (int64_t row = row_; row < row_ + rows_; row += c_.how.block) quantize_column_block(row, column, tensor);
  }
  void quantize_column_block(int64_t row, int64_t column, const TwoLevelScale& tensor) {
    const auto count = std::min(c_.how.block, row_ + rows_ - row),
               lanes = std::min(kLanes, column_ + columns_ - column);
    Floats values[kQuantizeRegion], largest = {};
    for (int64_t i = 0; i < count; ++i) values[i] = load(at(row + i, column), lanes);
    if (c_.how.hadamard) hadamard_16(values);
    for (int64_t i = 0; i < count; ++i) largest = max_magnitude(largest, values[i]);
    auto scale = block_scale<kCodes, kScales>(c_, largest, tensor);
    if (four_over_six()) choose_lanes(values, count, lanes, largest, tensor, scale);
    store_column_scales(row, column, lanes, scale);
    Bytes codes[kQuantizeRegion];
    Uniforms uniforms;
    for (int64_t i = 0; i < count; ++i) {
      if (c_.how.stochastic_rounding && i % 8 == 0)
        uniforms.draw(c_.random, /*columnwise=*/true, lane_positions(column), static_cast<uint32_t>((row + i) / 8));
      codes[i] = to_bytes(encode_values(values[i], scale.factor, uniforms, i % 8));
    }
    store_columns(codes, row, count, column, lanes);
  }
  WEFT_INLINE void choose_lanes(const Floats* values, int64_t count, int64_t lanes, Floats largest,
                                const TwoLevelScale& tensor, BlockScale<Floats>& scale) const {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      float block[kLanes] = {};
      for (int64_t i = 0; i < count; ++i) block[i] = values[i][lane];
      const auto best = four_over_six_scale(c_, block, 1, count, largest[lane], amax_of(c_.columnwise, 0), tensor);
      scale.factor[lane] = best.factor, scale.code[lane] = best.code;
    }
  }
  void store_column_scales(int64_t row, int64_t column, int64_t lanes, const BlockScale<Floats>& scale) const {
    for (int64_t lane = 0; lane < lanes; ++lane)
      store_scale(c_.columnwise, columnwise_index(row / c_.how.block, column + lane), scale.inverse[lane],
                  scale.code[lane]);
  }
  /// Of the scale in this row and column of blocks.
  int64_t columnwise_index(int64_t row, int64_t column) const {
    const auto ld = c_.columnwise.scales_ld;
    return c_.how.columns_in_place() ? row * ld + column : column * ld + row;
  }
  /// Stores codes [count][lanes] of rows from `row` on; changes them.
  void store_columns(Bytes* codes, int64_t row, int64_t count, int64_t column, int64_t lanes) const {
    const auto& to = c_.columnwise;
    if (c_.how.columns_in_place()) {
      for (int64_t i = 0; i < count; ++i)
        store_codes<kCodes>(codes[i], to.data + (row + i) * to.ld + code_offset<kCodes>(column), lanes);
      return;
    }
    for (int64_t i = 0; i < count; i += kLanes) {
      const auto left = std::min(kLanes, count - i);
      for (auto j = left; j < kLanes; ++j) codes[i + j] = Bytes{};
      transpose_bytes(codes + i);
      for (int64_t lane = 0; lane < lanes; ++lane)
        store_codes<kCodes>(codes[i + lane], to.data + (column + lane) * to.ld + code_offset<kCodes>(row + i), left);
    }
  }

  // ---- blocks of rows and columns ----

  void quantize_tiles() {
    const auto block = c_.how.block == 0 ? kQuantizeRegion : c_.how.block;
    const auto tensor = tensor_scale(c_.rowwise.data ? c_.rowwise : c_.columnwise, 0);
    for (int64_t row = row_; row < row_ + rows_; row += block)
      for (int64_t column = column_; column < column_ + columns_; column += block)
        quantize_tile({row, column, std::min(block, row_ + rows_ - row), std::min(block, column_ + columns_ - column)},
                      tensor);
  }
  struct Tile {
    int64_t row, column, rows, columns;
  };
  void quantize_tile(const Tile& tile, const TwoLevelScale& tensor) {
    BlockScale<float> scale{c_.scale, 0, 0};
    if (c_.how.block > 0) {
      scale = tile_scale(tile, tensor);
      const auto row = tile.row / c_.how.block, column = tile.column / c_.how.block;
      if (c_.rowwise.data) store_scale(c_.rowwise, row * c_.rowwise.scales_ld + column, scale.inverse, scale.code);
      if (c_.columnwise.data) store_scale(c_.columnwise, columnwise_index(row, column), scale.inverse, scale.code);
    }
    // Strips of rows that are as high as a transposition needs: more rows at a time would evict each other from L1.
    const int64_t height = c_.columnwise.data ? kLanes : 1;
    for (int64_t row = 0; row < tile.rows; row += height)
      quantize_strip({tile.row + row, tile.column, std::min(height, tile.rows - row), tile.columns}, scale.factor);
  }
  /// Quantizes at most 16 rows.
  void quantize_strip(const Tile& strip, float factor) {
    for (auto column = strip.column; column < strip.column + strip.columns; column += kLanes) {
      const auto lanes = std::min(kLanes, strip.column + strip.columns - column);
      Bytes codes[kLanes];
      for (int64_t i = 0; i < strip.rows; ++i) {
        const auto row = strip.row + i;
        codes[i] = to_bytes(encode<kCodes>(load(at(row, column), lanes) * factor));
        if (c_.rowwise.data)
          store_codes<kCodes>(codes[i], c_.rowwise.data + row * c_.rowwise.ld + code_offset<kCodes>(column), lanes);
      }
      if (c_.columnwise.data) store_columns(codes, strip.row, strip.rows, column, lanes);
    }
  }
  BlockScale<float> tile_scale(const Tile& tile, const TwoLevelScale& tensor) const {
    Floats largest = {};
    for (int64_t i = 0; i < tile.rows; ++i)
      for (int64_t column = 0; column < tile.columns; column += kLanes)
        largest = max_magnitude(largest,
                                load(at(tile.row + i, tile.column + column), std::min(kLanes, tile.columns - column)));
    const float amax = max_lane(largest);
    if (!four_over_six()) return block_scale<kCodes, kScales>(c_, amax, tensor);
    float values[kLanes * kLanes];
    for (int64_t i = 0; i < tile.rows; ++i) {
      const Floats row = load(at(tile.row + i, tile.column), tile.columns);
      std::memcpy(values + i * kLanes, &row, sizeof row);
    }
    const auto& to = c_.rowwise.data ? c_.rowwise : c_.columnwise;
    return four_over_six_scale(c_, values, tile.rows, tile.columns, amax, amax_of(to, 0), tensor);
  }

  /// first + lane.
  WEFT_INLINE static Words lane_positions(int64_t first) {
    return Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + static_cast<uint32_t>(first);
  }

  const QuantizeCall& c_;
  int64_t row_, column_, rows_, columns_;
};

/// Calls run with the format, the format of scales and the dtype as types; only the pairs that exist.
template <class F>
void with_formats(const Quantization& how, F&& run) {
  const auto with_format = [&]<ScaleFormat kScales>() {
    if (how.format == Format::e5m2) return run.template operator()<Format::e5m2, kScales>();
    run.template operator()<Format::e4m3, kScales>();
  };
  if (how.scale_format == ScaleFormat::e4m3) return run.template operator()<Format::e2m1, ScaleFormat::e4m3>();
  if (how.scale_format == ScaleFormat::e8m0) return with_format.template operator()<ScaleFormat::e8m0>();
  with_format.template operator()<ScaleFormat::float32>();
}

static void quantize_region(const QuantizeCall& call, int64_t row, int64_t column) {
  with_formats(call.how, [&]<Format kCodes, ScaleFormat kScales>() {
    with_dtype(call.dtype, [&](auto t) { RegionQuantizer<kCodes, kScales, decltype(t)>(call, row, column).run(); });
  });
}

static float amax(at::ScalarType dtype, const void* x, int64_t count) {
  float result = 0;
  with_dtype(dtype, [&](auto t) {
    const auto* const p = static_cast<const decltype(t)*>(x);
    Floats largest = {};
    for (int64_t i = 0; i < count; i += kLanes)
      largest = max_magnitude(largest, load(p + i, std::min(kLanes, count - i)));
    result = max_lane(largest);
  });
  return result;
}

static void hadamard(const void* x, void* out, int64_t columns, int64_t begin, int64_t end) {
  const auto* const from = static_cast<const at::BFloat16*>(x);
  auto* const to = static_cast<at::BFloat16*>(out);
  for (int64_t row = begin; row < end; row += 16)
    for (int64_t column = 0; column < columns; column += kLanes) {
      const auto lanes = std::min(kLanes, columns - column);
      Floats values[16];
      for (int64_t i = 0; i < 16; ++i) values[i] = load(from + (row + i) * columns + column, lanes);
      hadamard_16(values);
      for (int64_t i = 0; i < 16; ++i) store(to + (row + i) * columns + column, values[i], lanes);
    }
}

// ---- Dequantization ------------------------------------------------------------------------------------------------

/// The factors of values whose scales have these codes; `row` is that of the values.
template <ScaleFormat kScales>
WEFT_INLINE Floats decode_scales(const DequantizeCall& c, int64_t row, Ints codes) {
  if constexpr (kScales == ScaleFormat::e8m0) return decode_e8m0<Floats>(codes);
  const Floats scales = decode<Format::e4m3, Floats>(codes);
  if (c.decoding == Decoding::block_scaled) return scales;
  return scales * c.copy.amax[c.how.row_scaled ? row : 0] * (1 / (6 * c.how.scale_bound));
}

/// Decodes one row.
template <Format kCodes, ScaleFormat kScales, class T>
class RowDecoder {
 public:
  RowDecoder(const DequantizeCall& call, int64_t row)
      : c_(call),
        row_(row),
        first_scale_(row / call.block_rows * call.copy.scales_ld),
        from_(call.copy.data + row * call.copy.ld),
        to_(static_cast<T*>(call.out) + row * call.columns) {}

  void run() const {
    if (c_.decoding == Decoding::codes) return decode_span(0, c_.columns, [](auto...) { return splat<Floats>(1); });
    if constexpr (kScales != ScaleFormat::float32)
      if (c_.block_columns == 1)
        return decode_span(0, c_.columns, [&](int64_t column, int64_t lanes) {
          const auto* const codes = c_.copy.scale_codes + first_scale_ + column;
          return decode_scales<kScales>(c_, row_, load_codes<Format::e4m3>(codes, lanes));
        });
    auto scale = first_scale_;
    for (int64_t column = 0; column < c_.columns; column += c_.block_columns) {
      const Floats factor = factor_of(scale++);
      decode_span(column, std::min(c_.columns, column + c_.block_columns), [&](auto...) { return factor; });
    }
  }

 private:
  /// The factor of a block.
  WEFT_INLINE Floats factor_of(int64_t scale) const {
    if constexpr (kScales == ScaleFormat::float32) {
      return splat<Floats>(c_.copy.float32_scales[scale]);
    } else {
      return decode_scales<kScales>(c_, row_, splat_int<Ints>(c_.copy.scale_codes[scale]));
    }
  }
  /// Decodes columns [begin, end); `factors(column, lanes)` are those of 16 values.
  template <class Factors>
  WEFT_INLINE void decode_span(int64_t begin, int64_t end, const Factors& factors) const {
    for (int64_t column = begin; column < end; column += kLanes) {
      const auto lanes = std::min(kLanes, end - column);
      const Ints codes = load_codes<kCodes>(from_ + code_offset<kCodes>(column), lanes);
      store(to_ + column, decode<kCodes, Floats>(codes) * factors(column, lanes), lanes);
    }
  }

  const DequantizeCall& c_;
  int64_t row_, first_scale_;
  const uint8_t* from_;
  T* to_;
};

static void dequantize_rows(const DequantizeCall& c, int64_t begin, int64_t end) {
  with_formats(c.how, [&]<Format kCodes, ScaleFormat kScales>() {
    with_dtype(c.dtype, [&](auto t) {
      for (int64_t row = begin; row < end; ++row) RowDecoder<kCodes, kScales, decltype(t)>(c, row).run();
    });
  });
}

const QuantizeLoops quantize_loops{quantize_region, amax, hadamard, dequantize_rows};

}  // namespace weft::kernels::CPU_CAPABILITY
