#include "weft/te/enums.h"

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <utility>

#include "weft/te/bind.h"
#include "weft/te/dtype.h"

namespace weft::te {

at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::byte:
    case DType::float8_e8m0:
      return at::kByte;
    case DType::int16:
      return at::kShort;
    case DType::int32:
      return at::kInt;
    case DType::int64:
      return at::kLong;
    case DType::float32:
      return at::kFloat;
    case DType::float16:
      return at::kHalf;
    case DType::bfloat16:
      return at::kBFloat16;
    case DType::float8_e4m3:
      return at::kFloat8_e4m3fn;
    case DType::float8_e5m2:
      return at::kFloat8_e5m2;
    case DType::float4_e2m1:
      break;
  }
  TORCH_CHECK_TYPE(false, "transformer_engine_torch.DType ", static_cast<int>(dtype),
                   " has no torch.dtype. Pass kByte or the type of a plain tensor.");
}

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kBool:
    case at::kByte:
      return DType::byte;
    case at::kShort:
      return DType::int16;
    case at::kInt:
      return DType::int32;
    case at::kLong:
      return DType::int64;
    case at::kFloat:
      return DType::float32;
    case at::kHalf:
      return DType::float16;
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kFloat8_e4m3fn:
      return DType::float8_e4m3;
    case at::kFloat8_e5m2:
      return DType::float8_e5m2;
    default:
      TORCH_CHECK_TYPE(false, "Transformer Engine has no type for ", type,
                       "; expected uint8, int16, int32, int64, float32, float16, bfloat16 or a float8 type.");
  }
}

py::object python_dtype(DType dtype) {
  return py::module_::import("transformer_engine.pytorch.constants").attr("DType")(static_cast<int>(dtype));
}

