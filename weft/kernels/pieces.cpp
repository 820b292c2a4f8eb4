#include "weft/kernels/pieces.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "weft/kernels/operand.h"
#include "weft/kernels/precision.h"
#include "weft/kernels/rows.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

constexpr int64_t kSquare = 32;

bool is_square(const at::Tensor& t) { return t.defined() && t.dim() == 4; }

/// Pieces whose addends are added up in float32 (float64 for float64) as they become ready, so that at most one is
/// left for each.
class AddedUp {
 public:
  explicit AddedUp(const Pieces& given) : pieces_(given), given_(given), done_(given.list.size()) {
    for (auto& piece : pieces_.list) {
      if (piece.add.size() < 2) continue;
      const auto& first = piece.add[0];
      piece.add = {at::empty(first.sizes(), first.options().dtype(wide(first.scalar_type())))};
    }
    if (!given.ready) pieces_.least = given.rows;
    pieces_.ready = [this](int piece, int64_t from) { return ready(piece, from); };
  }
  AddedUp(const AddedUp&) = delete;
  AddedUp& operator=(const AddedUp&) = delete;

  const Pieces& pieces() const { return pieces_; }

 private:
  int64_t ready(int piece, int64_t from) {
    const auto& terms = given_.list[piece].add;
    const auto rows = rows_in(given_.list[piece]), to = given_.ready ? given_.ready(piece, from) : rows;
    auto& done = done_[piece];
    if (terms.size() < 2 || to <= done) return to;
    const auto part = [&](const at::Tensor& t) {
      if (!is_square(t)) return t.narrow(0, done, to - done);
      const auto begin = done / kSquare, end = to == rows ? t.size(1) : to / kSquare;
      return t.flatten(1).narrow(1, begin * kSquare * kSquare, (end - begin) * kSquare * kSquare);
    };
    std::vector<at::Tensor> parts;
    for (const auto& t : terms) parts.push_back(part(t));
    add_up(parts, part(pieces_.list[piece].add[0]));
    done = to;
    return to;
  }

  Pieces pieces_;
  const Pieces& given_;
  std::vector<int64_t> done_;  // rows that are added up
};

int64_t in_panels(int64_t values) { return (values + kSquare - 1) / kSquare; }

/// Rows of `k` values without gaps, or packed where tiles take them.
bool fits_a(const Piece& piece, int64_t k, bool tiles) {
  const auto& a = piece.a;
  if (a.dim() == 2) return a.size(1) == k && (a.stride(1) == 1 || k <= 1);
  return tiles && a.is_contiguous() &&
         a.sizes() == at::IntArrayRef({in_panels(piece.packed_rows), 2 * in_panels(k), kSquare / 2, kSquare});
}

/// Rows without gaps, or squares where tiles make them.
bool fits_result(const at::Tensor& t, int64_t rows, int64_t n, bool tiles) {
  if (t.dim() == 2) return t.size(0) == rows && (t.stride(1) == 1 || t.size(1) <= 1);
  return tiles && t.is_contiguous() && t.sizes() == at::IntArrayRef({in_panels(n), in_panels(rows), kSquare, kSquare});
}

void check(const Pieces& a, const Matrix& b, const Epilogue& e, bool tiles) {
  for (size_t i = 0; i < a.list.size(); ++i) {
    const auto& piece = a.list[i];
    TORCH_CHECK_VALUE(fits_a(piece, b.rows(), tiles), "gemm: piece ", i, " of A has sizes ", piece.a.sizes(),
                      " and strides ", piece.a.strides(), ", expected rows of ", b.rows(), " values without gaps",
                      tiles ? ", or packed ones." : ".");
    const auto rows = rows_in(piece);
    TORCH_CHECK_VALUE(piece.row >= 0 && piece.row + rows <= a.rows, "gemm: piece ", i, " has rows ", piece.row, " to ",
                      piece.row + rows, " of a product of ", a.rows, ".");
    const auto check_result = [&](const at::Tensor& t, const char* what) {
      TORCH_CHECK_VALUE(fits_result(t, rows, b.columns(), tiles), "gemm: ", what, " piece ", i, " have sizes ",
                        t.sizes(), ", expected ", rows, " rows without gaps", tiles ? ", or squares." : ".");
    };
    if (piece.out.defined()) check_result(piece.out, "the results of");
    for (const auto& t : piece.add) check_result(t, "addends of");
  }
  TORCH_CHECK_VALUE(!e.out.defined() || e.out.size(0) == a.rows, "gemm: `out` has ", e.out.size(0),
                    " rows, the product ", a.rows, ".");
}

/// Whether all tensors are fit for tiles.
bool has_tiles(const Pieces& a, const Matrix& b, const Epilogue& e) {
  const auto fits = [](const at::Tensor& t) { return !t.defined() || vector_tier(t) != Tier::ref; };
  return a.rows > 0 && std::all_of(a.list.begin(), a.list.end(), [&](const Piece& piece) {
           return rows_in(piece) == 0 || (fits(piece.out) && std::all_of(piece.add.begin(), piece.add.end(), fits) &&
                                          gemm_tier(piece.a, b, e) == Tier::amx);
         });
}

