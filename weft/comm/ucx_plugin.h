#pragma once
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "weft/comm/transport.h"

namespace weft::comm {

/// What a network link needs to know of its group.
struct UcxOptions {
  c10::intrusive_ptr<c10d::Store> store;  // of the group: addresses and the token go through it
  int rank = 0;
  int size = 1;
  std::string group;                    // its name, for messages
  std::chrono::milliseconds timeout{};  // of each wait; more than 0
};

/// Empty if UCX may be used in this process, else why not: it is not trusted (WEFT_UCX_TRUSTED), or weft was built
/// without it. Loads nothing.
std::string ucx_unavailable_reason();

/// Loads libweft_ucx.so, which lies beside this library if UCX was found when weft was built, and UCX with it. Empty if
/// links over UCX can then be made, else why not. To be called only where UCX was chosen.
std::string load_ucx();

/// A link over UCX. Every rank of the group calls this at the same time. Raises if one of them is missing, and what
/// `load_ucx` says.
std::unique_ptr<Transport> make_ucx_transport(const UcxOptions& options);

}  // namespace weft::comm

/// What libweft_ucx.so exports. The number grows with each change of `UcxOptions`, `Transport` or `InFlightCollective`.
extern "C" weft::comm::Transport* weft_ucx_transport_1(const weft::comm::UcxOptions& options);
