#pragma once

/// Descriptions of fields that several operations have.
namespace weft::ops::description {

inline constexpr const char* kDtype = "Dtype of the parameters; in Python, None means torch's default dtype.";
inline constexpr const char* kInFeatures = "Size of the last dimension of the input, over all ranks.";
inline constexpr const char* kOutFeatures = "Size of the last dimension of the output, over all ranks.";
inline constexpr const char* kAccumulateIntoMainGrad =
    "Add the weight gradient to ``weight.main_grad`` in the GEMM instead of returning it to autograd.";
inline constexpr const char* kDelayWgradCompute =
    "Compute the weight gradient when ``backward_dw()`` is called instead of in backward.";

inline constexpr const char* kTensorParallelMode =
    "``\"column\"`` shards the output features over the ranks, ``\"row\"`` the input features; None "
    "disables tensor parallelism.";
inline constexpr const char* kSequenceParallel =
    "Shard dimension 0 of the replicated tensor: a column linear all-gathers its input, a row linear "
    "reduce-scatters its output.";
inline constexpr const char* kUserbuffersOptions =
    "Transformer Engine's options for overlap, a dict of which only ``\"comm_name\"`` is used; None means "
    "no options.";
inline constexpr const char* kOverlap =
    "Overlap tensor-parallel communication with the GEMMs; None means where it is predicted to be faster.";
inline constexpr const char* kTensorParallelGroup =
    "Ranks that share the layer: a ProcessGroup or a 1-D DeviceMesh; None means the default group.";
inline constexpr const char* kProcessGroup =
    "Ranks that take part: a ProcessGroup or a 1-D DeviceMesh; None means the default group, or one rank if "
    "torch.distributed is not initialized.";
inline constexpr const char* kGroupSize = "Number of ranks in the group; computed from the group in Python.";

inline constexpr const char* kCacheQuantizedInput =
    "Save the input in FP8 (E4M3, one scale from its own maximum) to use less memory; backward then computes with the "
    "rounded values, and the operation is not fused.";
inline constexpr const char* kGluInterleaveSize =
    "Block size of an input in which blocks of a and b alternate; None means that all of a precedes all of b.";
inline constexpr const char* kRecompute =
    "Recompute the activation in backward; the operation then runs only inside a fused grouped MLP.";
inline constexpr const char* kRejectedRecompute =
    "Transformer Engine's option to recompute the activation in backward; True is not supported and raises ValueError.";
inline constexpr const char* kBeta1 = "Bound of the factor beta1·tanh(a/beta1); positive.";
inline constexpr const char* kBeta2 = "Bound of the factor beta2·tanh(b/beta2); positive.";
inline constexpr const char* kLimit = "Upper bound of a, and bound of the magnitude of b.";
inline constexpr const char* kAlpha = "Factor of a inside the sigmoid; 1.702 makes a·σ(alpha·a) approximate GELU(a).";
inline constexpr const char* kGluLinearOffset = "Added to b after clamping.";

}  // namespace weft::ops::description
