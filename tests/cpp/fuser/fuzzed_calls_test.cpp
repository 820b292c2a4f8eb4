// Random calls of random pipelines: each returns what `infer` predicts, or raises an error that names the cause.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <optional>
#include <random>

#include "weft/fuser/call_validation.h"
#include "weft/fuser/functional.h"
#include "weft/ops/registry.h"

namespace weft::fuser {
namespace {

using at::Tensor;
using ops::OpPtr;
using Sizes = std::vector<int64_t>;

class Rng {
 public:
  explicit Rng(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <class T>
  T of(const std::vector<T>& list) {
    return list[below(static_cast<int64_t>(list.size()))];
  }

 private:
  std::mt19937_64 engine_;
};

int64_t count(const Sizes& sizes) {
  int64_t n = 1;
  for (const auto size : sizes) n *= size;
  return n;
}

// ---- tensors --------------------------------------------------------------------------------------------------------

Tensor values(const Sizes& sizes, at::ScalarType dtype) { return at::randn(sizes, at::kFloat).to(dtype); }

/// Random values of these sizes, with random strides.
Tensor strided(Rng& rng, const Sizes& sizes, at::ScalarType dtype) {
  const auto last = static_cast<int64_t>(sizes.size()) - 1;
  if (last < 0) return values(sizes, dtype);
  auto larger = sizes;
  switch (rng.below(8)) {
    case 0:  // transposed
      std::swap(larger.front(), larger.back());
      return values(larger, dtype).transpose(0, last);
    case 1:  // every second column
      larger.back() *= 2;
      return values(larger, dtype).slice(last, 0, larger.back(), 2);
    case 2:  // expanded
      larger.front() = 1;
      return values(larger, dtype).expand(sizes);
    case 3:  // with a storage offset
      return values({count(sizes) + 1}, dtype).narrow(0, 1, count(sizes)).view(sizes);
    default:
      return values(sizes, dtype);
  }
}

/// A tensor that differs from `t` in dtype, device, shape or being defined.
Tensor invalid_tensor(Rng& rng, const Tensor& t) {
  Sizes sizes = t.sizes().vec();
  switch (rng.below(7)) {
    case 0:
      return {};
    case 1:
      return t.to(rng.of<at::ScalarType>({at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}));
    case 2:
      return t.to(rng.of<at::ScalarType>({at::kLong, at::kInt, at::kBool, at::kComplexFloat}));
    case 3:
      return t.to(at::kMeta);
    case 4:
      if (!sizes.empty()) ++sizes[rng.below(t.dim())];
      return values(sizes, t.scalar_type());
    case 5:
      return values({}, t.scalar_type());
    default:
      return t.unsqueeze(0);
  }
}

void corrupt(Rng& rng, Tensor& t, int64_t one_in) {
  if (t.defined() && rng.one_in(one_in)) t = invalid_tensor(rng, t);
}

Tensor leaf(Rng& rng, const Tensor& t) {
  if (!t.defined() || !t.is_floating_point()) return t;
  return t.detach().requires_grad_(rng.one_in(2));
}

/// Split sizes that may leave a tail of rows, and are occasionally invalid.
Tensor splits(Rng& rng, int64_t groups, int64_t rows) {
  Sizes sizes;
  for (int64_t g = 0, left = rows; g < groups; left -= sizes.back(), ++g) sizes.push_back(rng.below(left + 1));
  if (groups > 0 && rng.one_in(12))
    sizes[rng.below(groups)] =
        rng.of<int64_t>({-1, rows + 1, int64_t{1} << 40, std::numeric_limits<int64_t>::max(), 1 - rows});
  return at::tensor(sizes, at::kLong).to(rng.one_in(3) ? at::kInt : at::kLong);
}

/// Class indices, some ignored, occasionally out of range.
Tensor classes(Rng& rng, const Sizes& lead, int64_t width) {
  Sizes list;
  for (int64_t row = 0; row < count(lead); ++row)
    list.push_back(rng.one_in(6) ? -100 : rng.below(std::max<int64_t>(width, 1)));
  if (!list.empty() && rng.one_in(12))
    list.back() = rng.of<int64_t>({-1, width, int64_t{1} << 40, std::numeric_limits<int64_t>::max()});
  return at::tensor(list, at::kLong).view(lead).to(rng.one_in(3) ? at::kInt : at::kLong);
}

// ---- pipelines ------------------------------------------------------------------------------------------------------

/// An unusual or invalid value for the field.
Value unexpected_value(Rng& rng, const Value& value) {
  constexpr auto kMax = std::numeric_limits<int64_t>::max();
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  if (const auto* flag = std::get_if<bool>(&value)) return !*flag;
  if (const auto* n = std::get_if<int64_t>(&value))
    return rng.of<int64_t>({-1, 0, 1, *n + 1, 2 * *n, int64_t{1} << 40, kMax, -kMax - 1});
  if (std::holds_alternative<double>(value))
    return rng.of<double>({0, -1, 1, 1e300, 1e-300, kInfinity, -kInfinity, std::nan("")});
  if (std::holds_alternative<Sizes>(value))
    return rng.of<Sizes>({{}, {0}, {-1}, {-1, -1}, {3, 0, -1}, {int64_t{1} << 40}, {kMax, 2}, {1, 1, 8}});
  return rng.of<Value>({Value{}, "", "?", "bfloat16", "float64", "column", "row", int64_t{1}, 0.5, true});
}

/// The sizes of x at the current stage of a pipeline.
struct Rows {
  Sizes lead;
  int64_t width;

