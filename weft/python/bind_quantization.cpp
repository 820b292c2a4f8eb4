#include <cmath>

#include "weft/core/dispatch_keys.h"
#include "weft/kernels/quantized_gemm.h"
#include "weft/python/convert.h"
#include "weft/python/module.h"
#include "weft/quant/observer.h"
#include "weft/quant/quantizer.h"

namespace weft::python {
namespace {

using kernels::QuantizedCopy;
using kernels::QuantizedMatrix;
using quant::Quantizer;

Quantizer make_quantizer(const py::args& args, const py::kwargs& fields) {
  TORCH_CHECK_TYPE(args.size() <= 1, "Quantizer takes at most 1 positional argument (scaling), got ", args.size(), ".");
  TORCH_CHECK_TYPE(args.empty() || !fields.contains("scaling"), "Quantizer got scaling twice.");
  Quantizer quantizer;
  const auto set = [&](const std::string& name, py::handle value) {
    set_field(quantizer, "Quantizer", name, to_value("Quantizer: " + name, value));
  };
  if (!args.empty()) set("scaling", args[0]);
  if (fields.contains("scaling")) set("scaling", fields["scaling"]);
  if (quantizer.scaling == quant::Scaling::nvfp4) quantizer.format = Format::e2m1;
  for (const auto& [name, value] : fields) set(name.cast<std::string>(), value);
  quantizer.check();
  return quantizer;
}

std::string repr_of(const Quantizer& quantizer) {
  const auto text_of = [](const Value& value) { return py::repr(to_python(value)).cast<std::string>(); };
  const auto defaults = list_fields(Quantizer{}), fields = list_fields(quantizer);
  std::string text = "Quantizer(" + text_of(fields[0].value);
  for (size_t i = 1; i < fields.size(); ++i)
    if (fields[i].value != defaults[i].value) text += ", " + fields[i].name + "=" + text_of(fields[i].value);
  return text + ")";
}

QuantizedMatrix quantize(const Quantizer& quantizer, const at::Tensor& x, bool rowwise, bool columnwise,
                         const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& amax,
                         const std::optional<at::Tensor>& transformed_amax, std::optional<uint64_t> seed,
                         uint64_t offset) {
  TORCH_CHECK_VALUE((quantizer.scaling == quant::Scaling::delayed) == scale.has_value(),
                    "Quantizer.quantize: `scale` is required with scaling \"delayed\", and only there.");
  TORCH_CHECK_VALUE(quantizer.stochastic_rounding == seed.has_value(),
                    "Quantizer.quantize: `seed` is required with stochastic_rounding, and only there.");
  const py::gil_scoped_release release;
  const BelowAutograd below;
  return kernels::quantize(x, quantizer.quantization(),
                           {.rowwise = rowwise,
                            .columnwise = columnwise,
                            .scale = scale.value_or(at::Tensor()),
                            .amax = amax.value_or(at::Tensor()),
                            .transformed_amax = transformed_amax.value_or(at::Tensor()),
                            .random = {.seed = seed.value_or(0), .offset = offset}});
}

at::Tensor amax_of(const Quantizer& quantizer, const at::Tensor& x, bool transformed) {
  TORCH_CHECK_VALUE(!transformed || quantizer.random_hadamard_transform,
                    "Quantizer.amax: transformed=True requires random_hadamard_transform.");
  const py::gil_scoped_release release;
  const BelowAutograd below;
  return kernels::quantization_amax(x, quantizer.quantization(), transformed);
}

/// A property of a copy; None if the copy or the tensor does not exist.
auto property(QuantizedCopy QuantizedMatrix::* copy, at::Tensor QuantizedCopy::* tensor) {
  return [=](const QuantizedMatrix& q) -> std::optional<at::Tensor> {
    const auto& t = q.*copy.*tensor;
    return t.defined() ? std::optional(t.alias()) : std::nullopt;
  };
}

at::Tensor dequantize(const QuantizedMatrix& q, bool columnwise, std::optional<at::ScalarType> dtype) {
  const py::gil_scoped_release release;
  const BelowAutograd below;
  return kernels::dequantize(q, columnwise, dtype.value_or(q.dtype));
}

at::Tensor quantized_gemm(const QuantizedMatrix& a, const QuantizedMatrix& b, bool a_columnwise, bool b_columnwise,
                          const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& out, bool accumulate,
                          std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_VALUE(out.has_value() || !accumulate, "quantization.gemm: accumulate=True requires `out`.");
  const py::gil_scoped_release release;
  const BelowAutograd below;
  return kernels::quantized_gemm({a, a_columnwise}, {b, b_columnwise},
                                 {.bias = bias.value_or(at::Tensor()),
                                  .addend = accumulate ? *out : at::Tensor(),
                                  .out = out.value_or(at::Tensor()),
                                  .dtype = dtype.value_or(at::ScalarType::Undefined)})
      .out;
}

/// The values of the rowwise codes, without scales.
at::Tensor rowwise_codes(const QuantizedMatrix& q) {
  const py::gil_scoped_release release;
  const BelowAutograd below;
  return kernels::decode_copy(q, false, kernels::Decoding::codes, at::kFloat);
}

/// An observer that calls Python functions.
class PythonObserver : public quant::Observer {
 public:
  PythonObserver(py::function forward, py::function backward)
      : forward_(std::move(forward)), backward_(std::move(backward)) {}
  ~PythonObserver() override {
    const py::gil_scoped_acquire acquire;
    forward_ = {}, backward_ = {};
  }

