#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "weft/te/bind.h"
#include "weft/te/host.h"

// Expert parallelism: each rank owns experts / ranks consecutive experts, and tokens travel to the ranks of their
// experts and back by all-to-all of torch.distributed. `ep_prepare` gathers the experts of all tokens of all ranks
// into `handle_mem`, from which every rank computes all routes. A rank receives the rows of an expert together, ordered
// by source rank, token and choice; with an alignment, rows of zeros follow up to a multiple of it.

namespace weft::te {
namespace {

using Counts = std::vector<int64_t>;

struct EpGroup {
  c10::intrusive_ptr<c10d::ProcessGroup> ranks;
  int64_t experts = 0, max_tokens = 0;
  int64_t capacity = 0;  // rows that a rank receives; 0: any number
  bool drops = false;    // rows beyond the capacity

  int64_t local_experts() const { return experts / ranks->getSize(); }
};

/// The group between `ep_initialize` and `ep_finalize`.
class CurrentGroup {
 public:
  EpGroup get(const char* who) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_VALUE(group_, who, ": expert parallelism is not initialized. Call ep_bootstrap first.");
    return *group_;
  }
  void set(std::optional<EpGroup> group) {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_VALUE(!group || !group_, "ep_initialize was called twice. Call ep_finalize in between.");
    group_ = std::move(group);
  }

