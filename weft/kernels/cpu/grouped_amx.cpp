#include "weft/kernels/cpu/gemm_tensors_amx.h"
#include "weft/kernels/cpu/unpacked_weight_amx.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::CPU_CAPABILITY {
namespace {

const Bf16* bf16(const void* p) { return static_cast<const Bf16*>(p); }
const Bf16* from_row(const at::Tensor& t, int64_t row) { return bf16(t.const_data_ptr()) + row * t.strides()[0]; }

/// A view of `t` from `row` on.
MatrixView rows_of(const at::Tensor& t, int64_t row) {
  if (!t.defined()) return {};
  MatrixView view{static_cast<char*>(t.data_ptr()), t.sizes().size() > 1 ? t.strides()[0] : 1, t.scalar_type()};
  view.data = view.at(row, 0);
  return view;
}
MatrixView matrix_of(const GroupedMatrix& m, int64_t g) {
  if (!m.defined()) return {};
  return {static_cast<char*>(m.data(g)), m.columns(), m.dtype()};
}

/// Splits the panels of all groups over the threads by cost and calls run(g, begin, end) for the panels of thread t.
/// Each group has `panels` panels, and each panel of group g costs cost(g); 0 means no work.
template <class Cost, class Fn>
void partition_by_cost(const GroupOffsets& offsets, int64_t panels, int t, int threads, const Cost& cost,
                       const Fn& run) {
  int64_t total = 0;
  for (int64_t g = 0; g < offsets.groups(); ++g) total += cost(g) * panels;
  const auto from = total / threads * t + total % threads * t / threads;
  const auto to = total / threads * (t + 1) + total % threads * (t + 1) / threads;
  int64_t cost_so_far = 0;
  for (int64_t g = 0; g < offsets.groups() && cost_so_far < to; ++g) {
    const auto each = cost(g), start = cost_so_far;
    if (each == 0) continue;
    cost_so_far += each * panels;
    const auto panel = [&](int64_t position) {
      return std::clamp<int64_t>(ceil_div(std::max<int64_t>(position - start, 0), each), 0, panels);
    };
    if (const auto begin = panel(from), end = panel(to); begin < end) run(g, begin, end);
  }
}

/// The resident block of this thread, empty; it keeps its allocations.
ResidentPanels& resident_panels(const Blocking& blocking, int64_t first_to_pack) {
  static thread_local ResidentPanels block(blocking);
  block.restart(blocking, first_to_pack);
  return block;
}

/// The resident operands of the groups, each packed together by the threads that multiply its group.
class GroupedOperands {
 public:
  /// operand(g) is the operand of group g, or an empty one if it is not packed.
  template <class OperandOf>
  GroupedOperands(const GroupOffsets& offsets, int threads, const OperandOf& operand) : groups_(offsets.groups()) {
    int64_t used = 0;
    for (int64_t g = 0; g < offsets.groups(); ++g) used += offsets.rows(g) > 0;
    const auto per_group = static_cast<int>(ceil_div(threads, std::max<int64_t>(used, 1)));
    if (threads == 1 || used >= 2 * threads) return;  // a group has one thread, or two at the edge of their shares
    for (int64_t g = 0; g < offsets.groups(); ++g) {
      const Operand m = operand(g);
      if (SharedPanels::elements(m) == 0) continue;
      const auto b = choose_blocking(1, m.panels(), m.k);
      const auto pieces = PackingPieces::choose(m, b.k_steps, b.kc_steps, b.resident, per_group + 1);
      groups_[g] = operands_.add(m, pieces);
    }
    operands_.allocate();
  }
  /// Null if the operand of group g is not shared.
  SharedPanels* of(int64_t g) const { return groups_[g]; }