  Sizes sizes() const {
    auto all = lead;
    all.push_back(width);
    return all;
  }
};

/// A value that fits `rows`, judging by the field's name.
Value fitting_value(Rng& rng, const std::string& name, const Value& value, const Rows& rows) {
  if (name == "in_features" || name == "size") return rows.width;
  if (name == "out_features") return rng.of<int64_t>({1, 2, 4, 6, 8, 16, 31, 32, 64, 96});
  if (name == "num_groups") return 1 + rng.below(4);
  if (name == "shape") return rng.of<Sizes>({{-1, rows.width}, {-1, 1, rows.width}});
  if (name == "normalized_shape")
    return rows.lead.empty() || rng.one_in(2) ? Sizes{rows.width} : Sizes{rows.lead.back(), rows.width};
  if (name == "glu_interleave_size" && rng.one_in(2)) return Value{};
  if (std::holds_alternative<bool>(value) && rng.one_in(10)) return !std::get<bool>(value);
  return value;
}

OpPtr make_op(Rng& rng, const ops::OpType& type, const Rows& rows) {
  ops::Keywords keywords;
  for (const auto& field : type.sample->fields())
    keywords.emplace_back(field.name, rng.one_in(60) ? unexpected_value(rng, field.value)
                                                     : fitting_value(rng, field.name, field.value, rows));
  return type.make(keywords);
}

int64_t int_field(const ops::BasicOp& op, const std::string& name, int64_t otherwise) {
  for (const auto& field : op.fields())
    if (field.name == name && std::holds_alternative<int64_t>(field.value)) return std::get<int64_t>(field.value);
  return otherwise;
}

bool gated(const std::string_view name) { return name.ends_with("GLU"); }

struct Call {
  std::vector<Stage> stages;
  Tensor x;
  std::vector<Tensor> params;
  Tensors extras;
  uint64_t eval_mask = 0;
  at::ScalarType dtype = at::kFloat;