/// The results of all rows, filled piece by piece by plain products.
class InTurn {
 public:
  InTurn(const Pieces& a, const Matrix& b, const Epilogue& e) : a_(a), b_(b), e_(e), out_(e.out) {}

  GemmResult run() {
    for (size_t i = 0; i < a_.list.size(); ++i) {
      const auto rows = a_.list[i].a.size(0);
      for (int64_t from = 0; from < rows;) {
        const auto to = wait(static_cast<int>(i), from, rows);
        multiply(a_.list[i], from, to);
        if (a_.done) a_.done(static_cast<int>(i), to);
        if (a_.between) a_.between();
        from = to;
      }
    }
    if (a_.rows == 0) return gemm(at::empty({0, b_.rows()}, b_.t.options()), b_, e_);
    all_.out = out_;
    return std::move(all_);
  }

 private:
  /// How far rows from `from` on are there, at least `least` of them if so many are left.
  int64_t wait(int piece, int64_t from, int64_t rows) const {
    const auto enough = std::min(rows, from + std::max<int64_t>(a_.least, 1));
    int64_t to = a_.ready ? from : rows;
    while (to < enough) to = a_.ready(piece, to);
    return a_.most > 0 ? std::min(to, from + a_.most) : to;
  }

  void multiply(const Piece& piece, int64_t from, int64_t to) {
    const auto row = piece.row + from, count = to - from;
    const auto cut = [&](const at::Tensor& t) { return t.defined() ? t.narrow(0, row, count) : t; };
    Epilogue e = e_;
    e.at = cut(e_.at);
    e.add = cut(e_.add);
    if (!piece.add.empty()) {
      const auto add = piece.add[0].narrow(0, from, count);
      e.add = e.add.defined() ? sum_of(e.add, add) : add;
    }
    e.out = piece.out.defined() ? piece.out.narrow(0, from, count) : cut(out_);
    auto r = gemm(piece.a.narrow(0, from, count), b_, e);
    if (!piece.out.defined()) keep(r.out, out_, row);
    keep(r.pre, all_.pre, row);
    keep(r.again, all_.again, row);
    if (r.sums.defined()) all_.sums = all_.sums.defined() ? all_.sums.add_(r.sums) : r.sums;
  }
  static at::Tensor sum_of(const at::Tensor& x, const at::Tensor& y) {
    const auto sum = at::empty(x.sizes(), x.options().dtype(wide(x.scalar_type())));
    add_up({x, y}, sum);
    return sum;
  }
  /// Some rows of a result to their place among all.
  void keep(const at::Tensor& rows, at::Tensor& all, int64_t row) const {
    if (!rows.defined()) return;
    if (!all.defined()) all = at::empty({a_.rows, rows.size(1)}, rows.options());
    auto place = all.narrow(0, row, rows.size(0));
    if (place.const_data_ptr() != rows.const_data_ptr()) place.copy_(rows);
  }

  const Pieces& a_;
  const Matrix& b_;
  const Epilogue& e_;
  at::Tensor out_;
  GemmResult all_;
};

}  // namespace

bool in_squares(at::ScalarType dtype, int64_t n, int64_t k) { return has_tiles(c10::DeviceType::CPU, dtype, n, k); }

void pack_rows(const at::Tensor& a, const at::Tensor& to) {
  TORCH_CHECK_VALUE(machine_tier() == Tier::amx && a.dim() == 2 && a.scalar_type() == at::kBFloat16 &&
                        to.scalar_type() == at::kBFloat16 &&
                        fits_a({.a = to, .packed_rows = a.size(0)}, a.size(1), true),
                    "pack_rows: got ", a.toString(), " ", a.sizes(), " for ", to.toString(), " ", to.sizes(),
                    ", expected a matrix of bfloat16 on the AMX tier, and whole tiles.");
  if (a.numel() > 0) amx::pack_rows(a, to);
}

GemmResult gemm(const Pieces& a, const Matrix& b, const Epilogue& epilogue) {
  const bool tiles = has_tiles(a, b, epilogue);
  check(a, b, epilogue, tiles);
  const size_t most = tiles ? amx::most_adds() - (epilogue.add.defined() ? 1 : 0) : 1;
  const bool many = std::any_of(a.list.begin(), a.list.end(), [&](const Piece& p) { return p.add.size() > most; });
  const auto run = [&](const Pieces& pieces) {
    return tiles ? amx::gemm(pieces, b.tensor(), epilogue) : InTurn(pieces, b, epilogue).run();
  };
  if (!many) return run(a);
  const AddedUp added_up(a);
  return run(added_up.pieces());
}

}  // namespace weft::kernels