 private:
  SharedOperands operands_;
  std::vector<SharedPanels*> groups_;
};

/// Multiplies the streamed panels [begin, end) of one group by all of `resident`.
void multiply_panels(const Operand& streamed, const Operand& resident, const EpilogueArgs& args, int64_t begin,
                     int64_t end) {
  static const Epilogue none;
  const auto variant = select_variant(args, {}, {});
  const auto blocking = choose_blocking(end - begin, resident.panels(), streamed.k);
  for (int64_t i = 0; i < resident.panels(); i += blocking.resident) {
    auto& block = resident_panels(blocking, begin);
    block.append(resident, args, i * kBlockDim, std::min(blocking.resident, resident.panels() - i));
    gemm_macrokernel({streamed, begin, end}, block, blocking, variant, none);
  }
}

EpilogueArgs plain_args(int64_t rows, int64_t columns, const MatrixView& out) {
  EpilogueArgs w;
  w.rows = rows;
  w.columns = w.full_panel_limit = columns;
  w.out = out;
  w.row = row_function({}, {});
  return w;
}

/// Y = X Wᵀ or X W for the groups of a call.
class GroupedGemm {
 public:
  GroupedGemm(const GroupOffsets& offsets, const GroupedGemmCall& call)
      : offsets_(offsets), call_(call), n_(call.transposed ? call.w.rows() : call.w.columns()), k_(call.x.sizes()[1]) {}

  /// A scaled bias needs the unpacked-weight kernel, which holds all of k in scratch.
  static bool supports(const GroupedGemmCall& call) {
    return !call.scales.defined() || call.x.sizes()[1] <= kMaxUnpackedK;
  }

  void run() const {
    const int threads = thread_count();
    const GroupedOperands shared(offsets_, threads, [&](int64_t g) { return unpacked(g) ? Operand{} : x_of(g); });
    on_threads(threads, [&](int t) {
      UnpackedWeightMultiplier multiplier;
      partition_by_cost(
          offsets_, panels_of(n_), t, threads, [&](int64_t g) { return cost(g); },
          [&](int64_t g, int64_t begin, int64_t end) {
            if (!unpacked(g)) return multiply_packed(g, begin, end, shared.of(g));
            const auto p = unpacked_gemm(g);
            multiplier.run(p, begin * 2, std::min(end * 2, p.tiles()));
          });
    });
  }

 private:
  /// Cost of a panel, in accumulator blocks; reading W from memory costs as much as three.
  int64_t cost(int64_t g) const { return offsets_.rows(g) == 0 ? 0 : panels_of(offsets_.rows(g)) + 3; }

  /// Whether W of group g is multiplied in place.
  bool unpacked(int64_t g) const {
    return call_.transposed && k_ <= kMaxUnpackedK && (offsets_.rows(g) <= kMaxUnpackedRows || call_.scales.defined());
  }

  UnpackedWeightGemm unpacked_gemm(int64_t g) const {
    const auto row = offsets_.begin(g);
    UnpackedWeightGemm p;
    p.x = from_row(call_.x, row);
    p.ldx = call_.x.strides()[0];
    p.rows = offsets_.rows(g);
    p.w = bf16(call_.w.data(g));
    p.n = n_;
    p.k = k_;
    p.bias = matrix_of(call_.bias, g);
    p.scales = rows_of(call_.scales, row);
    p.out = rows_of(call_.out, row);
    return p;
  }

  Operand x_of(int64_t g) const {
    Operand x;
    x.data = from_row(call_.x, offsets_.begin(g));
    x.ld = call_.x.strides()[0];
    x.extent = offsets_.rows(g);
    x.k = k_;
    return x;
  }

  /// Multiplies panels [begin, end) of W of group g.
  void multiply_packed(int64_t g, int64_t begin, int64_t end, SharedPanels* shared) const {
    Operand x = x_of(g), w;
    x.shared = shared;
    w.k = k_;
    w.data = bf16(call_.w.data(g));
    w.ld = call_.w.columns();
    w.extent = n_;
    w.left = false;
    w.k_contiguous = call_.transposed;
    auto args = plain_args(x.extent, n_, rows_of(call_.out, offsets_.begin(g)));
    args.prefetch_rows = kBlockDim;
    args.bias = bias(g);
    multiply_panels(w, x, args, begin, end);
  }

