#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "weft/core/host_memory.h"
#include "weft/device/devices.h"
#include "weft/device/generator.h"
#include "weft/device/hooks.h"
#include "weft/device/host_alias.h"
#include "weft/device/host_kernel.h"
#include "weft/device/kernels.h"
#include "weft/device/memory.h"
#include "weft/device/process_group.h"
#include "weft/device/profiler.h"

namespace weft::device {
namespace {

namespace py = pybind11;

/// Makes `count` devices. Once for a process.
void start(c10::DeviceIndex count, size_t memory) {
  TORCH_CHECK_VALUE(count >= 1 && count <= kMaxDevices, "devices: got ", static_cast<int>(count), ", expected 1 to ",
                    static_cast<int>(kMaxDevices), ".");
  constexpr int kReferences = 2;  // of each function at least: from libtorch_cpu and from libtorch_python
  const auto replaced = replace_hooks();
  TORCH_CHECK(replaced >= 2 * kReferences, "simulated device: found ", replaced, " references to getCUDAHooks and ",
              "getAccelerator in torch's libraries, expected at least ", 2 * kReferences,
              ". This build of torch links them differently, and is not supported.");
  set_total_memory(memory);
  set_device_count(count);
  register_guard();
  register_profiler();
  register_timer();
  c10::SetAllocator(c10::DeviceType::CUDA, &device_allocator(), /*priority=*/100);
  static const auto* table = [] {
    auto t = std::make_unique<OperationTable>();
    register_kernels(*t);
    register_rnn_kernels(*t);
    register_host_kernels(*t);
    return t.release();  // kernels stay until the process ends
  }();
  (void)table;
  set_cuda_is_simulated();
}

py::dict as_dict(const c10::CachingAllocator::Stat& stat) {
  py::dict d;
  d["current"] = stat.current;
  d["peak"] = stat.peak;
  d["allocated"] = stat.allocated;
  d["freed"] = stat.freed;
  return d;
}

py::dict as_dict(const c10::CachingAllocator::StatArray& stats) {
  py::dict d;
  d["all"] = as_dict(stats[0]);
  d["small_pool"] = as_dict(stats[1]);
  d["large_pool"] = as_dict(stats[2]);
  return d;
}

/// The statistics in the form of torch._C._cuda_memoryStats.
py::dict memory_stats(c10::DeviceIndex device) {
  const auto stats = device_allocator().getDeviceStats(device);
  py::dict d;
  d["num_alloc_retries"] = stats.num_alloc_retries;
  d["num_ooms"] = stats.num_ooms;
  d["max_split_size"] = stats.max_split_size;
  d["num_sync_all_streams"] = stats.num_sync_all_streams;
  d["num_device_alloc"] = stats.num_device_alloc;
  d["num_device_free"] = stats.num_device_free;
  d["allocation"] = as_dict(stats.allocation);
  d["segment"] = as_dict(stats.segment);
  d["active"] = as_dict(stats.active);
  d["inactive_split"] = as_dict(stats.inactive_split);
  d["allocated_bytes"] = as_dict(stats.allocated_bytes);
  d["reserved_bytes"] = as_dict(stats.reserved_bytes);
  d["active_bytes"] = as_dict(stats.active_bytes);
  d["inactive_split_bytes"] = as_dict(stats.inactive_split_bytes);
  d["requested_bytes"] = as_dict(stats.requested_bytes);
  d["oversize_allocations"] = as_dict(stats.oversize_allocations);
  d["oversize_segments"] = as_dict(stats.oversize_segments);
  return d;
}

template <class T, class Base>
using HolderClass = py::class_<T, Base, c10::intrusive_ptr<T>>;

/// Keys of a store that no group used before. Torch names a group that is made again after destroy_process_group as the
/// group before: a rank could read the old addresses of the others and wait for them until the timeout. Each rank adds
/// one to a count, which all ranks share.
py::object unused_keys(const py::module_& distributed, const py::object& store, int size) {
  const auto key = "groups_of_" + std::to_string(size);
  const auto earlier = (store.attr("add")(key, 1).cast<int64_t>() - 1) / size;
  return distributed.attr("PrefixStore")(key + "/" + std::to_string(earlier), store);
}

/// torch.distributed.ProcessGroupNCCL, which a build of torch for the CPU lacks.
void bind_process_group(py::module_& m) {
  const auto distributed = py::module_::import("torch.distributed");
  const auto nothing = [](const ProcessGroup&) {};
  HolderClass<ProcessGroup, c10d::Backend> group(m, "ProcessGroupNCCL");
  HolderClass<ProcessGroup::Options, c10d::Backend::Options>(group, "Options", py::dynamic_attr())
      .def(py::init([](bool) { return c10::make_intrusive<ProcessGroup::Options>(); }),
           py::arg("is_high_priority_stream") = false);
  group
      .def(py::init([distributed](const py::object& store, int rank, int size,
                                  const c10::intrusive_ptr<ProcessGroup::Options>& options) {
             const auto keys = unused_keys(distributed, store, size);
             const auto gloo = distributed.attr("ProcessGroupGloo")(keys, rank, size, options->timeout);
             return c10::make_intrusive<ProcessGroup>(gloo.cast<c10::intrusive_ptr<c10d::Backend>>(), options);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def_property_readonly("uid", &ProcessGroup::getID)
      .def("_is_initialized", [](const ProcessGroup&) { return true; })
      .def("_comm_ptr", [](const ProcessGroup& self) { return reinterpret_cast<intptr_t>(&self); })
      .def("_add_ephemeral_timeout", [](const ProcessGroup&, const py::object&) {})
      .def("_group_start", nothing)
      .def("_group_end", nothing);
}

}  // namespace

PYBIND11_MODULE(_device, m) {
  m.doc() = "Simulated CUDA devices.";
  m.def("start", &start, py::arg("devices"), py::arg("memory"));
  m.def("autograd_has_started", &autograd_has_started);
  m.def("device_count", [] { return static_cast<int>(device_count()); });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("exchange_device",
        [](int index) { return static_cast<int>(exchange_device(static_cast<c10::DeviceIndex>(index))); });
  m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("memory_stats", [](int index) { return memory_stats(static_cast<c10::DeviceIndex>(index)); });
  m.def("reset_peak_stats", [](int index) { device_allocator().resetPeakStats(static_cast<c10::DeviceIndex>(index)); });
  m.def("reset_accumulated_stats",
        [](int index) { device_allocator().resetAccumulatedStats(static_cast<c10::DeviceIndex>(index)); });
  m.def("empty_cache", [] { device_allocator().emptyCache(); });
  m.def("memory_info",
        [](int index) { return device_allocator().getMemoryInfo(static_cast<c10::DeviceIndex>(index)); });
  m.def("set_memory_fraction",
        [](double fraction, int index) { set_memory_fraction(fraction, static_cast<c10::DeviceIndex>(index)); });
  m.def("memory_fraction", [](int index) { return memory_fraction(static_cast<c10::DeviceIndex>(index)); });
  m.def("resize_storage", [](const at::Tensor& t, int64_t bytes) {
    resize_storage(*t.storage().unsafeGetStorageImpl(), static_cast<size_t>(bytes));
  });
  bind_process_group(m);
  m.def("host_alias", &host_alias, "The tensor of the CPU with the memory of a tensor on a simulated device.");
}

}  // namespace weft::device