namespace {

/// The members of FP8TensorMeta: scales and the history of maxima for delayed scaling.
struct Fp8TensorMeta {
  at::Tensor scale, scale_inv, amax_history;
};

template <class E>
py::enum_<E> bind_enum(py::module_& m, const char* name, std::initializer_list<std::pair<const char*, E>> members) {
  py::enum_<E> type(m, name, py::module_local());
  for (const auto& [member, value] : members) type.value(member, value);
  return type;
}

/// DType compares with integers and IntEnums by value, and pickles as its class and its value.
void bind_dtype(py::module_& m) {
  auto type = bind_enum<DType>(m, "DType",
                               {{"kByte", DType::byte},
                                {"kInt32", DType::int32},
                                {"kFloat32", DType::float32},
                                {"kFloat16", DType::float16},
                                {"kBFloat16", DType::bfloat16},
                                {"kFloat8E4M3", DType::float8_e4m3},
                                {"kFloat8E5M2", DType::float8_e5m2},
                                {"kFloat4E2M1", DType::float4_e2m1}});
  const auto equals = [](const py::object& self, const py::object& other) {
    return PyIndex_Check(other.ptr()) && py::int_(self).equal(py::int_(other));
  };
  const auto reduce = [](const py::object& self, const py::args&) {
    return py::make_tuple(py::type::of(self), py::make_tuple(py::int_(self)));
  };
  type.attr("__eq__") = py::cpp_function(equals, py::is_method(type));
  type.attr("__ne__") = py::cpp_function(
      [equals](const py::object& self, const py::object& other) { return !equals(self, other); }, py::is_method(type));
  type.attr("__reduce__") = py::cpp_function(reduce, py::is_method(type));
  type.attr("__reduce_ex__") = py::cpp_function(reduce, py::is_method(type));
}

void bind_attention_enums(py::module_& m) {
  bind_enum<BiasType>(m, "NVTE_Bias_Type",
                      {{"NVTE_NO_BIAS", BiasType::none},
                       {"NVTE_PRE_SCALE_BIAS", BiasType::pre_scale},
                       {"NVTE_POST_SCALE_BIAS", BiasType::post_scale},
                       {"NVTE_ALIBI", BiasType::alibi}});
  bind_enum<MaskType>(m, "NVTE_Mask_Type",
                      {{"NVTE_NO_MASK", MaskType::none},
                       {"NVTE_PADDING_MASK", MaskType::padding},
                       {"NVTE_CAUSAL_MASK", MaskType::causal},
                       {"NVTE_PADDING_CAUSAL_MASK", MaskType::padding_causal},
                       {"NVTE_CAUSAL_BOTTOM_RIGHT_MASK", MaskType::causal_bottom_right},
                       {"NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK", MaskType::padding_causal_bottom_right}});
  bind_enum<SoftmaxType>(m, "NVTE_Softmax_Type",
                         {{"NVTE_VANILLA_SOFTMAX", SoftmaxType::vanilla},
                          {"NVTE_OFF_BY_ONE_SOFTMAX", SoftmaxType::off_by_one},
                          {"NVTE_LEARNABLE_SOFTMAX", SoftmaxType::learnable}});
  bind_enum<FusedAttentionBackend>(m, "NVTE_Fused_Attn_Backend",
                                   {{"NVTE_F16_arbitrary_seqlen", FusedAttentionBackend::f16_arbitrary_seqlen},
                                    {"NVTE_FP8", FusedAttentionBackend::fp8},
                                    {"NVTE_No_Backend", FusedAttentionBackend::none}});
  bind_enum<QkvFormat>(m, "NVTE_QKV_Format",
                       {{"NVTE_SBHD", QkvFormat::sbhd},
                        {"NVTE_BSHD", QkvFormat::bshd},
                        {"NVTE_THD", QkvFormat::thd},
                        {"NVTE_BSHD_2SBHD", QkvFormat::bshd_2sbhd},
                        {"NVTE_SBHD_2BSHD", QkvFormat::sbhd_2bshd},
                        {"NVTE_THD_2BSHD", QkvFormat::thd_2bshd},
                        {"NVTE_THD_2SBHD", QkvFormat::thd_2sbhd},
                        {"NVTE_BHSD", QkvFormat::bhsd},
                        {"NVTE_QKV_Format_NOT_SET", QkvFormat::not_set}});
  bind_enum<QkvLayout>(m, "NVTE_QKV_Layout",
                       {{"NVTE_SB3HD", QkvLayout::sb3hd},
                        {"NVTE_SBH3D", QkvLayout::sbh3d},
                        {"NVTE_SBHD_SB2HD", QkvLayout::sbhd_sb2hd},
                        {"NVTE_SBHD_SBH2D", QkvLayout::sbhd_sbh2d},
                        {"NVTE_SBHD_SBHD_SBHD", QkvLayout::sbhd_sbhd_sbhd},
                        {"NVTE_BS3HD", QkvLayout::bs3hd},
                        {"NVTE_BSH3D", QkvLayout::bsh3d},
                        {"NVTE_BSHD_BS2HD", QkvLayout::bshd_bs2hd},
                        {"NVTE_BSHD_BSH2D", QkvLayout::bshd_bsh2d},
                        {"NVTE_BSHD_BSHD_BSHD", QkvLayout::bshd_bshd_bshd},
                        {"NVTE_T3HD", QkvLayout::t3hd},
                        {"NVTE_TH3D", QkvLayout::th3d},
                        {"NVTE_THD_T2HD", QkvLayout::thd_t2hd},
                        {"NVTE_THD_TH2D", QkvLayout::thd_th2d},
                        {"NVTE_THD_THD_THD", QkvLayout::thd_thd_thd},
                        {"NVTE_SBHD_BSHD_BSHD", QkvLayout::sbhd_bshd_bshd},
                        {"NVTE_BSHD_SBHD_SBHD", QkvLayout::bshd_sbhd_sbhd},
                        {"NVTE_THD_BSHD_BSHD", QkvLayout::thd_bshd_bshd},
                        {"NVTE_THD_SBHD_SBHD", QkvLayout::thd_sbhd_sbhd},
                        {"NVTE_Paged_KV_BSHD_BSHD_BSHD", QkvLayout::paged_kv_bshd_bshd_bshd},
                        {"NVTE_Paged_KV_BSHD_SBHD_SBHD", QkvLayout::paged_kv_bshd_sbhd_sbhd},
                        {"NVTE_Paged_KV_SBHD_BSHD_BSHD", QkvLayout::paged_kv_sbhd_bshd_bshd},
                        {"NVTE_Paged_KV_SBHD_SBHD_SBHD", QkvLayout::paged_kv_sbhd_sbhd_sbhd},
                        {"NVTE_Paged_KV_THD_BSHD_BSHD", QkvLayout::paged_kv_thd_bshd_bshd},
                        {"NVTE_Paged_KV_THD_SBHD_SBHD", QkvLayout::paged_kv_thd_sbhd_sbhd},
                        {"NVTE_BHSD_BHSD_BHSD", QkvLayout::bhsd_bhsd_bhsd},
                        {"NVTE_QKV_Layout_NOT_SET", QkvLayout::not_set}});
}

void bind_scaling_enums(py::module_& m) {
  bind_enum<ScalingMode>(m, "NVTEScalingMode",
                         {{"NVTE_DELAYED_TENSOR_SCALING", ScalingMode::per_tensor},
                          {"NVTE_MXFP8_1D_SCALING", ScalingMode::mxfp8_1d},
                          {"NVTE_BLOCK_SCALING_1D", ScalingMode::block_1d},
                          {"NVTE_BLOCK_SCALING_2D", ScalingMode::block_2d},
                          {"NVTE_NVFP4_1D_SCALING", ScalingMode::nvfp4_1d},
                          {"NVTE_INVALID_SCALING", ScalingMode::invalid}});
  bind_enum<Float8BlockScaleTensorFormat>(m, "Float8BlockScaleTensorFormat",
                                          {{"GEMM_READY", Float8BlockScaleTensorFormat::gemm_ready},
                                           {"COMPACT", Float8BlockScaleTensorFormat::compact},
                                           {"INVALID", Float8BlockScaleTensorFormat::invalid}});
  bind_enum<Fp8ForwardTensors>(m, "FP8FwdTensors",
                               {{"GEMM1_INPUT", Fp8ForwardTensors::gemm1_input},
                                {"GEMM1_WEIGHT", Fp8ForwardTensors::gemm1_weight},
                                {"GEMM1_OUTPUT", Fp8ForwardTensors::gemm1_output},
                                {"GEMM2_INPUT", Fp8ForwardTensors::gemm2_input},
                                {"GEMM2_WEIGHT", Fp8ForwardTensors::gemm2_weight},
                                {"GEMM2_OUTPUT", Fp8ForwardTensors::gemm2_output},
                                {"GEMM3_INPUT", Fp8ForwardTensors::gemm3_input},
                                {"GEMM3_WEIGHT", Fp8ForwardTensors::gemm3_weight},
                                {"GEMM3_OUTPUT", Fp8ForwardTensors::gemm3_output}});
  bind_enum<Fp8BackwardTensors>(m, "FP8BwdTensors",
                                {{"GRAD_OUTPUT1", Fp8BackwardTensors::grad_output1},
                                 {"GRAD_INPUT1", Fp8BackwardTensors::grad_input1},
                                 {"GRAD_OUTPUT2", Fp8BackwardTensors::grad_output2},
                                 {"GRAD_INPUT2", Fp8BackwardTensors::grad_input2},
                                 {"GRAD_OUTPUT3", Fp8BackwardTensors::grad_output3},
                                 {"GRAD_INPUT3", Fp8BackwardTensors::grad_input3}});
  py::class_<Fp8TensorMeta>(m, "FP8TensorMeta", py::module_local())
      .def(py::init<>())
      .def_readwrite("scale", &Fp8TensorMeta::scale)
      .def_readwrite("scale_inv", &Fp8TensorMeta::scale_inv)
      .def_readwrite("amax_history", &Fp8TensorMeta::amax_history);
}

}  // namespace

