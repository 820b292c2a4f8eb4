#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/utils/pybind.h>

#include <numeric>
#include <string>
#include <vector>

#include "weft/kernels/quantize_math.h"
#include "weft/te/dtype.h"
#include "weft/te/host.h"
#include "weft/te/quantized_buffers.h"
#include "weft/te/quantized_tensor.h"
#include "weft/te/strict.h"

// A grouped tensor holds matrices one after the other in flat buffers: their data at the offsets of their elements,
// their padded scales one after the other, and one amax and one scale each.

namespace weft::te {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

/// Where the matrices of a group lie.
struct Members {
  std::vector<std::vector<int64_t>> sizes;
  std::vector<int64_t> starts;  // of their elements
  size_t count() const { return sizes.size(); }
};

/// The sizes of a group as Python gives them: tensors of sizes that vary, and of the offsets.
struct GroupShape {
  int64_t count = 0, rows = 0, columns = 0;  // rows and columns of the whole
  OptionalTensor first_dims = {}, last_dims = {}, tensor_offsets = {};

  bool varies() const { return first_dims || last_dims; }
};

std::vector<int64_t> host_values(const at::Tensor& t) {
  const auto values = host(t).to(at::kLong).contiguous();
  return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
}

/// One size per matrix: those that vary, or the common one.
std::vector<int64_t> member_dims(const char* name, const OptionalTensor& varying, int64_t common, int64_t count) {
  if (!varying) return std::vector<int64_t>(count, common);
  auto dims = host_values(*varying);
  TORCH_CHECK_VALUE(static_cast<int64_t>(dims.size()) == count, "grouped tensor: ", name, " has ", dims.size(),
                    " elements, expected ", count, ", one per matrix.");
  return dims;
}

Members members_of(const GroupShape& shape) {
  TORCH_CHECK_VALUE(shape.count > 0 && (shape.varies() || shape.rows % shape.count == 0),
                    "grouped tensor: ", shape.rows, " rows cannot be divided into ", shape.count,
                    " matrices of the same size.");
  const auto common_rows = shape.last_dims ? shape.rows : shape.rows / shape.count;
  const auto rows = member_dims("first_dims", shape.first_dims, common_rows, shape.count);
  const auto columns = member_dims("last_dims", shape.last_dims, shape.columns, shape.count);
  auto starts = shape.tensor_offsets ? host_values(*shape.tensor_offsets) : std::vector<int64_t>{0};
  TORCH_CHECK_VALUE(!shape.tensor_offsets || static_cast<int64_t>(starts.size()) == shape.count + 1,
                    "grouped tensor: tensor_offsets has ", starts.size(), " elements, expected ", shape.count + 1, ".");
  Members members;
  for (int64_t i = 0; i < shape.count; ++i) {
    const auto elements = rows[i] * columns[i];
    if (!shape.tensor_offsets) starts.push_back(starts[i] + elements);
    TORCH_CHECK_VALUE(
        rows[i] >= 0 && columns[i] >= 0 && starts[i] >= 0 && starts[i] + elements <= shape.rows * shape.columns,
        "grouped tensor: matrix ", i, " of ", rows[i], " x ", columns[i], " elements from ", starts[i],
        " on is not in a tensor of ", shape.rows, " x ", shape.columns, ".");
    members.sizes.push_back({rows[i], columns[i]});
    members.starts.push_back(starts[i]);
  }
  return members;
}

/// What Python computes from splits: the offsets of the matrices' elements; none if all have the same sizes.
OptionalTensor offsets_of(const GroupShape& shape, c10::Device device) {
  if (shape.tensor_offsets || !shape.varies()) return shape.tensor_offsets;
  auto offsets = at::empty({shape.count + 1}, at::kLong);
  auto* const out = offsets.mutable_data_ptr<int64_t>();
  out[0] = 0;
  const auto members = members_of(shape);
  for (int64_t i = 0; i < shape.count; ++i) out[i + 1] = out[i] + members.sizes[i][0] * members.sizes[i][1];
  return on_device(offsets, device);
}

/// The flat buffers of a grouped tensor.
struct GroupBuffers {
  CopyBuffers rowwise, columnwise;
  at::Tensor scale;
  CopyBuffers& copy(bool is_columnwise) { return is_columnwise ? columnwise : rowwise; }
  const CopyBuffers& copy(bool is_columnwise) const { return is_columnwise ? columnwise : rowwise; }
};

/// A group of quantized matrices: one set of buffers per matrix, as views.
struct Group {
  GroupShape shape;
  Members members;
  QuantizedBuffers format;  // without memory; its sizes are those of the whole
  GroupBuffers flat;
};

int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

QuantizedBuffers with_sizes(QuantizedBuffers format, const std::vector<int64_t>& sizes) {
  format.sizes = sizes;
  return format;
}

/// The buffers of matrix i; views of the flat ones, on the CPU.
QuantizedBuffers member_buffers(const Group& group, size_t i) {
  auto b = with_sizes(group.format, group.members.sizes[i]);
  for (const bool columnwise : {false, true}) {
    const auto& flat = group.flat.copy(columnwise);
    if (!flat.data.defined()) continue;
    auto& copy = b.copy(columnwise);
    const auto sizes = data_sizes(b, columnwise);
    const auto start = b.layout == Layout::nvfp4 ? group.members.starts[i] / 2 : group.members.starts[i];
    copy.data = host(flat.data).view(-1).narrow(0, start, product(sizes)).view(sizes);
    int64_t scales_before = 0, maxima_before = 0;
    for (size_t j = 0; j < i; ++j) {
      const auto other = with_sizes(group.format, group.members.sizes[j]);
      scales_before += product(scale_sizes(other, columnwise));
      maxima_before += amax_count(other, columnwise);
    }
    const auto scales = scale_sizes(b, columnwise);
    copy.scales = host(flat.scales).view(-1).narrow(0, scales_before, product(scales)).view(scales);
    if (!flat.amax.defined()) continue;
    copy.amax = b.layout == Layout::per_tensor
                    ? host(flat.amax).view(-1).narrow(0, static_cast<int64_t>(i), 1)
                    : host(flat.amax).view(-1).narrow(0, maxima_before, amax_count(b, columnwise));
  }
  return b;
}

/// The flat length of the scales: what a GPU's kernels allocate without reading the splits, and at least what the
/// matrices need.
int64_t flat_scales(const Group& group, bool columnwise) {
  const auto& format = group.format;
  if (format.layout == Layout::per_tensor) return group.shape.count;
  int64_t needed = 0;
  for (const auto& sizes : group.members.sizes) needed += product(scale_sizes(with_sizes(format, sizes), columnwise));
  auto allocated = product(scale_sizes(format, columnwise));
  if (format.layout == Layout::mxfp8 && group.shape.first_dims && group.shape.last_dims)
    allocated = format.rows() * format.columns() / 32;
  if (format.layout == Layout::block && format.how.two_dimensional && columnwise)
    allocated += (format.columns() + 127) / 128 * 4 * (group.shape.count - 1);
  return std::max(needed, allocated);
}

int64_t flat_maxima(const Group& group, bool columnwise) {
  const auto& format = group.format;
  if (format.layout == Layout::per_tensor) return group.shape.count;
  if (format.layout != Layout::nvfp4) return 0;
  if (!format.how.row_scaled) return group.shape.count;
  return columnwise ? group.shape.count * format.columns() : format.rows();
}

void allocate_flat(Group& group, const QuantizerView& quantizer, const at::TensorOptions& options) {
  const auto elements = group.shape.rows * group.shape.columns;
  const auto bytes = options.dtype(at::kByte), floats = options.dtype(at::kFloat);
  const auto requested = requested_copies(quantizer);
  for (const bool columnwise : {false, true}) {
    if (!requested[columnwise]) continue;
    auto& copy = group.flat.copy(columnwise);
    copy.data = at::empty({group.format.layout == Layout::nvfp4 ? elements / 2 : elements}, bytes);
    copy.scales = at::empty({flat_scales(group, columnwise)}, options.dtype(scale_dtype(group.format.layout)));
    const auto maxima = flat_maxima(group, columnwise);
    if (maxima > 0) copy.amax = at::empty({maxima}, floats);
  }
  if (group.format.layout != Layout::per_tensor) return;
  auto& [rowwise, columnwise, scale] = group.flat;
  if (rowwise.data.defined() && columnwise.data.defined()) columnwise.scales = rowwise.scales;
  if (!rowwise.amax.defined()) rowwise.amax = columnwise.amax;
  columnwise.amax = rowwise.amax;
  scale = at::empty({group.shape.count}, floats);
}

QuantizerView view_for_group(const char* who, py::handle quantizer) {
  auto view = view_quantizer(quantizer);
  TORCH_CHECK_TYPE(view.layout != Layout::python && view.kind != QuantizerKind::delayed, who,
                   ": expected a quantizer with current scaling, FP8 blocks, MXFP8 or NVFP4, got ",
                   py::str(py::type::of(quantizer)).cast<std::string>(), ".");
  return view;
}

Group new_group(const GroupShape& shape, const QuantizerView& quantizer, c10::Device device) {
  Group group{
      .shape = shape,
      .members = members_of(shape),
      .format = {.layout = quantizer.layout, .how = quantizer.how, .sizes = {}, .rowwise = {}, .columnwise = {}},
      .flat = {}};
  group.shape.tensor_offsets = offsets_of(shape, device);
  auto& format = group.format;
  format.sizes = {shape.rows, shape.columns};
  format.random_signs = quantizer.random_signs;
  format.swizzled = quantizer.optimize_for_gemm && (format.layout == Layout::mxfp8 || format.layout == Layout::nvfp4);
  allocate_flat(group, quantizer, at::TensorOptions().device(device));
  return group;
}

/// The group that a Python object holds, with values scaled as its quantizer does.
Group read_group(py::handle tensor, const QuantizerView& quantizer) {
  const auto sizes = tensor.attr("logical_shape").cast<std::vector<int64_t>>();
  const auto optional = [&](const char* name) {
    const auto t = optional_tensor(tensor, name);
    return t.defined() ? OptionalTensor(t) : std::nullopt;
  };
  const GroupShape shape{.count = tensor.attr("num_tensors").cast<int64_t>(),
                         .rows = sizes.at(0),
                         .columns = sizes.at(1),
                         .first_dims = optional("first_dims"),
                         .last_dims = optional("last_dims"),
                         .tensor_offsets = optional("tensor_offsets")};
  const auto read = [&](const char* name) { return optional_tensor(tensor, name); };
  return {.shape = shape,
          .members = members_of(shape),
          .format = {.layout = quantizer.layout,
                     .how = quantizer.how,
                     .sizes = sizes,
                     .rowwise = {},
                     .columnwise = {},
                     .swizzled = py::getattr(tensor, "_with_gemm_swizzled_scales", py::cast(false)).cast<bool>(),
                     .random_signs = quantizer.random_signs},
          .flat = {.rowwise = {read("rowwise_data"), read("scale_inv"), read("amax")},
                   .columnwise = {read("columnwise_data"), read("columnwise_scale_inv"), read("columnwise_amax")},
                   .scale = read("scale")}};
}

at::Tensor member_values(const at::Tensor& flat, const Members& members, size_t i) {
  const auto& sizes = members.sizes[i];
  return flat.narrow(0, members.starts[i], product(sizes)).view(sizes);
}

/// What the kernels of a GPU that quantize a group require.
void check_group_limits(const char* who, const QuantizerView& quantizer, const GroupShape& shape) {
  const auto& how = quantizer.how;
  if (quantizer.layout == Layout::mxfp8)
    require_on_gpu(shape.rows % 128 == 0 || (shape.first_dims && shape.last_dims), who,
                   "GPUs quantize a group to MXFP8 if its rows together are a multiple of 128, got ", shape.rows, ".");
  if (quantizer.layout != Layout::nvfp4) return;
  require_on_gpu(shape.rows % 128 == 0 && shape.columns % 128 == 0, who,
                 "GPUs quantize a group to NVFP4 if its rows together and its columns are multiples of 128, got ",
                 shape.rows, " and ", shape.columns, ".");
  require_on_gpu(shape.count <= 64, who, "GPUs quantize at most 64 matrices to NVFP4, got ", shape.count, ".");
  require_on_gpu(
      how.hadamard && !how.two_dimensional && how.four_over_six == kernels::FourOverSix::none && !shape.last_dims, who,
      "GPUs quantize a group to NVFP4 with RHT only, without square blocks, 4over6 or last_dims.");
}

/// Quantizes the matrices of x into the buffers of the group.
void fill_group(const at::Tensor& x, const QuantizerView& quantizer, const Group& group, c10::Device device,
                const KnownAmax& known = {}) {
  const at::NoGradGuard no_grad;
  if (x.numel() > 0) check_group_limits("group_quantize", quantizer, group.shape);
  const auto flat = host(x).detach().contiguous().view(-1);
  const auto one = [&](const at::Tensor& t, size_t i) {
    return t.defined() ? host(t).view(-1).narrow(0, static_cast<int64_t>(i), 1) : at::Tensor();
  };
  for (size_t i = 0; i < group.members.count(); ++i) {
    const auto buffers = member_buffers(group, i);
    const auto name = "group_quantize, matrix " + std::to_string(i) + ",";
    if (buffers.layout == Layout::mxfp8) check_whole_blocks(name.c_str(), buffers.rows(), buffers.columns(), 32);
    if (buffers.layout == Layout::nvfp4) check_whole_blocks(name.c_str(), buffers.rows(), buffers.columns(), 16);
    fill_buffers(member_values(flat, group.members, i), quantizer, buffers, device,
                 {one(known.rowwise, i), one(known.columnwise, i)});
    if (!group.flat.scale.defined()) continue;
    const float amax = *buffers.rowwise.amax.const_data_ptr<float>(), max = traits_of(quantizer.how.format).max;
    host(group.flat.scale).mutable_data_ptr<float>()[i] =
        kernels::float32_scale(amax, max, quantizer.how.epsilon, FLT_MAX, quantizer.how.power_of_two);
  }
}

py::object as_python(const at::Tensor& t) { return t.defined() ? py::cast(t) : py::none(); }
py::object as_python(const OptionalTensor& t) { return t ? py::cast(*t) : py::none(); }

py::dict group_keywords(const GroupShape& shape, at::ScalarType dtype, const GroupBuffers& flat, py::handle quantizer) {
  py::dict keywords;
  keywords["shape"] = py::cast(std::vector{shape.rows, shape.columns});
  keywords["dtype"] = py::cast(dtype);
  keywords["num_tensors"] = shape.count;
  keywords["quantizer"] = quantizer;
  keywords["data"] = as_python(flat.rowwise.data);
  keywords["columnwise_data"] = as_python(flat.columnwise.data);
  keywords["scale_inv"] = as_python(flat.rowwise.scales);
  keywords["columnwise_scale_inv"] = as_python(flat.columnwise.scales);
  keywords["amax"] = as_python(flat.rowwise.amax);
  keywords["columnwise_amax"] = as_python(flat.columnwise.amax);
  keywords["scale"] = as_python(flat.scale);
  keywords["first_dims"] = as_python(shape.first_dims);
  keywords["last_dims"] = as_python(shape.last_dims);
  keywords["tensor_offsets"] = as_python(shape.tensor_offsets);
  return keywords;
}

py::object make_grouped_tensor(const Group& group, const QuantizerView& quantizer, at::ScalarType dtype) {
  auto flat = group.flat;
  if (group.format.layout == Layout::per_tensor) flat.columnwise.amax.reset();
  auto keywords = group_keywords(group.shape, dtype, flat, quantizer.object);
  keywords["with_gemm_swizzled_scales"] = group.format.swizzled;
  if (group.format.layout == Layout::nvfp4) {
    keywords["row_scaled_nvfp4"] = quantizer.how.row_scaled;
    keywords["nvfp4_use_4over6"] = quantizer.how.four_over_six != kernels::FourOverSix::none;
    keywords["nvfp4_e4m3_max"] = static_cast<int>(quantizer.how.scale_bound);
  }
  return grouped_tensor_class(quantizer.internal)(**keywords);
}

GroupShape shape_of(const char* who, const at::Tensor& tensor, int64_t count, const OptionalTensor& first_dims,
                    const OptionalTensor& last_dims, const OptionalTensor& tensor_offsets) {
  TORCH_CHECK_VALUE(tensor.dim() == 2, who, ": expected a matrix, got shape ", tensor.sizes(), ".");
  return {count, tensor.size(0), tensor.size(1), first_dims, last_dims, tensor_offsets};
}

/// The group of an object that is filled again.
Group group_to_fill(const GroupShape& shape, py::handle quantizer, const QuantizerView& view, py::handle output) {
  auto group = read_group(output, view);
  TORCH_CHECK_VALUE(!shape.varies() && !shape.tensor_offsets && group.shape.count == shape.count &&
                        group.shape.rows == shape.rows && group.shape.columns == shape.columns,
                    "group_quantize: output holds ", group.shape.count, " matrices in ", group.shape.rows, " x ",
                    group.shape.columns, " values, expected ", shape.count, " of the same size in ", shape.rows, " x ",
                    shape.columns, ".");
  TORCH_CHECK_VALUE(py::object(output.attr("quantizer")).is(quantizer),
                    "group_quantize: output was made by another quantizer. Pass the same one.");
  if (group.format.layout == Layout::per_tensor) group.flat.columnwise.amax = group.flat.rowwise.amax;
  return group;
}

py::object group_quantize(const at::Tensor& tensor, py::handle quantizer, int64_t num_tensors,
                          const OptionalTensor& first_dims, const OptionalTensor& last_dims,
                          const OptionalTensor& tensor_offsets, const OptionalTensor& noop_flag,
                          const py::object& output) {
  const auto* const who = "group_quantize";
  const auto shape = shape_of(who, tensor, num_tensors, first_dims, last_dims, tensor_offsets);
  const auto view = view_for_group(who, quantizer);
  const auto group =
      output.is_none() ? new_group(shape, view, tensor.device()) : group_to_fill(shape, quantizer, view, output);
  if (!noop_flag || host(*noop_flag).item<float>() != 1) fill_group(tensor, view, group, tensor.device());
  return output.is_none() ? make_grouped_tensor(group, view, tensor.scalar_type()) : output;
}

py::object nvfp4_group_quantize_with_amax(const at::Tensor& tensor, py::handle quantizer, int64_t num_tensors,
                                          const OptionalTensor& first_dims, const OptionalTensor& last_dims,
                                          const at::Tensor& rowwise_amax, const at::Tensor& columnwise_amax,
                                          const OptionalTensor& tensor_offsets) {
  const auto* const who = "nvfp4_group_quantize_with_amax";
  const auto view = view_for_group(who, quantizer);
  TORCH_CHECK_TYPE(view.kind == QuantizerKind::nvfp4, who, ": expected an NVFP4Quantizer.");
  for (const auto* amax : {&rowwise_amax, &columnwise_amax})
    TORCH_CHECK_VALUE(amax->scalar_type() == at::kFloat && amax->numel() == num_tensors, who, ": expected ",
                      num_tensors, " float32 maxima, got ", amax->scalar_type(), " of shape ", amax->sizes(), ".");
  auto group =
      new_group(shape_of(who, tensor, num_tensors, first_dims, last_dims, tensor_offsets), view, tensor.device());
  if (group.flat.rowwise.amax.defined()) group.flat.rowwise.amax = rowwise_amax;
  if (group.flat.columnwise.amax.defined()) group.flat.columnwise.amax = columnwise_amax;
  fill_group(tensor, view, group, tensor.device(), {rowwise_amax, columnwise_amax});
  return make_grouped_tensor(group, view, tensor.scalar_type());
}

/// The sums of the rows of each matrix: [matrices, columns].
at::Tensor bias_gradients(const at::Tensor& tensor, const Members& members) {
  const at::NoGradGuard no_grad;
  const auto flat = host(tensor).detach().contiguous().view(-1);
  auto sums = at::zeros({static_cast<int64_t>(members.count()), tensor.size(1)}, flat.options());
  for (size_t i = 0; i < members.count(); ++i)
    sums.select(0, static_cast<int64_t>(i))
        .copy_(member_values(flat, members, i).sum(at::IntArrayRef{0}, /*keepdim=*/false, at::kFloat));
  return on_device(sums, tensor.device());
}

py::tuple bgrad_group_quantize(const at::Tensor& tensor, py::handle quantizer, int64_t num_tensors,
                               const OptionalTensor& first_dims, const OptionalTensor& last_dims,
                               const OptionalTensor& tensor_offsets) {
  const auto* const who = "bgrad_group_quantize";
  TORCH_CHECK_VALUE(!last_dims, who, ": the matrices must have the same number of columns; omit last_dims.");
  const auto view = view_for_group(who, quantizer);
  const auto group =
      new_group(shape_of(who, tensor, num_tensors, first_dims, last_dims, tensor_offsets), view, tensor.device());
  fill_group(tensor, view, group, tensor.device());
  return py::make_tuple(make_grouped_tensor(group, view, tensor.scalar_type()), bias_gradients(tensor, group.members));
}

/// The values of all matrices, flat, on the device of the group.
at::Tensor decode_group(const Group& group, at::ScalarType dtype) {
  const auto& data = group.flat.copy(!group.flat.rowwise.data.defined()).data;
  TORCH_CHECK_VALUE(data.defined(), "group_dequantize: the grouped tensor has no data.");
  const auto values = at::zeros({group.shape.rows * group.shape.columns}, dtype);
  for (size_t i = 0; i < group.members.count(); ++i)
    member_values(values, group.members, i).copy_(decode_buffers(member_buffers(group, i), dtype));
  return on_device(values, data.device());
}

py::object group_dequantize(py::handle input, DType otype) {
  const auto view = view_for_group("group_dequantize", input.attr("quantizer"));
  const auto group = read_group(input, view);
  const auto dtype = scalar_type(otype);
  GroupBuffers flat;
  flat.rowwise.data = decode_group(group, dtype);
  return grouped_tensor_class(/*internal=*/false)(**group_keywords(group.shape, dtype, flat, py::none()));
}

/// The flat scales of a copy in the layout of a GPU's GEMMs.
at::Tensor swizzled_group_scales(const Group& group, bool columnwise) {
  const auto& scales = group.flat.copy(columnwise).scales;
  const auto swizzled = at::zeros({scales.numel()}, at::kByte);
  int64_t begin = 0;
  for (size_t i = 0; i < group.members.count(); ++i) {
    const auto member = swizzled_scales(member_buffers(group, i), columnwise).view(-1);
    swizzled.narrow(0, begin, member.numel()).copy_(member);
    begin += member.numel();
  }
  return on_device(swizzled.view(scales.sizes()), scales.device());
}

void swizzle_group(py::handle tensor, bool rowwise, bool columnwise) {
  const auto quantizer = py::getattr(tensor, "quantizer", py::none());
  if (kind_of_quantizer(quantizer) != QuantizerKind::mxfp8) return;
  const auto group = read_group(tensor, view_quantizer(quantizer));
  if (group.format.swizzled) return;
  const bool requested[] = {rowwise && group.flat.rowwise.scales.defined(),
                            columnwise && group.flat.columnwise.scales.defined()};
  if (!requested[0] && !requested[1]) return;
  const char* const names[] = {"scale_inv", "columnwise_scale_inv"};
  for (const bool is_columnwise : {false, true}) {
    at::Tensor scales;
    if (requested[is_columnwise]) scales = swizzled_group_scales(group, is_columnwise);
    tensor.attr(names[is_columnwise]) = as_python(scales);  // scales that were not swizzled would be misread
  }
  tensor.attr("_with_gemm_swizzled_scales") = true;
}

/// Raises unless the grouped tensor has what a GEMM will read, or what that can be made from.
void check_requantization(py::handle grouped_x, const Group& group, py::handle quantizer, bool needs_columnwise,
                          bool return_dequantized) {
  const bool has_columnwise = group.flat.columnwise.data.defined() && group.flat.columnwise.scales.defined();
  TORCH_CHECK(group.flat.rowwise.data.defined() && group.flat.rowwise.scales.defined(),
              "group_requantize_inplace: the grouped tensor has no rowwise data and scales.");
  const auto own = grouped_x.attr("quantizer");
  TORCH_CHECK(py::type::of(own).is(py::type::of(quantizer)),
              "group_requantize_inplace: the quantizers of the grouped tensor and of the operation differ in format.");
  TORCH_CHECK(own.attr("dtype").cast<DType>() == quantizer.attr("dtype").cast<DType>(),
              "group_requantize_inplace: the quantizers of the grouped tensor and of the operation differ in dtype.");
  if (!group.format.swizzled) {
    TORCH_CHECK(!has_columnwise,
                "group_requantize_inplace: the columnwise copy exists already, but its scales are not swizzled.");
    TORCH_CHECK(group.format.layout == Layout::mxfp8, "group_requantize_inplace: expected an MXFP8Quantizer.");
    return;
  }
  TORCH_CHECK(has_columnwise || !needs_columnwise,
              "group_requantize_inplace: the scales are swizzled and there is no columnwise copy, which cannot be "
              "rebuilt: that requires scales in compact format.");
  TORCH_CHECK(!return_dequantized,
              "group_requantize_inplace: return_dequantized requires scales in compact format, but they are swizzled.");
}

py::object group_requantize_inplace(py::handle grouped_x, py::handle quantizer, int64_t num_tensors,
                                    const OptionalTensor& first_dims, DType otype, const OptionalTensor& tensor_offsets,
                                    bool return_dequantized) {
  const auto* const who = "group_requantize_inplace";
  auto group = read_group(grouped_x, view_for_group(who, grouped_x.attr("quantizer")));
  const bool needs_columnwise = quantizer.attr("columnwise_usage").cast<bool>();
  check_requantization(grouped_x, group, quantizer, needs_columnwise, return_dequantized);
  if (group.format.swizzled) return py::none();
  TORCH_CHECK(!strict() || (group.shape.rows % 128 == 0 && group.shape.columns % 128 == 0), who,
              ": expected multiples of 128 rows and columns, got ", group.shape.rows, " x ", group.shape.columns, ".");
  if (first_dims) group.shape.first_dims = first_dims;
  if (tensor_offsets && tensor_offsets->numel() == num_tensors + 1) group.shape.tensor_offsets = tensor_offsets;
  group.members = members_of(group.shape);
  at::Tensor values;
  if (needs_columnwise || return_dequantized)
    values = decode_group(group, scalar_type(otype)).view({group.shape.rows, group.shape.columns});
  grouped_x.attr("scale_inv") = swizzled_group_scales(group, /*columnwise=*/false);
  grouped_x.attr("_with_gemm_swizzled_scales") = true;
  if (needs_columnwise) {
    auto view = view_for_group(who, quantizer);
    view.rowwise = false;
    view.optimize_for_gemm = true;
    const auto columnwise = new_group(group.shape, view, values.device());
    fill_group(values, view, columnwise, values.device());
    grouped_x.attr("columnwise_data") = columnwise.flat.columnwise.data;
    grouped_x.attr("columnwise_scale_inv") = columnwise.flat.columnwise.scales;
  }
  return return_dequantized ? py::cast(values) : py::none();
}

}  // namespace

