#include <string>

#include "weft/te/bind.h"

// Userbuffers: GPUs write to each other's memory while they compute GEMMs. The classes exist for annotations and
// isinstance checks; making an object raises.

namespace weft::te {
namespace {

constexpr const char* kUserbuffers =
    "Userbuffers are buffers that GPUs map for each other. Create layers without ub_overlap_* and do not call "
    "initialize_ub: the collectives of torch.distributed then run before or after the GEMMs, with the same result.";

struct CommOverlapCore {};
struct CommOverlapBase : CommOverlapCore {};
struct CommOverlapP2PBase : CommOverlapCore {};
struct CommOverlap : CommOverlapBase {};
struct CommOverlapP2P : CommOverlapP2PBase {};
struct CommOverlapHelper {};

/// A class whose constructor raises.
template <class T, class... Bases>
void bind_class(py::module_& m, const char* name) {
  const auto raise = [message = "transformer_engine_torch." + std::string(name) +
                                " is not supported on the CPU: " + kUserbuffers](
                         const py::args&, const py::kwargs&) -> T* { TORCH_CHECK_NOT_IMPLEMENTED(false, message); };
  py::class_<T, Bases...>(m, name, py::module_local()).def(py::init(raise));
}

}  // namespace

void bind_comm_overlap(py::module_& m) {
  bind_class<CommOverlapHelper>(m, "CommOverlapHelper");
  bind_class<CommOverlapCore>(m, "CommOverlapCore");
  bind_class<CommOverlapBase, CommOverlapCore>(m, "CommOverlapBase");
  bind_class<CommOverlapP2PBase, CommOverlapCore>(m, "CommOverlapP2PBase");
  bind_class<CommOverlap, CommOverlapBase>(m, "CommOverlap");
  bind_class<CommOverlapP2P, CommOverlapP2PBase>(m, "CommOverlapP2P");
  bind_unsupported(m, "bulk_overlap_ag_with_external_gemm", kUserbuffers);
}

}  // namespace weft::te
