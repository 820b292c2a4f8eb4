#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <vector>

#include "weft/te/attention_backend.h"
#include "weft/te/bind.h"
#include "weft/te/fused_attention.h"
#include "weft/te/generator.h"
#include "weft/te/host.h"
#include "weft/te/kv_cache.h"
#include "weft/te/quantized_tensor.h"

// Fused attention: the arguments of Transformer Engine, and the tensors that it saves for backward.

namespace weft::te {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

at::Tensor plain_tensor(const py::object& t, const char* function) {
  TORCH_CHECK_NOT_IMPLEMENTED(!is_quantized(t), function,
                              ": FP8 attention is not supported on the CPU. Run it without "
                              "fp8_dpa and fp8_mha.");
  return t.cast<at::Tensor>();
}

void set_window(FusedAttention& attention, const std::vector<int64_t>& window_size) {
  TORCH_CHECK_VALUE(window_size.size() == 2,
                    "fused attention: expected window_size with a left and a right limit, got ", window_size.size(),
                    " numbers.");
  attention.left = window_size[0], attention.right = window_size[1];
}

/// The state that dropout of both passes reads: a seed and an offset that is not used.
at::Tensor new_random_state(double dropout, c10::Device device, const std::optional<at::Generator>& generator) {
  auto state = at::zeros({2}, at::kLong);
  if (dropout > 0) *state.mutable_data_ptr<int64_t>() = draw_seed(host_generator(device, generator));
  return on_device(std::move(state), device);
}
at::Tensor seed_of(const at::Tensor& state) {
  TORCH_CHECK_VALUE(state.numel() == 2 && state.scalar_type() == at::kLong, "fused attention: rng_state has shape ",
                    state.sizes(), " and dtype ", state.scalar_type(), ", expected int64 [2].");
  return host(state).narrow(0, 0, 1);
}

/// Returns [out, logsumexp, (largest score), rng_state, (bias), (softmax offset)].
std::vector<at::Tensor> fused_attn_fwd(
    int64_t /*max_seqlen_q*/, int64_t /*max_seqlen_kv*/, bool /*is_training*/, double attn_scale, double p_dropout,
    bool /*set_zero*/, QkvLayout qkv_layout, QkvFormat o_format, QkvFormat /*qkv_scale_inv_format*/, BiasType bias_type,
    MaskType attn_mask_type, SoftmaxType softmax_type, const std::vector<int64_t>& window_size,
    bool bottom_right_diagonal, const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_kv, const py::object& q,
    const py::object& k, const py::object& v, const py::object& /*fake_dtype*/,
    const OptionalTensor& cu_seqlens_q_padded, const OptionalTensor& cu_seqlens_kv_padded,
    const OptionalTensor& page_table_k, const OptionalTensor& page_table_v, const py::object& /*s_quantizer*/,
    const py::object& /*o_quantizer*/, const OptionalTensor& bias, const OptionalTensor& softmax_offset,
    const std::optional<at::Generator>& rng_gen, int64_t /*rng_elts_per_thread*/, bool return_max_logit,
    bool /*cuda_graph*/) {
  constexpr auto kName = "fused_attn_fwd";
  const auto queries = plain_tensor(q, kName), keys = plain_tensor(k, kName), values = plain_tensor(v, kName);
  const py::gil_scoped_release release;
  const auto device = queries.device();
  const auto state = new_random_state(p_dropout, device, rng_gen);
  const bool has_bias = bias_type == BiasType::post_scale && bias;
  const bool has_sink = softmax_type != SoftmaxType::vanilla && softmax_offset;
  FusedAttention attention{.scale = attn_scale,
                           .dropout = p_dropout,
                           .layout = qkv_layout,
                           .bias_type = bias_type,
                           .mask = attn_mask_type,
                           .softmax = softmax_type,
                           .bottom_right = bottom_right_diagonal,
                           .cu_seqlens_q = host(cu_seqlens_q),
                           .cu_seqlens_kv = host(cu_seqlens_kv),
                           .cu_seqlens_q_padded = host(cu_seqlens_q_padded),
                           .cu_seqlens_kv_padded = host(cu_seqlens_kv_padded),
                           .page_table_k = host(page_table_k),
                           .page_table_v = host(page_table_v),
                           .bias = host(bias),
                           .sink = host(softmax_offset),
                           .seed = seed_of(state)};
  set_window(attention, window_size);
  auto extents = Extents::of(queries, layout_parts(qkv_layout).queries);
  extents.channels = values.size(-1);
  const auto out = at::empty(extents.sizes(o_format), queries.options());
  auto statistics = fused_attention_forward(attention, {host(queries), host(keys), host(values)}, host(out), o_format,
                                            return_max_logit);
  std::vector<at::Tensor> result{out, on_device(std::move(statistics.logsumexp), device)};
  if (return_max_logit) result.push_back(on_device(std::move(statistics.largest), device));
  result.push_back(state);
  if (has_bias) result.push_back(*bias);
  if (has_sink) result.push_back(*softmax_offset);
  return result;
}

/// Gradients of queries, keys and values, which are views of one buffer in the layouts that interleave them.
kernels::Qkv new_gradients(const kernels::Qkv& in, QkvLayout layout, QkvLayout grad_layout) {
  using enum LayoutParts::Interleaved;
  const auto from = layout_parts(layout), to = layout_parts(grad_layout);
  const auto sizes = [](const at::Tensor& t, QkvFormat source, QkvFormat target) {
    return Extents::of(t, source).sizes(target);
  };
  const auto options = in.q.options();
  const auto q = sizes(in.q, from.queries, to.queries);
  /// `count` tensors of the sizes of the keys in one buffer, with dimension `dim` between them.
  const auto buffer = [&](int64_t count, int64_t dim) {
    auto all = sizes(in.k, from.keys, to.keys);
    all.insert(all.end() + dim + 1, count);
    return at::empty(all, options).unbind(dim);
  };
  const bool before_heads = to.interleaved == qkv_before_heads || to.interleaved == kv_before_heads;
  const int64_t dim = before_heads ? -3 : -2;
  switch (to.interleaved) {
    case qkv_before_heads:
    case qkv_after_heads: {
      const auto all = buffer(3, dim);
      return {all[0], all[1], all[2]};
    }
    case kv_before_heads:
    case kv_after_heads: {
      const auto all = buffer(2, dim);
      return {at::empty(q, options), all[0], all[1]};
    }
    default:
      return {at::empty(q, options), at::empty(sizes(in.k, from.keys, to.keys), options),
              at::empty(sizes(in.v, from.keys, to.keys), options)};
  }
}

/// Returns the gradients of queries, keys, values, bias and softmax offset; the last two None if absent. `saved` is
/// what forward returned after its output and the largest score.
std::vector<at::Tensor> fused_attn_bwd(
    int64_t /*max_seqlen_q*/, int64_t /*max_seqlen_kv*/, double attn_scale, double p_dropout, bool /*set_zero*/,
    QkvLayout qkv_layout, QkvFormat o_format, QkvFormat do_format, QkvLayout dqkv_layout,
    QkvFormat /*qkv_scale_inv_format*/, QkvFormat /*do_scale_inv_format*/, BiasType bias_type, MaskType attn_mask_type,
    SoftmaxType softmax_type, const std::vector<int64_t>& window_size, bool bottom_right_diagonal,
    bool /*deterministic*/, const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_kv, const py::object& q,
    const py::object& k, const py::object& v, const py::object& o, const py::object& d_o,
    const py::object& /*fake_dtype*/, const std::vector<at::Tensor>& saved, const OptionalTensor& cu_seqlens_q_padded,
    const OptionalTensor& cu_seqlens_kv_padded, const py::object& /*s_quantizer*/, const py::object& /*dp_quantizer*/,
    const py::object& /*dqkv_quantizer*/, bool /*cuda_graph*/) {
  constexpr auto kName = "fused_attn_bwd";
  const kernels::Qkv in{plain_tensor(q, kName), plain_tensor(k, kName), plain_tensor(v, kName)};
  const auto out = plain_tensor(o, kName), dout = plain_tensor(d_o, kName);
  const py::gil_scoped_release release;
  const bool has_bias = bias_type == BiasType::post_scale;
  const bool has_sink = softmax_type != SoftmaxType::vanilla && saved.size() > (has_bias ? 3 : 2);
  TORCH_CHECK_VALUE(saved.size() >= (has_bias ? 3 : 2), kName, ": Aux_CTX_Tensors has ", saved.size(),
                    " tensors, expected those that fused_attn_fwd returned after its output.");
  FusedAttention attention{.scale = attn_scale,
                           .dropout = p_dropout,
                           .layout = qkv_layout,
                           .bias_type = bias_type,
                           .mask = attn_mask_type,
                           .softmax = softmax_type,
                           .bottom_right = bottom_right_diagonal,
                           .cu_seqlens_q = host(cu_seqlens_q),
                           .cu_seqlens_kv = host(cu_seqlens_kv),
                           .cu_seqlens_q_padded = host(cu_seqlens_q_padded),
                           .cu_seqlens_kv_padded = host(cu_seqlens_kv_padded),
                           .bias = has_bias ? host(saved[2]) : at::Tensor(),
                           .sink = has_sink ? host(saved.back()) : at::Tensor(),
                           .seed = seed_of(saved[1])};
  set_window(attention, window_size);
  const auto grads = new_gradients(in, qkv_layout, dqkv_layout);
  const FusedSaved tensors{host(out), host(dout), host(saved[0]), o_format, do_format};
  auto terms = fused_attention_backward(attention, {host(in.q), host(in.k), host(in.v)}, tensors,
                                        {host(grads.q), host(grads.k), host(grads.v)}, dqkv_layout);
  const auto device = in.q.device();
  const auto dtype = in.q.scalar_type();
  const auto dbias = terms.bias.defined() ? on_device(terms.bias.to(dtype), device) : at::Tensor();
  const auto dsink = terms.sink.defined() ? on_device(terms.sink.view({1, -1, 1, 1}), device) : at::Tensor();
  return {grads.q, grads.k, grads.v, dbias, dsink};
}

py::object backend_of(py::handle module, const std::string& rejection) {
  return module.attr("NVTE_Fused_Attn_Backend")
      .attr(rejection.empty() ? "NVTE_F16_arbitrary_seqlen" : "NVTE_No_Backend");
}

/// Before 2.20: the arguments one by one; returns the backend.
void bind_backend_of_arguments(py::module_& m) {
  m.def(
      "get_fused_attn_backend",
      [module = py::handle(m)](bool is_training, DType q_dtype, DType kv_dtype, QkvLayout layout, BiasType bias,
                               MaskType mask, SoftmaxType softmax, double dropout, int64_t heads, int64_t groups,
                               int64_t max_seqlen_q, int64_t max_seqlen_kv, int64_t /*head_dim_qk*/,
                               int64_t /*head_dim_v*/, int64_t /*window_size_left*/, int64_t /*window_size_right*/,
                               bool return_max_logit, bool /*cuda_graph*/, bool /*deterministic*/) {
        return backend_of(
            module, fused_attention_rejection({q_dtype, kv_dtype, layout, bias, mask, softmax, dropout, heads, groups,
                                               max_seqlen_q, max_seqlen_kv, is_training, return_max_logit}));
      },
      py::arg("is_training"), py::arg("q_dtype"), py::arg("kv_dtype"), py::arg("qkv_layout"), py::arg("bias_type"),
      py::arg("attn_mask_type"), py::arg("softmax_type"), py::arg("p_dropout"), py::arg("num_attn_heads"),
      py::arg("num_gqa_groups"), py::arg("max_seqlen_q"), py::arg("max_seqlen_kv"), py::arg("head_dim_qk"),
      py::arg("head_dim_v"), py::arg("window_size_left"), py::arg("window_size_right"), py::arg("return_max_logit"),
      py::arg("cuda_graph"), py::arg("deterministic"));
}

template <class T>
T attribute(const py::object& object, const char* name) {
  return object.attr(name).cast<T>();
}

/// Since 2.20: an object with the arguments as attributes; returns the backend, and why there is none.
void bind_backend_of_parameters(py::module_& m) {
  m.def(
      "get_fused_attn_backend",
      [module = py::handle(m)](const py::object& params) {
        const auto dtype = attribute<DType>(params, "qkv_dtype");
        const auto rejection =
            fused_attention_rejection({.q_dtype = dtype,
                                       .kv_dtype = dtype,
                                       .layout = attribute<QkvLayout>(params, "qkv_layout"),
                                       .bias = attribute<BiasType>(params, "bias_type"),
                                       .mask = attribute<MaskType>(params, "attn_mask_type"),
                                       .softmax = attribute<SoftmaxType>(params, "softmax_type"),
                                       .dropout = attribute<double>(params, "dropout"),
                                       .heads = attribute<int64_t>(params, "num_attn_heads"),
                                       .groups = attribute<int64_t>(params, "num_gqa_groups"),
                                       .max_seqlen_q = attribute<int64_t>(params, "max_seqlen_q"),
                                       .max_seqlen_kv = attribute<int64_t>(params, "max_seqlen_kv"),
                                       .is_training = attribute<bool>(params, "is_training"),
                                       .return_max_logit = attribute<bool>(params, "return_max_logit")});
        return py::make_tuple(backend_of(module, rejection), rejection);
      },
      py::arg("params"));
}

}  // namespace

