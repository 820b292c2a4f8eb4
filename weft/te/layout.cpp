#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <string>
#include <vector>

#include "weft/te/bind.h"
#include "weft/te/host.h"
#include "weft/te/token_rows.h"

// Changes of layout: pure data movement.

namespace weft::te {
namespace {

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

/// Raises unless sequences of at most `longest` rows fit `rows` packed rows.
void check_packed(const char* name, const std::vector<int64_t>& offsets, int64_t batch, int64_t longest, int64_t rows) {
  const auto sequences = static_cast<int64_t>(offsets.size()) - 1;
  TORCH_CHECK_VALUE(sequences >= batch, name, ": cu_seqlens has ", sequences, " sequences, the batch ", batch, ".");
  for (int64_t i = 0; i < batch; ++i) {
    const auto begin = offsets[static_cast<size_t>(i)], end = offsets[static_cast<size_t>(i) + 1];
    TORCH_CHECK_VALUE(end - begin <= longest && end <= rows, name, ": sequence ", i, " has the rows ", begin, " to ",
                      end, ", expected at most ", longest, " rows that end at ", rows, ".");
  }
}

/// [t, h, d] as [b, s, h, d] with zeros after the end of each sequence.
at::Tensor thd_to_bshd(const at::Tensor& tensor, const at::Tensor& cu_seqlens, int64_t b, int64_t max_seq_len) {
  constexpr auto kName = "convert_thd_to_bshd";
  TORCH_CHECK_VALUE(tensor.dim() == 3, kName, ": tensor has shape ", tensor.sizes(), ", expected [t, h, d].");
  const auto offsets = read_offsets(cu_seqlens, "cu_seqlens");
  check_packed(kName, offsets, b, max_seq_len, tensor.size(0));
  const auto from = host(tensor);
  auto result = at::zeros({b, max_seq_len, tensor.size(1), tensor.size(2)}, from.options());
  for (int64_t i = 0; i < b; ++i) {
    const auto begin = offsets[static_cast<size_t>(i)], rows = offsets[static_cast<size_t>(i) + 1] - begin;
    result.select(0, i).narrow(0, 0, rows).copy_(from.narrow(0, begin, rows));
  }
  return on_device(std::move(result), tensor.device());
}

/// The inverse: [b, s, h, d] as [t, h, d]; rows after the last sequence are 0.
at::Tensor bshd_to_thd(const at::Tensor& tensor, const at::Tensor& cu_seqlens, int64_t t) {
  constexpr auto kName = "convert_bshd_to_thd";
  TORCH_CHECK_VALUE(tensor.dim() == 4, kName, ": tensor has shape ", tensor.sizes(), ", expected [b, s, h, d].");
  const auto offsets = read_offsets(cu_seqlens, "cu_seqlens");
  check_packed(kName, offsets, tensor.size(0), tensor.size(1), t);
  const auto from = host(tensor);
  auto result = at::zeros({t, tensor.size(2), tensor.size(3)}, from.options());
  for (int64_t i = 0; i < tensor.size(0); ++i) {
    const auto begin = offsets[static_cast<size_t>(i)], rows = offsets[static_cast<size_t>(i) + 1] - begin;
    result.narrow(0, begin, rows).copy_(from.select(0, i).narrow(0, 0, rows));
  }
  return on_device(std::move(result), tensor.device());
}

/// The queries [s, b, n, h] of a buffer [s, b, n, 3h] stand for all of it: returns [3, b, s, n, h].
at::Tensor prepare_forward(const at::Tensor& qkvi) {
  TORCH_CHECK_VALUE(qkvi.dim() == 4, "fa_prepare_fwd: qkvi has shape ", qkvi.sizes(), ", expected [s, b, n, h].");
  const auto s = qkvi.size(0), b = qkvi.size(1), n = qkvi.size(2), h = qkvi.size(3);
  const bool interleaved =
      qkvi.stride(3) == 1 && qkvi.stride(2) == 3 * h && qkvi.stride(1) == 3 * h * n && qkvi.stride(0) == 3 * h * n * b;
  const auto end = qkvi.storage_offset() + 3 * qkvi.numel();
  const bool complete = static_cast<int64_t>(qkvi.storage().nbytes() / qkvi.itemsize()) >= end;
  TORCH_CHECK_VALUE(interleaved && complete, "fa_prepare_fwd: qkvi has strides ", qkvi.strides(),
                    ", expected the queries of a buffer [s, b, n, 3h] with interleaved queries, keys and values.");
  const auto all = host(qkvi).as_strided({s, b, n, 3, h}, {b * n * 3 * h, n * 3 * h, 3 * h, h, 1});
  return on_device(all.permute({3, 1, 0, 2, 4}).clone(at::MemoryFormat::Contiguous), qkvi.device());
}

/// Three tensors [b, s, n, h] as [s, b, n, 3h].
at::Tensor prepare_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  TORCH_CHECK_VALUE(q.dim() == 4 && k.sizes() == q.sizes() && v.sizes() == q.sizes(),
                    "fa_prepare_bwd: q, k and v have ", "shapes ", q.sizes(), ", ", k.sizes(), " and ", v.sizes(),
                    ", expected equal ones, [b, s, n, h].");
  return on_device(at::cat({host(q), host(k), host(v)}, -1).transpose(0, 1).contiguous(), q.device());
}

/// Copies `from` [b, h, s, d] into `to`, whose last dimension may be longer: the rest becomes 0.
void copy_padded(const at::Tensor& from, const at::Tensor& to) {
  const auto channels = from.size(3);
  const bool fits = to.dim() == 4 && to.sizes().slice(0, 3) == from.sizes().slice(0, 3) && to.size(3) >= channels;
  TORCH_CHECK_VALUE(fits, "multi_tensor_transpose_to_bhsd: an output has shape ", to.sizes(), ", expected ",
                    from.sizes(), " or a longer last dimension.");
  to.narrow(3, 0, channels).copy_(from);
  to.narrow(3, channels, to.size(3) - channels).zero_();
}

OptionalTensors transpose_to_bhsd(const OptionalTensors& inputs, const std::string& original_format,
                                  const OptionalTensors& outputs) {
  constexpr auto kName = "multi_tensor_transpose_to_bhsd";
  TORCH_CHECK_VALUE(original_format == "sbhd" || original_format == "bshd", kName, ": original_format is '",
                    original_format, "', expected 'sbhd' or 'bshd'.");
  TORCH_CHECK_VALUE(outputs.empty() || outputs.size() == inputs.size(), kName, ": expected ", inputs.size(),
                    " outputs, got ", outputs.size(), ".");
  OptionalTensors result(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i]) continue;
    TORCH_CHECK_VALUE(inputs[i]->dim() == 4, kName, ": input ", i, " has shape ", inputs[i]->sizes(),
                      ", expected 4 dimensions.");
    const auto from =
        original_format == "sbhd" ? host(inputs[i]).permute({1, 2, 0, 3}) : host(inputs[i]).permute({0, 2, 1, 3});
    const bool given = !outputs.empty() && outputs[i];
    result[i] = given ? *outputs[i] : at::empty(from.sizes(), inputs[i]->options());
    copy_padded(from, host(result[i]));
  }
  return result;
}