void bind_grouped_tensor(py::module_& m) {
  m.def("group_quantize", group_quantize, py::arg("tensor"), py::arg("quantizer"), py::arg("num_tensors"),
        py::arg("first_dims"), py::arg("last_dims") = py::none(), py::arg("tensor_offsets") = py::none(),
        py::arg("noop_flag") = py::none(), py::arg("output") = py::none());
  m.def("nvfp4_group_quantize_with_amax", nvfp4_group_quantize_with_amax, py::arg("tensor"), py::arg("quantizer"),
        py::arg("num_tensors"), py::arg("first_dims"), py::arg("last_dims") = py::none(), py::arg("rowwise_amax"),
        py::arg("columnwise_amax"), py::arg("tensor_offsets") = py::none());
  m.def("bgrad_group_quantize", bgrad_group_quantize, py::arg("tensor"), py::arg("quantizer"), py::arg("num_tensors"),
        py::arg("first_dims"), py::arg("last_dims") = py::none(), py::arg("tensor_offsets") = py::none());
  m.def("group_dequantize", group_dequantize, py::arg("input"), py::arg("otype"));
  m.def("group_requantize_inplace", group_requantize_inplace, py::arg("grouped_x"), py::arg("quantizer"),
        py::arg("num_tensors"), py::arg("first_dims"), py::arg("otype"), py::arg("tensor_offsets") = py::none(),
        py::arg("return_dequantized") = false);
  m.def("grouped_swizzle_for_gemm", swizzle_group, py::arg("tensor"), py::arg("rowwise"), py::arg("columnwise"));
}

}  // namespace weft::te