void bind_attention(py::module_& m) {
  bind_backend_of_arguments(m);
  bind_backend_of_parameters(m);
  const auto scale = py::arg("attn_scale"), dropout = py::arg("p_dropout"), set_zero = py::arg("set_zero");
  const auto max_q = py::arg("max_seqlen_q"), max_kv = py::arg("max_seqlen_kv");
  const auto layout = py::arg("qkv_layout"), o_format = py::arg("o_format"), bias_type = py::arg("bias_type");
  const auto mask = py::arg("attn_mask_type"), softmax = py::arg("softmax_type"), window = py::arg("window_size");
  const auto diagonal = py::arg("bottom_right_diagonal"), scale_inv = py::arg("qkv_scale_inv_format");
  const auto cu_q = py::arg("cu_seqlens_q"), cu_kv = py::arg("cu_seqlens_kv"), fake_dtype = py::arg("fake_dtype");
  const auto cu_q_padded = py::arg("cu_seqlens_q_padded"), cu_kv_padded = py::arg("cu_seqlens_kv_padded");
  const auto q = py::arg("Q"), k = py::arg("K"), v = py::arg("V"), cuda_graph = py::arg("cuda_graph");
  m.def("fused_attn_fwd", fused_attn_fwd, max_q, max_kv, py::arg("is_training"), scale, dropout, set_zero, layout,
        o_format, scale_inv, bias_type, mask, softmax, window, diagonal, cu_q, cu_kv, q, k, v, fake_dtype, cu_q_padded,
        cu_kv_padded, py::arg("page_table_k"), py::arg("page_table_v"), py::arg("s_quantizer"), py::arg("o_quantizer"),
        py::arg("Bias"), py::arg("SoftmaxOffset"), py::arg("rng_gen"), py::arg("rng_elts_per_thread"),
        py::arg("return_max_logit"), cuda_graph);
  m.def("fused_attn_bwd", fused_attn_bwd, max_q, max_kv, scale, dropout, set_zero, layout, o_format,
        py::arg("do_format"), py::arg("dqkv_layout"), scale_inv, py::arg("do_scale_inv_format"), bias_type, mask,
        softmax, window, diagonal, py::arg("deterministic"), cu_q, cu_kv, q, k, v, py::arg("O"), py::arg("dO"),
        fake_dtype, py::arg("Aux_CTX_Tensors"), cu_q_padded, cu_kv_padded, py::arg("s_quantizer"),
        py::arg("dp_quantizer"), py::arg("dqkv_quantizer"), cuda_graph);
  m.def("copy_to_kv_cache", copy_to_kv_cache, py::arg("new_k"), py::arg("new_v"), py::arg("k_cache"),
        py::arg("v_cache"), py::arg("page_table"), py::arg("cu_new_lens"), py::arg("cu_cached_lens"),
        py::arg("qkv_format"), py::arg("b"), py::arg("max_ctx_len"), py::arg("max_seq_len"),
        py::arg("max_pages_per_seq"), py::arg("is_non_paged"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace weft::te
