#include "weft/te/grouped_mlp.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "weft/core/dispatch_keys.h"
#include "weft/te/host.h"
#include "weft/te/quantized_buffers.h"

namespace weft::te {

at::Tensor copy_data_ptrs_to_device(const std::vector<at::Tensor>& tensors, c10::Device device) {
  auto addresses = at::empty({static_cast<int64_t>(tensors.size())}, at::kLong);
  auto* address = addresses.mutable_data_ptr<int64_t>();
  for (const auto& t : tensors) *address++ = reinterpret_cast<int64_t>(t.const_data_ptr());
  return on_device(std::move(addresses), device);
}

namespace {

constexpr const char* kSwizzleAndPack = "swizzle_scales_and_pack_ptrs_for_discrete_weights";

/// The buffers of a weight with this data and these scales, and which of its copies they are.
struct WeightCopy {
  QuantizedBuffers buffers;
  bool columnwise;

  WeightCopy(const std::string& type, const at::Tensor& data, const at::Tensor& scales)
      : buffers{.layout = type == "nvfp4" ? Layout::nvfp4 : Layout::mxfp8,
                .how = {.block = type == "nvfp4" ? 16 : 32},
                .sizes = data.sizes().vec(),
                .rowwise = {},
                .columnwise = {}},
        columnwise(type == "mxfp8_columnwise") {
    TORCH_CHECK_VALUE(columnwise || type == "mxfp8_rowwise" || type == "nvfp4", kSwizzleAndPack, ": swizzle_type is '",
                      type, "', expected mxfp8_rowwise, mxfp8_columnwise or nvfp4.");
    if (type == "nvfp4") buffers.sizes.back() *= 2;
    const auto expected = scale_sizes(buffers, columnwise);
    TORCH_CHECK_VALUE(scales.sizes() == at::IntArrayRef(expected) && scales.element_size() == 1, kSwizzleAndPack,
                      ": the scales of data of shape ", data.sizes(), " have shape ", scales.sizes(), ", expected ",
                      at::IntArrayRef(expected), " bytes.");
    buffers.copy(columnwise).scales = without_padding(host(scales).view(at::kByte));
  }

 private:
  /// A copy with zeros as padding.
  at::Tensor without_padding(const at::Tensor& scales) const {
    const auto block = buffers.how.block;
    const auto rows = columnwise ? buffers.rows() / block : buffers.rows();
    const auto columns = columnwise ? buffers.columns() : buffers.columns() / block;
    auto out = at::zeros(scales.sizes(), at::kByte);
    const auto used = [&](const at::Tensor& t) { return t.narrow(0, 0, rows).narrow(1, 0, columns); };
    used(out).copy_(used(scales));
    return out;
  }
};

/// The addresses of the data and of the swizzled scales of weights of one size, and the memory of those scales.
std::tuple<at::Tensor, at::Tensor, at::Tensor> swizzle_and_pack(const std::vector<at::Tensor>& data,
                                                                const std::vector<at::Tensor>& scales,
                                                                const std::string& type, c10::Device device) {
  TORCH_CHECK_VALUE(data.size() == scales.size(), kSwizzleAndPack, ": got ", data.size(), " data tensors and ",
                    scales.size(), " tensors of scales, expected as many.");
  const BelowAutograd below;
  constexpr int64_t kAlignment = 16;
  const auto bytes = scales.empty() ? 0 : scales[0].numel();
  const auto stride = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const auto swizzled = on_device(at::zeros({stride * static_cast<int64_t>(data.size())}, at::kByte), device);
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < data.size(); ++i) {
    const WeightCopy weight(type, data[i], scales[i]);
    TORCH_CHECK_VALUE(scales[i].numel() == bytes, kSwizzleAndPack, ": the weights have different sizes.");
    parts.push_back(swizzled.narrow(0, static_cast<int64_t>(i) * stride, bytes));
    host(parts.back()).copy_(swizzled_scales(weight.buffers, weight.columnwise).view({-1}));
  }
  return {copy_data_ptrs_to_device(data, device), copy_data_ptrs_to_device(parts, device), swizzled};
}

}  // namespace

void bind_grouped_mlp(py::module_& m) {
  auto grouped_mlp =
      m.def_submodule("grouped_mlp_experimental", "Operands of cuDNN's grouped GEMM kernels, which need a GPU.");
  grouped_mlp.def(kSwizzleAndPack, &swizzle_and_pack, py::arg("data_tensors"), py::arg("scale_tensors"),
                  py::arg("swizzle_type"), py::arg("device"));
}

}  // namespace weft::te