/// Matrices with zeros appended to the rows, so that their lengths are multiples of `alignment`.
std::vector<at::Tensor> pad_last_dim(const std::vector<at::Tensor>& inputs, int64_t alignment) {
  constexpr auto kName = "multi_tensor_pad_last_dim";
  TORCH_CHECK_VALUE(alignment > 0, kName, ": alignment is ", alignment, ", expected a positive number.");
  std::vector<at::Tensor> result;
  for (const auto& input : inputs) {
    TORCH_CHECK_VALUE(input.dim() == 2, kName, ": an input has shape ", input.sizes(), ", expected 2 dimensions.");
    const auto missing = (alignment - input.size(1) % alignment) % alignment;
    result.push_back(missing == 0 ? input.contiguous()
                                  : on_device(at::constant_pad_nd(host(input), {0, missing}), input.device()));
  }
  return result;
}

at::Tensor swap_first_dims(const at::Tensor& tensor, const std::optional<at::Tensor>& out) {
  TORCH_CHECK_VALUE(tensor.dim() >= 2, "swap_first_dims: tensor has shape ", tensor.sizes(),
                    ", expected at least 2 dimensions.");
  const auto swapped = host(tensor).transpose(0, 1);
  if (!out) return on_device(swapped.clone(at::MemoryFormat::Contiguous), tensor.device());
  TORCH_CHECK_VALUE(out->numel() == tensor.numel(), "swap_first_dims: out has shape ", out->sizes(), ", expected ",
                    swapped.sizes(), ".");
  host(*out).view(swapped.sizes()).copy_(swapped);
  return *out;
}

}  // namespace

void bind_layout(py::module_& m) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  m.def("convert_thd_to_bshd", thd_to_bshd, py::arg("tensor"), py::arg("cu_seqlens"), py::arg("b"),
        py::arg("max_seq_len"), release);
  m.def("convert_bshd_to_thd", bshd_to_thd, py::arg("tensor"), py::arg("cu_seqlens"), py::arg("t"), release);
  m.def("fa_prepare_fwd", prepare_forward, py::arg("qkvi"), release);
  m.def("fa_prepare_bwd", prepare_backward, py::arg("q"), py::arg("k"), py::arg("v"), release);
  m.def("multi_tensor_transpose_to_bhsd", transpose_to_bhsd, py::arg("inputs"), py::arg("original_format"),
        py::arg("outputs") = OptionalTensors(), release);
  m.def("multi_tensor_pad_last_dim", pad_last_dim, py::arg("inputs"), py::arg("alignment"), release);
  m.def("swap_first_dims", swap_first_dims, py::arg("tensor"), py::kw_only(), py::arg("out"), release);
}

}  // namespace weft::te