 private:
  std::mutex mutex_;
  std::optional<EpGroup> group_;
};

CurrentGroup& current_group() {
  static CurrentGroup group;
  return group;
}

void initialize(int64_t, const std::string& group_name, int64_t num_experts, int64_t max_tokens_per_rank,
                int64_t max_recv_tokens_per_rank, int64_t, int64_t, at::ScalarType, bool zero_copy, int64_t,
                bool drop_on_overflow) {
  const char* who = "ep_initialize";
  TORCH_CHECK_NOT_IMPLEMENTED(!zero_copy, who,
                              ": zero_copy=True is not supported on the CPU: it needs symmetric memory of NCCL. Leave "
                              "it out; the results are the same.");
  EpGroup group{c10d::resolve_process_group(group_name), num_experts, max_tokens_per_rank, max_recv_tokens_per_rank,
                drop_on_overflow};
  const auto ranks = group.ranks->getSize();
  TORCH_CHECK_VALUE(num_experts > 0 && num_experts % ranks == 0, who, ": num_experts is ", num_experts,
                    ", expected a multiple of ", ranks, ", the number of ranks.");
  TORCH_CHECK_VALUE(max_tokens_per_rank > 0 && max_recv_tokens_per_rank >= 0, who, ": max_tokens_per_rank is ",
                    max_tokens_per_rank, " and max_recv_tokens_per_rank ", max_recv_tokens_per_rank,
                    ", expected 1 or more and 0 or more.");
  current_group().set(std::move(group));
}

// ---- handle_mem ----------------------------------------------------------------------------------------------------

/// The first bytes of `handle_mem`. The experts follow, int32 [ranks, max_tokens, top_k], -1 where there is no token.
struct Header {
  int64_t mark = 0, top_k = 0, alignment = 0, tokens = 0;  // tokens: of this rank
};
constexpr int64_t kMark = 0x77656674'5f65705f;  // "weft_ep_"

int64_t table_bytes(const EpGroup& group, int64_t top_k) {
  return group.ranks->getSize() * group.max_tokens * top_k * static_cast<int64_t>(sizeof(int32_t));
}

int64_t handle_mem_size(int64_t top_k, int64_t) {
  TORCH_CHECK_VALUE(top_k > 0, "ep_handle_mem_size: top_k is ", top_k, ", expected 1 or more.");
  return static_cast<int64_t>(sizeof(Header)) + table_bytes(current_group().get("ep_handle_mem_size"), top_k);
}

at::Tensor bytes_of_handle(const char* who, const at::Tensor& handle_mem) {
  TORCH_CHECK_TYPE(handle_mem.scalar_type() == at::kByte, who, ": handle_mem is ", handle_mem.scalar_type(),
                   ", expected uint8.");
  TORCH_CHECK_VALUE(handle_mem.is_contiguous() && handle_mem.numel() >= static_cast<int64_t>(sizeof(Header)), who,
                    ": handle_mem has shape ", handle_mem.sizes(), ", expected the size of ep_handle_mem_size.");
  return host(handle_mem).flatten();
}

at::Tensor table_in(const char* who, const at::Tensor& bytes, const EpGroup& group, int64_t top_k) {
  const auto size = table_bytes(group, top_k);
  TORCH_CHECK_VALUE(bytes.numel() >= static_cast<int64_t>(sizeof(Header)) + size, who, ": handle_mem has ",
                    bytes.numel(), " bytes, expected the size of ep_handle_mem_size.");
  return bytes.narrow(0, sizeof(Header), size).view(at::kInt).view({group.ranks->getSize(), group.max_tokens, top_k});
}

// ---- Routes --------------------------------------------------------------------------------------------------------

/// What this rank sends and receives.
struct Routes {
  int64_t top_k = 0, tokens = 0;
  at::Tensor sent = {};       // int64: token·top_k + choice of each row that is sent, by destination
  at::Tensor slots = {};      // int64: the row of recv_tokens of each row that is received, by source
  Counts to = {}, from = {};  // rows to and from each rank
  Counts expert_rows = {};    // of the own experts, with alignment and without dropped rows
  int64_t rows = 0;           // of the own experts, with dropped rows
  int64_t most_rows = 0;      // of any rank
};

struct TopChoice {
  int64_t rank, index;  // index: token·top_k + choice
};

/// The choices of each expert, ordered by source rank, token and choice.
std::vector<std::vector<TopChoice>> choices_of_experts(const at::Tensor& table, int64_t experts) {
  std::vector<std::vector<TopChoice>> out(static_cast<size_t>(experts));
  const auto ranks = table.size(0), choices = table.size(1) * table.size(2);
  const auto* expert = table.const_data_ptr<int32_t>();
  for (int64_t rank = 0; rank < ranks; ++rank)
    for (int64_t i = 0; i < choices; ++i, ++expert)
      if (*expert >= 0) out[static_cast<size_t>(*expert)].push_back({rank, i});
  return out;
}

at::Tensor joined(const std::vector<Counts>& lists) {
  Counts all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return at::tensor(all, at::kLong);
}

Counts list_sizes(const std::vector<Counts>& lists) {
  Counts sizes;
  for (const auto& list : lists) sizes.push_back(static_cast<int64_t>(list.size()));
  return sizes;
}

Routes routes_of(const EpGroup& group, const Header& header, const at::Tensor& table) {
  const auto ranks = group.ranks->getSize(), own = group.ranks->getRank();
  const auto local = group.local_experts(), alignment = std::max<int64_t>(header.alignment, 1);
  const auto choices = choices_of_experts(table, group.experts);
  Routes routes{.top_k = header.top_k, .tokens = header.tokens};
  std::vector<Counts> to(ranks), from(ranks);
  for (int destination = 0; destination < ranks; ++destination) {
    int64_t row = 0;
    const auto is_kept = [&](int64_t slot) { return group.capacity == 0 || slot < group.capacity; };
    for (auto e = destination * local; e < (destination + 1) * local; ++e) {
      const auto first = row;
      for (const auto& choice : choices[static_cast<size_t>(e)]) {
        if (is_kept(row) && choice.rank == own) to[destination].push_back(choice.index);
        if (is_kept(row) && destination == own) from[choice.rank].push_back(row);
        ++row;
      }
      row = (row + alignment - 1) / alignment * alignment;
      if (destination == own) {
        const auto limit = group.capacity == 0 ? row : group.capacity;
        routes.expert_rows.push_back(std::min(row, limit) - std::min(first, limit));
      }
    }
    if (destination == own) routes.rows = row;
    routes.most_rows = std::max(routes.most_rows, row);
  }
  routes.sent = joined(to);
  routes.slots = joined(from);
  routes.to = list_sizes(to);
  routes.from = list_sizes(from);
  return routes;
}

Routes read_routes(const char* who, const EpGroup& group, const at::Tensor& handle_mem) {
  const auto bytes = bytes_of_handle(who, handle_mem);
  const auto header = *reinterpret_cast<const Header*>(bytes.const_data_ptr<uint8_t>());
  TORCH_CHECK_VALUE(header.mark == kMark, who, ": handle_mem has no routes. Call ep_prepare first.");
  return routes_of(group, header, table_in(who, bytes, group, header.top_k));
}

/// Fills `handle_mem` and the counts, and returns the routes.
Routes prepare_routes(const char* who, const EpGroup& group, const at::Tensor& handle_mem, const at::Tensor& topk_idx,
                      const at::Tensor& tokens_per_expert, int64_t top_k, int64_t alignment,
                      const std::optional<at::Tensor>& total_recv_tokens) {
  TORCH_CHECK_VALUE(topk_idx.dim() >= 2 && topk_idx.size(-1) == top_k && top_k > 0, who, ": topk_idx has shape ",
                    topk_idx.sizes(), ", expected [..., ", top_k, "].");
  const auto experts = host(topk_idx).reshape({-1, top_k}).to(at::kInt);
  const auto tokens = experts.size(0);
  TORCH_CHECK_VALUE(tokens <= group.max_tokens, who, ": got ", tokens, " tokens, expected at most ", group.max_tokens,
                    ", the max_tokens_per_rank of ep_bootstrap.");
  TORCH_CHECK_INDEX(tokens == 0 || (experts.min().item<int>() >= -1 && experts.max().item<int>() < group.experts), who,
                    ": topk_idx has an expert that does not exist; expected -1, for none, to ", group.experts - 1, ".");
  TORCH_CHECK_VALUE(tokens_per_expert.numel() == group.local_experts(), who, ": tokens_per_expert has shape ",
                    tokens_per_expert.sizes(), ", expected ", group.local_experts(), " elements.");
  const auto bytes = bytes_of_handle(who, handle_mem);
  auto table = table_in(who, bytes, group, top_k);
  auto own = at::full({group.max_tokens, top_k}, -1, at::kInt);
  own.narrow(0, 0, tokens).copy_(experts);
  const auto device = handle_mem.device();
  auto input = on_device(std::move(own), device),
       gathered = on_device(at::empty({table.size(0) * group.max_tokens, top_k}, at::kInt), device);
  group.ranks->all_gather_single(gathered, input)->wait();
  table.copy_(host(gathered).view(table.sizes()));
  const Header header{kMark, top_k, alignment, tokens};
  std::copy_n(reinterpret_cast<const uint8_t*>(&header), sizeof(Header), bytes.data_ptr<uint8_t>());

  auto routes = routes_of(group, header, table);
  TORCH_CHECK_VALUE(group.capacity == 0 || group.drops || routes.most_rows <= group.capacity, who,
                    ": a rank would receive ", routes.most_rows, " rows, expected at most ", group.capacity,
                    ", the recv_capacity_per_rank of ep_bootstrap. Increase it, or pass drop_on_overflow=True.");
  host(tokens_per_expert).copy_(at::tensor(routes.expert_rows, at::kLong).view(tokens_per_expert.sizes()));
  if (total_recv_tokens) host(*total_recv_tokens).fill_(routes.rows);
  return routes;
}

// ---- Rows ----------------------------------------------------------------------------------------------------------

/// A matrix of bytes with one row per row of `t` [..., columns], which may be written.
at::Tensor byte_rows(const char* who, const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.dim() >= 2 && t.is_contiguous(), who, ": ", name, " has shape ", t.sizes(),
                    ", expected a contiguous tensor [..., columns].");
  return host(t).view({-1, t.size(-1)}).view(at::kByte);
}

