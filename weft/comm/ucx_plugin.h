#pragma once
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "weft/comm/transport.h"

namespace weft::comm {

/// The group that a UCX transport serves.
struct UcxOptions {
  c10::intrusive_ptr<c10d::Store> store;  // exchanges addresses and random tokens
  int rank = 0;
  int size = 1;
  std::string group;                    // name for error messages
  std::chrono::milliseconds timeout{};  // of each wait; greater than 0
};

/// Empty if this process may use UCX, otherwise the reason: WEFT_UCX_TRUSTED is not 1, or weft was built without UCX.
/// Does not load UCX.
std::string ucx_unavailable_reason();

/// Loads libweft_ucx.so, which is next to libweft.so, and UCX. Empty on success, otherwise the reason. Call it only if
/// UCX was selected.
std::string load_ucx();

/// Creates a UCX transport. A collective call. Raises if a rank is missing or `load_ucx` fails.
std::unique_ptr<Transport> make_ucx_transport(const UcxOptions& options);

}  // namespace weft::comm

/// Exported by libweft_ucx.so. Increment the number when `UcxOptions`, `Transport` or `InFlightCollective` changes.
extern "C" weft::comm::Transport* weft_ucx_transport_1(const weft::comm::UcxOptions& options);