  void observe_forward(int64_t call, const at::Tensor& parameter, const quant::ObservedOperand& x,
                       const quant::ObservedOperand& w) override {
    const py::gil_scoped_acquire acquire;
    forward_(call, parameter, x.matrix, x.quantized, w.matrix, w.quantized);
  }
  void observe_backward(int64_t call, const quant::ObservedOperand& dy) override {
    const py::gil_scoped_acquire acquire;
    backward_(call, dy.matrix, dy.quantized);
  }

 private:
  py::function forward_, backward_;
};

void set_observer(std::optional<py::function> forward, std::optional<py::function> backward) {
  std::shared_ptr<quant::Observer> observer;
  if (forward && backward) observer = std::make_shared<PythonObserver>(std::move(*forward), std::move(*backward));
  quant::set_observer(std::move(observer));
}

constexpr const char* kQuantizeDoc = R"(Quantizes a matrix.

Args:
    x: a matrix of float32, bfloat16 or float16.
    rowwise: makes a copy with blocks along the last dimension.
    columnwise: makes a copy with blocks along the first dimension, stored transposed; as the matrix is for mxfp8.
    scale: float32, one element; required with scaling "delayed".
    amax: what ``amax(x)`` returns, e.g. reduced over ranks. Computed from x by default.
    transformed_amax: what ``amax(x, transformed=True)`` returns. Computed from x by default.
    seed: of stochastic rounding, where it is required. Use another seed or offset for each tensor.
    offset: of stochastic rounding; 0 or more.
)";

std::string quantizer_doc() {
  std::string text = "How a matrix is quantized.\n\nArgs:\n";
  const auto docs = list_field_docs<Quantizer>();
  const auto fields = list_fields(Quantizer{});
  for (size_t i = 0; i < docs.size(); ++i) text += "    " + fields[i].name + ": " + docs[i].description + "\n";
  return text;
}

}  // namespace

void bind_quantization(py::module_& m) {
  using Q = QuantizedMatrix;
  const auto bind_copy = [](auto& c, const std::string& name, QuantizedCopy Q::* copy) {
    c.def_property_readonly((name + "_data").c_str(), property(copy, &QuantizedCopy::data), "uint8 codes, or None.");
    c.def_property_readonly((name + "_scales").c_str(), property(copy, &QuantizedCopy::scales),
                            "One scale per block, or None: inverses in float32, or uint8 codes.");
    c.def_property_readonly((name + "_amax").c_str(), property(copy, &QuantizedCopy::amax),
                            "Maximum magnitude of the matrix or of its rows, or None.");
  };
  py::class_<QuantizedMatrix> matrix(m, "QuantizedMatrix", "A matrix in a low-precision format, with its scales.");
  bind_copy(matrix, "rowwise", &Q::rowwise);
  bind_copy(matrix, "columnwise", &Q::columnwise);
  matrix
      .def_property_readonly(
          "shape", [](const Q& q) { return std::tuple(q.rows, q.columns); }, "Before quantization.")
      .def_property_readonly(
          "dtype", [](const Q& q) { return q.dtype; }, "Before quantization.")
      .def_property_readonly(
          "format", [](const Q& q) { return EnumNames<Format>::list[static_cast<size_t>(q.quantization.format)]; },
          "Of the codes.")
      .def_property_readonly(
          "max_code", [](const Q& q) { return traits_of(q.quantization.format).max; }, "The largest value of a code.")
      .def_property_readonly(
          "min_normal_code", [](const Q& q) { return std::ldexp(1., 1 - traits_of(q.quantization.format).bias); },
          "The smallest value of a code that is not subnormal.")
      .def("codes", &rowwise_codes, "Returns the values of the rowwise codes without their scales, as float32.")
      .def("dequantize", &dequantize, py::kw_only(), py::arg("columnwise") = false, py::arg("dtype") = py::none(),
           "Returns the values of a copy, in the dtype before quantization unless another one is given.");
  static const std::string doc = quantizer_doc();
  py::class_<Quantizer>(m, "Quantizer", doc.c_str())
      .def(py::init(&make_quantizer))
      .def(
          "fields", [](const Quantizer& q) { return to_python(list_fields(q)); }, "Field names and values.")
      .def("amax", &amax_of, py::arg("x"), py::kw_only(), py::arg("transformed") = false,
           "Returns the maximum magnitude of a matrix, or of its rows if row_scaled, as float32; with transformed=True "
           "after the Hadamard transform. Reduce it over ranks and pass it to quantize.")
      .def("quantize", &quantize, py::arg("x"), py::kw_only(), py::arg("rowwise") = true, py::arg("columnwise") = false,
           py::arg("scale") = py::none(), py::arg("amax") = py::none(), py::arg("transformed_amax") = py::none(),
           py::arg("seed") = py::none(), py::arg("offset") = 0, kQuantizeDoc)
      .def(
          "__eq__", [](const Quantizer& a, const Quantizer& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const Quantizer& q) { return py::hash(py::str(repr_of(q))); })
      .def("__repr__", &repr_of);
  m.def("set_quantization_observer", &set_observer, py::arg("forward"), py::arg("backward"),
        "Sets the functions that see what linears quantize, or None for none.");
  m.def("quantized_gemm", &quantized_gemm, py::arg("a"), py::arg("b"), py::kw_only(), py::arg("a_columnwise") = false,
        py::arg("b_columnwise") = false, py::arg("bias") = py::none(), py::arg("out") = py::none(),
        py::arg("accumulate") = false, py::arg("dtype") = py::none(), "A Bᵀ of quantized matrices.");
}

}  // namespace weft::python