/// One float32 per row, as a matrix of bytes.
at::Tensor byte_weights(const char* who, const char* name, const at::Tensor& t, int64_t count) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, who, ": ", name, " is ", t.scalar_type(), ", expected float32.");
  TORCH_CHECK_VALUE(t.numel() == count && t.is_contiguous(), who, ": ", name, " has shape ", t.sizes(), ", expected ",
                    count, " contiguous elements.");
  return host(t).view({-1, 1}).view(at::kByte);
}

/// All-to-all of the rows of a matrix of the CPU, on the memory of `device`.
at::Tensor exchange(const EpGroup& group, at::Tensor rows, Counts to, Counts from, c10::Device device) {
  const auto count = std::accumulate(from.begin(), from.end(), int64_t{0});
  auto output = on_device(at::empty({count, rows.size(1)}, at::kByte), device);
  auto input = on_device(std::move(rows), device);
  group.ranks->all_to_all_single(output, input, from, to)->wait();
  return host(output);
}

/// Sends rows, `divisor` of which follow each other in `sent`, to their slots in `out`; other slots become 0.
void dispatch_rows(const EpGroup& group, const Routes& routes, const at::Tensor& rows, int64_t divisor,
                   const at::Tensor& out, c10::Device device) {
  auto sent = rows.index_select(0, routes.sent.floor_divide(divisor));
  const auto received = exchange(group, std::move(sent), routes.to, routes.from, device);
  out.zero_().index_copy_(0, routes.slots, received);
}

