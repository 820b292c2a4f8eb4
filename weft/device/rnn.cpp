#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>

#include <optional>
#include <tuple>

#include "weft/device/kernels.h"

// The cells of LSTM and GRU, which torch calls on CUDA devices only. The gates have shape [batch, gates · hidden].

namespace weft::device {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}
bool has(const MaybeTensor& t) { return t && t->defined(); }
Tensor gradient_or_zeros(const MaybeTensor& gradient, const Tensor& like) {
  return has(gradient) ? *gradient : like.new_zeros(like.sizes());
}

/// Gates in the order input, forget, cell, output. The workspace holds them activated.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
                                             const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto parts = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  const auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& grad_hy, const MaybeTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace,
                                                      bool has_bias) {
  if (!has(grad_hy) && !has(grad_cy)) return {};
  const auto gates = workspace.chunk(4, 1);
  const auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const auto dh = gradient_or_zeros(grad_hy, cx), dc_later = gradient_or_zeros(grad_cy, cx);
  const auto tanh_cy = cy.tanh();
  const auto dc = dc_later + dh * out * (1 - tanh_cy * tanh_cy);
  const auto grad_gates = at::cat({dc * cell * in * (1 - in), dc * cx * forget * (1 - forget),
                                   dc * in * (1 - cell * cell), dh * tanh_cy * out * (1 - out)},
                                  1);
  return {grad_gates, dc * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

/// Gates in the order reset, update, new. The workspace: reset, update, new, hx, the hidden part of new.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
                                    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto in = with_bias(input_gates, input_bias).chunk(3, 1),
             hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const auto reset = (in[0] + hidden[0]).sigmoid(), update = (in[1] + hidden[1]).sigmoid();
  const auto fresh = (in[2] + reset * hidden[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3], &hidden_new = parts[4];
  const auto d_update = grad_hy * (hx - fresh) * update * (1 - update);
  const auto d_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
  const auto d_reset = d_fresh * hidden_new * reset * (1 - reset);
  const auto grad_input = at::cat({d_reset, d_update, d_fresh}, 1);
  const auto grad_hidden = at::cat({d_reset, d_update, d_fresh * reset}, 1);
  return {grad_input, grad_hidden, grad_hy * update, has_bias ? grad_input.sum(0) : Tensor(),
          has_bias ? grad_hidden.sum(0) : Tensor()};
}

}  // namespace

void register_rnn_kernels(OperationTable& table) {
  table.add("_thnn_fused_lstm_cell", lstm_cell);
  table.add("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  table.add("_thnn_fused_gru_cell", gru_cell);
  table.add("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace weft::device