void bind_enums(py::module_& m) {
  bind_dtype(m);
  bind_scaling_enums(m);
  bind_attention_enums(m);
  bind_enum<RoutingMapFormat>(m, "NVTERoutingMapFormat",
                              {{"BYTEMAP", RoutingMapFormat::bytemap}, {"BITMAP_U8", RoutingMapFormat::bitmap_u8}});
  bind_enum<QbHistogramMode>(
      m, "NVTEQBHistogramMode",
      {{"TWO_KERNEL", QbHistogramMode::two_kernel}, {"FUSED_ATOMIC", QbHistogramMode::fused_atomic}});
  bind_enum<CommOverlapType>(m, "CommOverlapType", {{"RS", CommOverlapType::rs}, {"AG", CommOverlapType::ag}});
  bind_enum<CommOverlapAlgo>(m, "CommOverlapAlgo",
                             {{"BULK_OVERLAP_AG", CommOverlapAlgo::bulk_overlap_ag},
                              {"BULK_OVERLAP_RS", CommOverlapAlgo::bulk_overlap_rs},
                              {"SPLIT_PIPELINED_AG_P2P", CommOverlapAlgo::split_pipelined_ag_p2p},
                              {"SPLIT_PIPELINED_RS", CommOverlapAlgo::split_pipelined_rs},
                              {"SPLIT_PIPELINED_RS_P2P", CommOverlapAlgo::split_pipelined_rs_p2p},
                              {"ATOMIC_GEMM_RS", CommOverlapAlgo::atomic_gemm_rs},
                              {"ATOMIC_GEMM_AG_P2P", CommOverlapAlgo::atomic_gemm_ag_p2p},
                              {"ATOMIC_GEMM_RS_P2P", CommOverlapAlgo::atomic_gemm_rs_p2p},
                              {"EXTERNAL_BULK_OVERLAP_AG", CommOverlapAlgo::external_bulk_overlap_ag}});
}

}  // namespace weft::te