/// Sends the rows of the slots back: the row of each element of `routes.sent`.
at::Tensor return_rows(const EpGroup& group, const Routes& routes, const at::Tensor& rows, c10::Device device) {
  return exchange(group, rows.index_select(0, routes.slots), routes.from, routes.to, device);
}

void check_rows(const char* who, const char* name, const at::Tensor& bytes, const at::Tensor& like, int64_t rows) {
  TORCH_CHECK_VALUE(bytes.size(1) == like.size(1), who, ": ", name, " has ", bytes.size(1), " bytes per row, expected ",
                    like.size(1), ".");
  TORCH_CHECK_VALUE(rows < 0 || bytes.size(0) == rows, who, ": ", name, " has ", bytes.size(0), " rows, expected ",
                    rows, ".");
}

void check_slots(const char* who, const char* name, const at::Tensor& bytes, const Routes& routes) {
  const auto last = routes.slots.numel() > 0 ? routes.slots.max().item<int64_t>() : -1;
  TORCH_CHECK_VALUE(bytes.size(0) > last, who, ": ", name, " has ", bytes.size(0), " rows, expected at least ",
                    last + 1, ", the rows that this rank receives.");
}

/// Sends `rows` [tokens, columns], and their scales if there are any, to the slots of their experts.
void dispatch_tokens(const char* who, const EpGroup& group, const Routes& routes, const at::Tensor& rows,
                     const at::Tensor& received, const std::optional<at::Tensor>& scales,
                     const std::optional<at::Tensor>& received_scales) {
  TORCH_CHECK_VALUE(scales.has_value() == received_scales.has_value(), who,
                    ": expected scales of the sent and of the received rows, or none of both.");
  const auto send = [&](const char* name, const at::Tensor& from, const at::Tensor& to) {
    const auto source = byte_rows(who, name, from), out = byte_rows(who, "the output", to);
    check_rows(who, name, source, source, routes.tokens);
    check_rows(who, "the output", out, source, -1);
    check_slots(who, "the output", out, routes);
    dispatch_rows(group, routes, source, routes.top_k, out, received.device());
  };
  send("the input", rows, received);
  if (scales) send("the scales", *scales, *received_scales);
}

/// Adds the rows of each token in float32.
void combine_rows(const char* who, const EpGroup& group, const Routes& routes, const at::Tensor& rows,
                  const at::Tensor& result) {
  const auto source = byte_rows(who, "the input", rows), out = byte_rows(who, "the output", result);
  TORCH_CHECK_TYPE(rows.scalar_type() == result.scalar_type(), who, ": the output is ", result.scalar_type(),
                   ", expected ", rows.scalar_type(), " as the input.");
  check_rows(who, "the output", out, source, routes.tokens);
  check_slots(who, "the input", source, routes);
  const auto returned = return_rows(group, routes, source, rows.device()).view(rows.scalar_type()).to(at::kFloat);
  auto sum = at::zeros({routes.tokens, result.size(-1)}, at::kFloat);
  sum.index_add_(0, routes.sent.floor_divide(routes.top_k), returned);
  host(result).copy_(sum.view(result.sizes()));
}

// ---- Operations ----------------------------------------------------------------------------------------------------

