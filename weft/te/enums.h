#pragma once

// The enums of Transformer Engine's public headers that Python passes to functions, with their values.

namespace weft::te {

enum class BiasType { none = 0, pre_scale = 1, post_scale = 2, alibi = 3 };

enum class MaskType {
  none = 0,
  padding = 1,
  causal = 2,
  padding_causal = 3,
  causal_bottom_right = 4,
  padding_causal_bottom_right = 5,
};

enum class SoftmaxType { vanilla = 0, off_by_one = 1, learnable = 2 };

enum class FusedAttentionBackend { none = -1, f16_arbitrary_seqlen = 1, fp8 = 2 };

/// The order of dimensions of queries, keys and values: s sequence, b batch, h heads, d head size, t tokens of all
/// sequences. `x_2y`: queries in x, keys and values in y.
enum class QkvFormat {
  sbhd = 0,
  bshd = 1,
  thd = 2,
  bshd_2sbhd = 3,
  sbhd_2bshd = 4,
  thd_2bshd = 5,
  thd_2sbhd = 6,
  bhsd = 7,
  not_set = 8,
};

/// How queries, keys and values are stored: 3 or 2 of them interleaved in one tensor, or one tensor each.
enum class QkvLayout {
  sb3hd = 0,
  sbh3d = 1,
  sbhd_sb2hd = 2,
  sbhd_sbh2d = 3,
  sbhd_sbhd_sbhd = 4,
  bs3hd = 5,
  bsh3d = 6,
  bshd_bs2hd = 7,
  bshd_bsh2d = 8,
  bshd_bshd_bshd = 9,
  t3hd = 10,
  th3d = 11,
  thd_t2hd = 12,
  thd_th2d = 13,
  thd_thd_thd = 14,
  sbhd_bshd_bshd = 15,
  bshd_sbhd_sbhd = 16,
  thd_bshd_bshd = 17,
  thd_sbhd_sbhd = 18,
  paged_kv_bshd_bshd_bshd = 19,
  paged_kv_bshd_sbhd_sbhd = 20,
  paged_kv_sbhd_bshd_bshd = 21,
  paged_kv_sbhd_sbhd_sbhd = 22,
  paged_kv_thd_bshd_bshd = 23,
  paged_kv_thd_sbhd_sbhd = 24,
  bhsd_bhsd_bhsd = 25,
  not_set = 26,
};

enum class ScalingMode {
  per_tensor = 0,
  mxfp8_1d = 1,
  block_1d = 2,
  block_2d = 3,
  nvfp4_1d = 4,
  invalid = 100,
};

enum class Float8BlockScaleTensorFormat { gemm_ready = 0, compact = 1, invalid = 2 };

enum class RoutingMapFormat { bytemap = 0, bitmap_u8 = 1 };

enum class QbHistogramMode { two_kernel = 0, fused_atomic = 1 };

enum class CommOverlapType { rs = 0, ag = 1 };

enum class CommOverlapAlgo {
  bulk_overlap_ag = 0,
  bulk_overlap_rs = 1,
  split_pipelined_ag_p2p = 2,
  split_pipelined_rs = 3,
  split_pipelined_rs_p2p = 4,
  atomic_gemm_rs = 5,
  atomic_gemm_ag_p2p = 6,
  atomic_gemm_rs_p2p = 7,
  external_bulk_overlap_ag = 8,
};

/// Indices of a module's tensors in the scales and maxima of an `FP8TensorMeta`.
enum class Fp8ForwardTensors {
  gemm1_input = 0,
  gemm1_weight = 1,
  gemm1_output = 2,
  gemm2_input = 3,
  gemm2_weight = 4,
  gemm2_output = 5,
  gemm3_input = 6,
  gemm3_weight = 7,
  gemm3_output = 8,
};
enum class Fp8BackwardTensors {
  grad_output1 = 0,
  grad_input1 = 1,
  grad_output2 = 2,
  grad_input2 = 3,
  grad_output3 = 4,
  grad_input3 = 5,
};

}  // namespace weft::te