  /// The operations; together with the number, they identify the call.
  std::string names() const {
    std::string text;
    for (const auto& stage : stages) text += stage.op->text() + "; ";
    return text;
  }
};

void add_extras(Rng& rng, Call& call, Stage& stage, const Rows& rows, const std::vector<std::string>& channels) {
  const auto& op = *stage.op;
  for (int k = 0; k < op.extra_inputs(); ++k) {
    const bool index = op.is_index(k);
    const bool per_row = op.name().starts_with("Scaled") || op.name() == "GroupedLinear";
    if (!index && !per_row && !channels.empty() && rng.one_in(2)) {
      stage.in.resize(k + 1);
      stage.in[k] = rng.one_in(30) ? "?" : rng.of(channels);
      continue;
    }
    if (!index)
      call.extras.push_back(strided(rng, per_row ? rows.lead : rows.sizes(), call.dtype));
    else if (op.name() == "CrossEntropy")
      call.extras.push_back(classes(rng, rows.lead, rows.width));
    else
      call.extras.push_back(splits(rng, int_field(op, "num_groups", 1), count(rows.lead)));
  }
}

void add_stage(Rng& rng, Call& call, Rows& rows, std::vector<std::string>& channels) {
  std::vector<const ops::OpType*> types;
  for (const auto& [name, type] : ops::op_types())
    if (!gated(name) || rows.width % 2 == 0 || rng.one_in(20)) types.push_back(&type);
  Stage stage{.op = make_op(rng, *rng.of(types), rows)};
  const auto& op = *stage.op;
  add_extras(rng, call, stage, rows, channels);
  if (op.extra_outputs() > 0 && rng.one_in(2)) {
    channels.push_back(std::string(1, static_cast<char>('a' + channels.size())));
    stage.out.push_back({.channel = channels.back(), .to_caller = rng.one_in(2)});
  }
  for (const auto& spec : op.params()) {
    const bool small = std::all_of(spec.shape.begin(), spec.shape.end(), [](auto n) { return n >= 0 && n <= 4096; });
    call.params.push_back(leaf(rng, strided(rng, small ? spec.shape : Sizes{3}, call.dtype)));
  }
  if (op.name() == "Reshape") rows.lead = {count(rows.lead)};
  if (gated(op.name())) rows.width /= 2;
  if (op.name() == "CrossEntropy" && !rows.lead.empty()) {  // one loss per row
    rows.width = rows.lead.back();
    rows.lead.pop_back();
  }
  rows.width = std::clamp<int64_t>(int_field(op, "out_features", rows.width), 0, 4096);
  call.stages.push_back(std::move(stage));
}

void all_to_meta(Call& call) {
  const auto move = [](Tensor& t) { t = t.defined() ? t.detach().to(at::kMeta).requires_grad_(t.requires_grad()) : t; };
  move(call.x);
  for (auto& t : call.params) move(t);
  for (auto& t : call.extras) move(t);
}

Call make_call(Rng& rng) {
  Call call;
  call.dtype = rng.of<at::ScalarType>({at::kFloat, at::kFloat, at::kBFloat16, at::kBFloat16, at::kDouble, at::kHalf});
  Rows rows{{}, rng.of<int64_t>({0, 1, 2, 4, 8, 8, 16, 31, 32, 48, 64, 96, 130})};
  const auto dims = rng.below(4);
  for (int64_t d = 0; d < dims; ++d)
    rows.lead.push_back(dims == 1 ? rng.of<int64_t>({0, 1, 3, 7, 16, 33, 64, 257})
                                  : rng.of<int64_t>({0, 1, 2, 3, 5, 8}));
  call.x = leaf(rng, strided(rng, rng.one_in(40) ? Sizes{} : rows.sizes(), call.dtype));
  std::vector<std::string> channels;
  for (auto n = 1 + rng.below(6); n > 0; --n) add_stage(rng, call, rows, channels);
  call.eval_mask = rng.one_in(4) ? static_cast<uint64_t>(rng.below(64)) : 0;
  corrupt(rng, call.x, 40);
  for (auto& t : call.params) corrupt(rng, t, 80);
  for (auto& t : call.extras) {
    corrupt(rng, t, 40);
    t = leaf(rng, t);
  }
  if (rng.one_in(100)) call.params.emplace_back(values({2}, call.dtype));
  if (rng.one_in(100)) call.extras.emplace_back(values({2}, call.dtype));
  if (rng.one_in(60)) all_to_meta(call);
  return call;
}

// ---- checks ---------------------------------------------------------------------------------------------------------

void expect_spec(const Tensor& t, const ops::Spec& spec, const char* what) {
  ASSERT_TRUE(t.defined()) << what;
  EXPECT_TRUE(t.sym_sizes().equals(spec.sizes)) << what << " has sizes " << t.sizes();
  EXPECT_EQ(t.scalar_type(), spec.dtype) << what;
}

/// An undefined gradient is zero.
void expect_gradient(const Tensor& grad, const Tensor& of, const char* what) {
  if (!grad.defined()) return;
  EXPECT_EQ(grad.sizes(), of.sizes()) << what;
}

std::vector<Tensor> gradients(Rng& rng, c10::ArrayRef<Tensor> outputs) {
  std::vector<Tensor> list;
  for (const auto& y : outputs) {
    list.push_back(y.is_meta() ? at::empty_like(y.detach()) : strided(rng, y.sizes().vec(), y.scalar_type()));
    corrupt(rng, list.back(), 20);
  }
  return list;
}

/// Calls the pipeline through the autograd node.
void run_fuser(Rng& rng, const Call& call, const Pipeline& pipeline) {
  Fuser fuser{Pipeline(pipeline.stages())};
  const auto plan = fuser.plan(call.x, call.params, call.extras, call.eval_mask);
  const auto shapes = infer(pipeline, *plan, call.x, call.params, call.extras);
  const auto outputs = fuser(call.x, call.params, call.extras, call.eval_mask);
  ASSERT_EQ(outputs.size(), shapes.outputs.size());
  for (size_t k = 0; k < outputs.size(); ++k) expect_spec(outputs[k], shapes.outputs[k], "an output");
  std::vector<Tensor> roots;
  for (const auto& y : outputs)
    if (y.requires_grad() && (roots.empty() || rng.one_in(2))) roots.push_back(y);
  if (roots.empty()) return;
  auto grads = gradients(rng, roots);
  torch::autograd::backward(roots, grads);
  for (const auto& t : call.params) expect_gradient(t.grad(), t, "the gradient of a parameter");
}

/// Calls the functional pair, whose backward must check all its arguments.
void run_functional(Rng& rng, Call call, const Pipeline& pipeline) {
  const auto text = describe(pipeline, make_plan_key(pipeline, call.x, call.params, call.extras, call.eval_mask));
  auto out = forward(call.x, call.params, call.extras, text);
  ASSERT_EQ(out.outputs.size(), out.shapes.outputs.size());
  for (size_t k = 0; k < out.outputs.size(); ++k) expect_spec(out.outputs[k], out.shapes.outputs[k], "an output");
  auto grads = gradients(rng, out.outputs);
  if (rng.one_in(30)) grads.emplace_back();
  for (auto& t : out.saved) {
    corrupt(rng, t, 40);
    if (t.defined() && !t.is_meta() && rng.one_in(40)) t = values(t.sizes().vec(), t.scalar_type()).mul(100);
  }
  corrupt(rng, call.x, 60);
  for (auto& t : call.params) corrupt(rng, t, 100);
  for (auto& t : call.extras) corrupt(rng, t, 60);
  const auto got = backward(grads, out.saved, call.x, call.params, call.extras, text);
  ASSERT_EQ(got.size(), 1 + call.params.size() + call.extras.size());
  expect_gradient(got[0], call.x, "dx");
  for (size_t p = 0; p < call.params.size(); ++p) expect_gradient(got[1 + p], call.params[p], "dparam");
}

/// Whether an error message is specific: it names weft, a pipeline, an operation, or autograd's rules for gradients.
bool names_something(const std::string& message) {
  if (message.empty() || message.find("INTERNAL ASSERT") != std::string::npos) return false;
  for (const auto* word : {"weft", "ipeline", "process group", "Linear", "split"})
    if (message.find(word) != std::string::npos) return true;
  for (const auto& [name, type] : ops::op_types())
    if (message.find(name) != std::string::npos) return true;
  // torch's messages about a gradient that does not match its output
  return message.find("grad") != std::string::npos || message.find("meta tensor") != std::string::npos;
}

/// Enables autocast to bfloat16 for its lifetime.
class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast() { at::autocast::set_autocast_enabled(at::kCPU, false); }
};

/// Returns whether the call succeeded.
bool run_call(uint64_t number) {
  Rng rng(number);
  at::manual_seed(number);
  Call call;
  try {
    call = make_call(rng);
    SCOPED_TRACE("call " + std::to_string(number) + ": " + call.names());
    const Pipeline pipeline(call.stages);
    std::optional<Autocast> autocast;
    if (rng.one_in(8)) autocast.emplace();
    rng.one_in(2) ? run_fuser(rng, call, pipeline) : run_functional(rng, call, pipeline);
    return true;
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    EXPECT_TRUE(names_something(message)) << "call " << number << ": " << call.names() << "\n" << message;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "call " << number << ": " << call.names() << "\nraised a non-torch exception: " << error.what();
  }
  return false;
}

void run_calls(uint64_t calls) {
  uint64_t succeeded = 0;
  for (uint64_t number = 0; number < calls && !::testing::Test::HasFailure(); ++number) succeeded += run_call(number);
  std::cout << calls << " fuzzed calls, of which " << succeeded << " succeed" << std::endl;
  EXPECT_GT(succeeded, calls / 4) << "too few calls pass the argument checks";
  EXPECT_LT(succeeded, calls * 3 / 4) << "too few calls are invalid";
}

TEST(FuzzedCalls, MatchInferredShapesOrRaise) { run_calls(2000); }
TEST(FuzzedCalls, SlowHundredThousandMatchInferredShapesOrRaise) { run_calls(100'000); }

}  // namespace
}  // namespace weft::fuser