void prepare(const at::Tensor& handle_mem, const at::Tensor& topk_idx, const at::Tensor& tokens_per_expert,
             int64_t top_k, int64_t alignment, const std::optional<at::Tensor>& total_recv_tokens) {
  const at::NoGradGuard no_grad;
  const char* who = "ep_prepare";
  prepare_routes(who, current_group().get(who), handle_mem, topk_idx, tokens_per_expert, top_k, alignment,
                 total_recv_tokens);
}

void dispatch_with(const char* who, const EpGroup& group, const Routes& routes, const at::Tensor& tokens,
                   const at::Tensor& topk_weights, const at::Tensor& recv_tokens, const at::Tensor& recv_topk_weights,
                   const std::optional<at::Tensor>& tokens_scale_inv, const std::optional<at::Tensor>& recv_scale_inv) {
  dispatch_tokens(who, group, routes, tokens, recv_tokens, tokens_scale_inv, recv_scale_inv);
  const auto slots = recv_tokens.numel() / std::max<int64_t>(recv_tokens.size(-1), 1);
  const auto weights = byte_weights(who, "topk_weights", topk_weights, routes.tokens * routes.top_k);
  dispatch_rows(group, routes, weights, 1, byte_weights(who, "recv_topk_weights", recv_topk_weights, slots),
                recv_tokens.device());
}

void dispatch(const at::Tensor& handle_mem, const at::Tensor&, const at::Tensor& tokens, const at::Tensor& topk_weights,
              const at::Tensor& recv_tokens, const at::Tensor& recv_topk_weights,
              const std::optional<at::Tensor>& tokens_scale_inv, const std::optional<at::Tensor>& recv_scale_inv) {
  const at::NoGradGuard no_grad;
  const char* who = "ep_dispatch";
  const auto group = current_group().get(who);
  dispatch_with(who, group, read_routes(who, group, handle_mem), tokens, topk_weights, recv_tokens, recv_topk_weights,
                tokens_scale_inv, recv_scale_inv);
}

/// Both steps. Outputs that are not given get the rows that this rank receives. Returns the received tokens, weights
/// and scales, the last if the tokens have them.
std::vector<at::Tensor> prepare_and_dispatch(
    const at::Tensor& handle_mem, const at::Tensor& topk_idx, const at::Tensor& tokens, const at::Tensor& topk_weights,
    const at::Tensor& tokens_per_expert, const at::Tensor& total_recv_tokens, int64_t top_k, int64_t alignment,
    const std::optional<at::Tensor>& recv_tokens, const std::optional<at::Tensor>& recv_topk_weights,
    const std::optional<at::Tensor>& recv_scale_inv, const std::optional<at::Tensor>& tokens_scale_inv) {
  const at::NoGradGuard no_grad;
  const char* who = "ep_prepare_and_dispatch";
  const auto group = current_group().get(who);
  const auto routes =
      prepare_routes(who, group, handle_mem, topk_idx, tokens_per_expert, top_k, alignment, total_recv_tokens);
  const auto allocate = [&](const std::optional<at::Tensor>& given, const at::Tensor& like) {
    if (given) return *given;
    return on_device(at::empty({routes.rows, like.size(-1)}, like.scalar_type()), tokens.device());
  };
  std::vector<at::Tensor> out{allocate(recv_tokens, tokens)};
  out.push_back(recv_topk_weights ? *recv_topk_weights
                                  : on_device(at::empty({routes.rows}, at::kFloat), tokens.device()));
  if (tokens_scale_inv) out.push_back(allocate(recv_scale_inv, *tokens_scale_inv));
  dispatch_with(who, group, routes, tokens, topk_weights, out[0], out[1], tokens_scale_inv,
                tokens_scale_inv ? std::optional(out[2]) : std::nullopt);
  return out;
}

void combine(const at::Tensor& handle_mem, const at::Tensor& expert_out, const at::Tensor& result) {
  const at::NoGradGuard no_grad;
  const char* who = "ep_combine";
  const auto group = current_group().get(who);
  combine_rows(who, group, read_routes(who, group, handle_mem), expert_out, result);
}

