#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "weft/te/bind.h"
#include "weft/te/host.h"

// Consecutive groups of rows of a matrix, with other numbers of rows in the output: more, padded with zeros, or fewer.

namespace weft::te {
namespace {

using Rows = std::vector<int64_t>;

void check_groups(const char* who, const char* name, const at::Tensor& matrix, const Rows& rows) {
  TORCH_CHECK_VALUE(matrix.dim() == 2, who, ": ", name, " has shape ", matrix.sizes(), ", expected [rows, columns].");
  TORCH_CHECK_VALUE(std::all_of(rows.begin(), rows.end(), [](int64_t n) { return n >= 0; }), who, ": ", name,
                    " has groups of ", at::IntArrayRef(rows), " rows, expected 0 or more.");
  const auto total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  TORCH_CHECK_VALUE(total <= matrix.size(0), who, ": ", name, " has ", matrix.size(0), " rows, fewer than the ", total,
                    " of its groups.");
}

/// Copies the rows of each group that both matrices have, and sets further rows of a group of the output to 0.
void copy_groups(const char* who, const at::Tensor& input, const at::Tensor& output, const Rows& input_rows,
                 const Rows& output_rows) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(input_rows.size() == output_rows.size(), who, ": got ", input_rows.size(), " groups of input and ",
                    output_rows.size(), " of output, expected as many of both.");
  check_groups(who, "input", input, input_rows);
  check_groups(who, "output", output, output_rows);
  TORCH_CHECK_VALUE(input.size(1) == output.size(1), who, ": output has ", output.size(1), " columns, expected ",
                    input.size(1), " as in input.");
  TORCH_CHECK_TYPE(input.scalar_type() == output.scalar_type(), who, ": output is ", output.scalar_type(),
                   ", expected ", input.scalar_type(), " as input.");
  const auto from = host(input), to = host(output);
  int64_t begin = 0, out_begin = 0;
  for (size_t i = 0; i < input_rows.size(); ++i) {
    const auto shared = std::min(input_rows[i], output_rows[i]);
    to.narrow(0, out_begin, shared).copy_(from.narrow(0, begin, shared));
    to.narrow(0, out_begin + shared, output_rows[i] - shared).zero_();
    begin += input_rows[i];
    out_begin += output_rows[i];
  }
}

}  // namespace

void bind_padding(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def(
      "fused_multi_row_padding",
      [](const at::Tensor& input, const at::Tensor& output, const Rows& rows, const Rows& padded_rows) {
        copy_groups("fused_multi_row_padding", input, output, rows, padded_rows);
      },
      py::arg("input"), py::arg("output"), py::arg("input_row_list"), py::arg("padded_input_row_list"), no_gil);
  m.def(
      "fused_multi_row_unpadding",
      [](const at::Tensor& input, const at::Tensor& output, const Rows& rows, const Rows& unpadded_rows) {
        copy_groups("fused_multi_row_unpadding", input, output, rows, unpadded_rows);
      },
      py::arg("input"), py::arg("output"), py::arg("input_row_list"), py::arg("unpadded_input_row_list"), no_gil);
}

}  // namespace weft::te