  /// The bias of group g as float32, padded so that full vectors can be read at its end.
  const float* bias(int64_t g) const {
    if (!call_.bias.defined()) return nullptr;
    static thread_local std::vector<float> values;
    values.resize(n_ + kBlockDim);
    load_row(matrix_of(call_.bias, g), n_, values.data());
    return values.data();
  }

  static constexpr int64_t kMaxUnpackedRows = 512, kMaxUnpackedK = 16384;
  static_assert(kMaxUnpackedK / kKStep * 2 * kTileElems * 2 <= Scratch::kResidentSize, "a packed panel of X");
  static_assert(kMaxUnpackedK / kKStep * kTileElems * 2 <= Scratch::kStreamedSize, "a copied tile row of W");

  const GroupOffsets& offsets_;
  const GroupedGemmCall& call_;
  int64_t n_, k_;
};

/// dW = dYᵀ X for the groups of a call.
class GroupedWgrad {
 public:
  GroupedWgrad(const GroupOffsets& offsets, const GroupedWgradCall& call)
      : offsets_(offsets), call_(call), n_(call.out.rows()), k_(call.out.columns()) {}

  void run() const {
    const int threads = thread_count();
    const GroupedOperands shared(offsets_, threads, [&](int64_t g) { return x_of(g); });
    on_threads(threads, [&](int t) {
      partition_by_cost(
          offsets_, panels_of(n_), t, threads, [&](int64_t g) { return cost(g); },
          [&](int64_t g, int64_t begin, int64_t end) { group(g, begin, end, shared.of(g)); });
    });
  }

 private:
  /// Cost of a panel, in k-steps; writing dW to memory costs as much as four.
  int64_t cost(int64_t g) const {
    if (offsets_.rows(g) == 0) return call_.accumulate ? 0 : 2;
    return ceil_div(offsets_.rows(g), kKStep) + 4;
  }

  Operand x_of(int64_t g) const {
    Operand x;
    x.data = from_row(call_.x, offsets_.begin(g));
    x.ld = call_.x.strides()[0];
    x.extent = k_;
    x.k = offsets_.rows(g);
    x.left = x.k_contiguous = false;
    return x;
  }

  void group(int64_t g, int64_t begin, int64_t end, SharedPanels* shared) const {
    const auto row = offsets_.begin(g), rows = offsets_.rows(g);
    const auto out = matrix_of(call_.out, g);
    if (rows == 0) {
      const auto last = std::min(n_, end * kBlockDim);
      std::memset(out.at(begin * kBlockDim, 0), 0, (last - begin * kBlockDim) * k_ * out.element_size());
      return;
    }
    Operand dy, x = x_of(g);
    x.shared = shared;
    dy.data = from_row(call_.dy, row);
    dy.ld = call_.dy.strides()[0];
    dy.extent = n_;
    dy.k = rows;
    dy.k_contiguous = false;
    auto args = plain_args(n_, k_, out);
    if (call_.accumulate) args.addends[args.num_addends++] = out;
    args.prefetch_rows = kBlockDim;
    multiply_panels(dy, x, args, begin, end);
  }

  const GroupOffsets& offsets_;
  const GroupedWgradCall& call_;
  int64_t n_, k_;
};

}  // namespace
}  // namespace weft::kernels::CPU_CAPABILITY

namespace weft::kernels::amx {

void grouped_gemm(const GroupOffsets& offsets, const GroupedGemmCall& call) {
  using CPU_CAPABILITY::GroupedGemm;
  if (GroupedGemm::supports(call)) return GroupedGemm(offsets, call).run();
  for (int64_t g = 0; g < offsets.groups(); ++g) split_gemm(offsets, call, g);
}

void grouped_weight_gradient(const GroupOffsets& offsets, const GroupedWgradCall& call) {
  CPU_CAPABILITY::GroupedWgrad(offsets, call).run();
}

}  // namespace weft::kernels::amx