void dispatch_backward(const at::Tensor& handle_mem, const at::Tensor& grad, const at::Tensor& g_recv_topk_weights,
                       const at::Tensor& grad_tokens, const at::Tensor& grad_topk_weights) {
  const at::NoGradGuard no_grad;
  const char* who = "ep_dispatch_bwd";
  const auto group = current_group().get(who);
  const auto routes = read_routes(who, group, handle_mem);
  combine_rows(who, group, routes, grad, grad_tokens);
  const auto slots = grad.numel() / std::max<int64_t>(grad.size(-1), 1);
  const auto weights = byte_weights(who, "g_recv_topk_weights", g_recv_topk_weights, slots);
  const auto out = byte_weights(who, "grad_topk_weights", grad_topk_weights, routes.tokens * routes.top_k);
  out.zero_().index_copy_(0, routes.sent, return_rows(group, routes, weights, grad.device()));
}

void combine_backward(const at::Tensor& handle_mem, const at::Tensor& grad, const at::Tensor& grad_expert_out,
                      const std::optional<at::Tensor>& grad_scale_inv,
                      const std::optional<at::Tensor>& grad_expert_out_scale_inv) {
  const at::NoGradGuard no_grad;
  const char* who = "ep_combine_bwd";
  const auto group = current_group().get(who);
  dispatch_tokens(who, group, read_routes(who, group, handle_mem), grad, grad_expert_out, grad_scale_inv,
                  grad_expert_out_scale_inv);
}

}  // namespace

void bind_expert_parallel(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("ep_initialize", initialize, py::arg("comm_ptr"), py::arg("group_name"), py::arg("num_experts"),
        py::arg("max_tokens_per_rank"), py::arg("max_recv_tokens_per_rank"), py::arg("hidden_dim"),
        py::arg("max_num_sms") = 0, py::arg("max_token_dtype"), py::arg("zero_copy") = false, py::arg("num_topk") = 0,
        py::arg("drop_on_overflow") = false, no_gil);
  m.def("ep_finalize", [] { current_group().set({}); }, no_gil);
  m.def("ep_get_zero_copy", [] { return false; });
  m.def("ep_zero_copy_supported", [] { return false; });
  m.def("ep_handle_mem_size", handle_mem_size, py::arg("top_k"), py::arg("dispatch_output_per_expert_alignment") = 0);
  m.def("ep_prepare", prepare, py::arg("handle_mem"), py::arg("topk_idx"), py::arg("tokens_per_expert"),
        py::arg("top_k"), py::arg("dispatch_output_per_expert_alignment"), py::arg("total_recv_tokens") = py::none(),
        no_gil);
  m.def("ep_dispatch", dispatch, py::arg("handle_mem"), py::arg("topk_idx"), py::arg("tokens"), py::arg("topk_weights"),
        py::arg("recv_tokens"), py::arg("recv_topk_weights"), py::arg("tokens_scale_inv") = py::none(),
        py::arg("recv_scale_inv") = py::none(), no_gil);
  m.def("ep_prepare_and_dispatch", prepare_and_dispatch, py::arg("handle_mem"), py::arg("topk_idx"), py::arg("tokens"),
        py::arg("topk_weights"), py::arg("tokens_per_expert"), py::arg("total_recv_tokens"), py::arg("top_k"),
        py::arg("dispatch_output_per_expert_alignment"), py::arg("recv_tokens") = py::none(),
        py::arg("recv_topk_weights") = py::none(), py::arg("recv_scale_inv") = py::none(),
        py::arg("tokens_scale_inv") = py::none(), no_gil);
  m.def("ep_combine", combine, py::arg("handle_mem"), py::arg("expert_out"), py::arg("result"), no_gil);
  m.def("ep_dispatch_bwd", dispatch_backward, py::arg("handle_mem"), py::arg("grad"), py::arg("g_recv_topk_weights"),
        py::arg("grad_tokens"), py::arg("grad_topk_weights"), no_gil);
  m.def("ep_combine_bwd", combine_backward, py::arg("handle_mem"), py::arg("grad"), py::arg("grad_expert_out"),
        py::arg("grad_scale_inv") = py::none(), py::arg("grad_expert_out_scale_inv") = py::none(), no_gil);
}

}  // namespace weft::te
