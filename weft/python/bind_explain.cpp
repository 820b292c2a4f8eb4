#include "weft/fuser/explain.h"

#include "weft/comm/ucx_plugin.h"
#include "weft/python/module.h"

namespace weft::python {
namespace {

py::list steps(const std::vector<fuser::Explanation::StepLine>& lines) {
  py::list list;
  for (const auto& s : lines)
    list.append(py::dict(py::arg("first") = s.first, py::arg("count") = s.count, py::arg("name") = s.name,
                         py::arg("fused") = s.fused, py::arg("tier") = s.tier,
                         py::arg("tier_rejection") = s.tier_rejection, py::arg("runs") = s.runs,
                         py::arg("min_rows") = s.min_rows, py::arg("note") = s.note));
  return list;
}

py::dict data(const fuser::Explanation& e) {
  py::list rejected, saved, channels;
  const auto notes = [](const std::vector<fuser::Explanation::Note>& list) {
    py::list out;
    for (const auto& n : list) out.append(py::dict(py::arg("op") = n.op, py::arg("text") = n.text));
    return out;
  };
  for (const auto& r : e.rejections)
    rejected.append(py::dict(py::arg("rule") = r.rule, py::arg("pass") = fused::pass_name(r.pass),
                             py::arg("first") = r.first, py::arg("count") = r.count, py::arg("reason") = r.reason));
  for (const auto& s : e.saved)
    saved.append(py::dict(py::arg("op") = s.op, py::arg("name") = s.name, py::arg("sizes") = s.sizes,
                          py::arg("dtype") = s.dtype, py::arg("bytes") = s.bytes, py::arg("shared") = s.shared));
  for (const auto& c : e.channels)
    channels.append(py::dict(py::arg("from") = c.from, py::arg("to") = c.to, py::arg("name") = c.name));
  return py::dict(py::arg("operations") = e.ops, py::arg("forward") = steps(e.forward),
                  py::arg("backward") = steps(e.backward), py::arg("rejected") = rejected,
                  py::arg("quantized") = notes(e.quantized), py::arg("in_place") = notes(e.in_place),
                  py::arg("saved") = saved, py::arg("channels") = channels, py::arg("saved_bytes") = e.saved_bytes(),
                  py::arg("saved_known") = e.saved_known, py::arg("from_caller") = e.from_caller,
                  py::arg("to_caller") = e.to_caller, py::arg("packs") = e.packs,
                  py::arg("packed_bytes") = e.packed_bytes, py::arg("packing_limit") = e.packing_limit);
}

}  // namespace

void bind_explain(py::module_& m) {
  m.def("ucx_unavailable_reason", &comm::ucx_unavailable_reason,
        "Why ranks on several hosts do not communicate over UCX; empty if they may.");
  m.def(
      "machine_tier", [] { return std::string(kernels::tier_name(kernels::machine_tier())); },
      "The best kernel tier (instruction set) of this machine, or the one set by WEFT_TIER.");
  py::class_<fuser::Explanation>(m, "Explanation", "What a call of a pipeline does and why.")
      .def_property_readonly("data", &data, "The explanation as dictionaries and lists.")
      .def_property_readonly("text", &fuser::Explanation::text, "The explanation as text.")
      .def_property_readonly("dot", &fuser::Explanation::dot, "Graphviz source.");
}

}  // namespace weft::python
