#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <vector>

#include "weft/core/dispatch_keys.h"
#include "weft/core/host_memory.h"
#include "weft/kernels/huge_pages.h"
#include "weft/kernels/tier.h"

// Shared by the files that choose a tier: which tensors the loops can read, output allocation, and threading.

namespace weft::kernels {

/// Whether a loop can read the tensor's memory: strided, no wrapper (Python subclass, functorch transform), and no
/// pending negation or conjugation.
inline bool is_plain_strided(const at::Tensor& t) {
  constexpr c10::DispatchKeySet kPending(
      {c10::DispatchKey::Negative, c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor});
  return t.layout() == c10::kStrided && !t.key_set().has_any(kPythonKeys | kFunctorchKeys | kPending);
}

/// The tier for t: `ref` if the loops cannot read t or one of the others. Undefined tensors are ignored.
inline Tier vector_tier(const at::Tensor& t) {
  return is_plain_strided(t) ? vector_tier(t.device().type(), t.scalar_type()) : Tier::ref;
}
template <class... Others>
Tier vector_tier(const at::Tensor& t, const Others&... others) {
  const auto fits = [](const at::Tensor& other) { return !other.defined() || vector_tier(other) != Tier::ref; };
  return (fits(others) && ...) ? vector_tier(t) : Tier::ref;
}

/// An uninitialized CPU tensor. Bypasses the dispatcher, which costs more than a small kernel. malloc maps a new block
/// for each allocation above 32 MB; huge pages avoid page faults that would cost as much as the GEMM that fills it.
inline at::Tensor empty_cpu(at::IntArrayRef sizes, at::ScalarType dtype) {
  constexpr size_t kMmapThreshold = 32 << 20;
  at::Tensor t = at::detail::empty_cpu(sizes, dtype);
  if (t.nbytes() > kMmapThreshold) advise_huge_pages(t.mutable_data_ptr(), t.nbytes());
  return t;
}

/// An uninitialized tensor on the device of `like`, which is the CPU or simulated.
inline at::Tensor new_empty(const at::Tensor& like, at::IntArrayRef sizes, at::ScalarType dtype) {
  return like.is_cpu() ? empty_cpu(sizes, dtype) : at::empty(sizes, like.options().dtype(dtype));
}

inline at::Tensor new_zeros_f32(const at::Tensor& like, int64_t count) {
  auto t = new_empty(like, {count}, at::kFloat);
  std::fill_n(t.mutable_data_ptr<float>(), count, 0.F);
  return t;
}

/// `t`; if it is on a simulated device, a CPU tensor with its memory, for operations of torch that only the CPU has.
inline at::Tensor host_view(const at::Tensor& t) {
  if (!t.defined() || t.is_cpu() || !in_host_memory(t.device()) || !is_plain_strided(t)) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [t](void*) {}, t.options().device(at::kCPU));
}

inline at::Tensor contiguous(const at::Tensor& t) { return t.is_contiguous() ? t : t.contiguous(); }

/// Raises unless `t` has `count` elements in memory. Callers pass what operations written in Python return, and saved
/// tensors whose `.data` or storage may have been replaced since.
inline void check_elements(const at::Tensor& t, int64_t count, const char* what) {
  TORCH_CHECK_VALUE(t.numel() == count, what, " has shape ", t.sizes(), ", expected ", count,
                    count == 1 ? " element." : " elements.");
  TORCH_CHECK_VALUE(count == 0 || !in_host_memory(t.device()) || !is_plain_strided(t) || t.storage().data(), what,
                    " has no memory: its storage was freed. Keep the tensor until backward has run.");
}
/// `t`, contiguous, after `check_elements`.
inline at::Tensor contiguous(const at::Tensor& t, int64_t count, const char* what) {
  check_elements(t, count, what);
  return contiguous(t);
}
inline const void* data_or_null(const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }

constexpr int64_t kGrain = 32768;  // elements per thread from which a second thread pays

/// Calls run(begin, end) on ranges that cover [0, rows), in parallel if there is enough work.
template <class F>
void parallel_rows(int64_t rows, int64_t columns, const F& run) {
  const auto width = std::max<int64_t>(columns, 1);
  if (rows <= 0) return;
  if (rows * width <= kGrain) return run(0, rows);
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / width), run);
}

/// Reduces over rows: run(begin, end, partial) adds its rows to `partial`, which has `width` elements; all partial sums
/// are added to `sums`. The ranges depend on the sizes alone and partial sums are added in order, so the result is
/// bitwise the same for any number of threads.
template <class F>
void parallel_reduce_rows(int64_t rows, int64_t width, float* sums, const F& run) {
  const auto parts = std::clamp<int64_t>(rows * width / (8 * kGrain), 1, 16);
  if (parts == 1) return run(0, rows, sums);
  std::vector<float> partial(static_cast<size_t>(parts * width));
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    for (auto i = first; i < last; ++i) run(rows * i / parts, rows * (i + 1) / parts, partial.data() + i * width);
  });
  for (int64_t i = 0; i < parts; ++i)
    for (int64_t j = 0; j < width; ++j) sums[j] += partial[static_cast<size_t>(i * width + j)];
}

}  // namespace weft::kernels
