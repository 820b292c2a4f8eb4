// Properties of every registered operation, checked on its sample. Registering an operation adds it to these tests.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <stdexcept>

#include "weft/ops/registry.h"

namespace weft::ops {
namespace {

using at::Tensor;

constexpr int64_t kRows = 3;
constexpr at::ScalarType kOff = at::ScalarType::Undefined;
enum class NeedsGrad { all, input, rest, nothing };

/// Values of both signs, away from the kinks of relu (0) and of the clamped samples (±0.75).
Tensor values(at::IntArrayRef sizes) {
  const auto u = at::rand(sizes, at::kDouble);
  const auto magnitude = at::where(u.lt(0.5), u * 1.1 + 0.1, u + 0.35);
  return at::where(at::rand(sizes, at::kDouble).lt(0.5), magnitude, -magnitude);
}

/// The trailing sizes of the input that `op` takes.
std::vector<int64_t> row_of(const BasicOp& op) {
  for (const auto& field : op.fields()) {
    if (field.name == "in_features" || field.name == "size") return {std::get<int64_t>(field.value)};
    if (field.name == "normalized_shape") return std::get<std::vector<int64_t>>(field.value);
  }
  return {8};
}

/// Split sizes of `rows` rows for `op`: all but one in the first group, none in the last.
Tensor splits(const BasicOp& op, int64_t rows) {
  int64_t groups = 0;
  for (const auto& field : op.fields())
    if (field.name == "num_groups") groups = std::get<int64_t>(field.value);
  auto sizes = at::zeros({groups}, at::kLong);
  sizes[0] = std::max<int64_t>(rows - 1, 0);
  sizes[1] = std::min<int64_t>(rows, 1);
  return sizes;
}

/// Class indices below 8, the width of the logits.
Tensor classes(int64_t rows) { return at::arange(rows, at::kLong).mul_(3).remainder_(8); }

/// An operation with its inputs and output gradients.
struct Trial {
  OpPtr op;
  Tensor x, dy;
  std::vector<Tensor> params, extra, extra_dy;

  explicit Trial(OpPtr tried, int64_t rows = kRows) : op(std::move(tried)) {
    at::manual_seed(1234);
    auto sizes = row_of(*op);
    sizes.insert(sizes.begin(), rows);
    x = values(sizes);
    const bool per_row = op->name().substr(0, 6) == "Scaled" || op->name() == "GroupedLinear";
    const bool classifies = op->name() == "CrossEntropy";
    for (int i = 0; i < op->extra_inputs(); ++i)
      if (op->is_index(i))
        extra.push_back(classifies ? classes(rows) : splits(*op, rows));
      else
        extra.push_back(values(per_row ? std::vector<int64_t>{rows} : sizes));
    for (const auto& param : op->params()) params.push_back(values(param.shape));
  }

  Trial mapped(const std::function<Tensor(const Tensor&)>& f) const {
    Trial other = *this;
    other.x = f(x);
    if (dy.defined()) other.dy = f(dy);
    for (auto* list : {&other.params, &other.extra, &other.extra_dy})
      for (auto& t : *list) t = f(t);
    return other;
  }
  Trial in(at::ScalarType dtype) const {
    return mapped([&](const Tensor& t) { return t.is_floating_point() ? t.to(dtype) : t; });
  }

  OpPlan plan(NeedsGrad needs, bool training = true, at::ScalarType autocast = kOff) const {
    const uint8_t rest = needs == NeedsGrad::all || needs == NeedsGrad::rest;
    OpPlan out;
    out.needs_input_grad = needs == NeedsGrad::all || needs == NeedsGrad::input;
    out.needs_param_grad.assign(params.size(), rest);
    out.needs_extra_grad.assign(extra.size(), rest);
    out.needs_grad = out.needs_input_grad || (rest && params.size() + extra.size() > 0);
    out.training = training;
    out.autocast = autocast;
    return out;
  }
};

struct Outcome {
  Tensor y, dx;
  std::vector<Tensor> extra_out, saved, dparams, dextra;

  /// All outputs and gradients by name; undefined if not computed.
  std::map<std::string, Tensor> named() const {
    std::map<std::string, Tensor> all{{"y", y}, {"dx", dx}};
    const auto add = [&](const std::string& name, const std::vector<Tensor>& list) {
      for (size_t i = 0; i < list.size(); ++i) all[name + std::to_string(i)] = list[i];
    };
    add("extra output ", extra_out);
    add("dparam ", dparams);
    add("dextra ", dextra);
    return all;
  }
};

/// Forward of `trial`, with a fixed seed so that dropout draws the same mask.
Outcome forward(const Trial& trial, const OpPlan& plan) {
  at::manual_seed(99);
  Outcome out;
  auto extra = trial.extra;
  out.saved.resize(trial.op->saved_names().size());
  out.extra_out.resize(trial.op->extra_outputs());
  Frame frame{.saved = out.saved.data(),
              .extra_in = extra.data(),
              .extra_out = out.extra_out.data(),
              .params = trial.params.data()};
  OpContext ctx(plan, frame, 0);
  out.y = trial.op->forward(ctx, trial.x, trial.params);
  return out;
}

/// Forward, then backward with the gradients of `trial`.
Outcome run(const Trial& trial, const OpPlan& plan) {
  auto out = forward(trial, plan);
  auto extra_dy = trial.extra_dy;
  out.dextra.resize(trial.extra.size());
  out.dparams.resize(trial.params.size());
  Frame frame{.saved = out.saved.data(),
              .extra_in = out.dextra.data(),
              .extra_out = extra_dy.data(),
              .param_grads = out.dparams.data(),
              .params = trial.params.data()};
  OpContext ctx(plan, frame, 0);
  out.dx = trial.op->backward(ctx, trial.dy, trial.params);
  return out;
}

/// A trial of the sample, with output gradients.
Trial trial_of(const OpType& type, int64_t rows = kRows) {
  Trial trial(type.sample, rows);
  const auto out = forward(trial, trial.plan(NeedsGrad::nothing));
  trial.dy = values(out.y.sizes());
  for (const auto& t : out.extra_out) trial.extra_dy.push_back(values(t.sizes()));
  return trial;
}

void for_each_op(const std::function<void(const OpType&, const Trial&)>& check) {
  ASSERT_FALSE(op_types().empty());
  for (const auto& [name, type] : op_types()) {
    SCOPED_TRACE(name);
    check(type, trial_of(type));
  }
}

double projection(const Trial& trial, const OpPlan& plan) {
  const auto out = forward(trial, plan);
  auto sum = (out.y * trial.dy).sum();
  for (size_t i = 0; i < out.extra_out.size(); ++i) sum += (out.extra_out[i] * trial.extra_dy[i]).sum();
  return sum.item<double>();
}

/// d projection / d t by central differences; `t` belongs to `trial`.
Tensor central_differences(const Trial& trial, const OpPlan& plan, const Tensor& t) {
  constexpr double h = 1e-5;
  auto grad = at::rand(t.sizes(), at::kDouble);
  for (int64_t i = 0; i < t.numel(); ++i) {
    auto& element = t.mutable_data_ptr<double>()[i];
    const double middle = element;
    element = middle + h;
    const double above = projection(trial, plan);
    element = middle - h;
    const double below = projection(trial, plan);
    element = middle;
    grad.mutable_data_ptr<double>()[i] = (above - below) / (2 * h);
  }
  return grad;
}

void expect_close(const Tensor& got, const Tensor& expected, double rtol, double atol, const std::string& what) {
  ASSERT_EQ(got.defined(), expected.defined()) << what;
  if (!got.defined()) return;
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::allclose(got.to(at::kDouble), expected.to(at::kDouble), rtol, atol)) << what << " is\n"
                                                                                       << got << "\nexpected\n"
                                                                                       << expected;
}

void expect_spec(const Tensor& t, const Spec& spec, const std::string& what) {
  ASSERT_TRUE(t.defined()) << what;
  EXPECT_TRUE(t.sym_sizes().equals(spec.sizes)) << what << " has sizes " << t.sizes();
  EXPECT_EQ(t.scalar_type(), spec.dtype) << what;
}

// ---- Reference formulas in ATen -----------------------------------------------------------------------------------

double number(const BasicOp& op, const std::string& name) {
  for (const auto& field : op.fields())
    if (field.name == name) return std::get<double>(field.value);
  throw std::out_of_range(name);
}

using Formula = std::function<Tensor(const Trial&)>;

Tensor swish(const Tensor& x, double k = 1) { return x * at::sigmoid(x * k); }
Tensor gelu(const Tensor& x) { return x * 0.5 * (at::tanh((x + x.pow(3) * 0.044715) * std::sqrt(2 / M_PI)) + 1); }
Tensor squared_relu(const Tensor& x) { return at::relu(x).pow(2); }
Tensor situ(const Tensor& x, double beta) { return at::tanh(x / beta) * beta; }

/// f(a, b), where a and b are the halves of x, or alternating blocks of `block` values.
Tensor gated(const Tensor& x, const std::function<Tensor(const Tensor&, const Tensor&)>& f, int64_t block = 0) {
  const auto half = x.size(-1) / 2, size = block > 0 ? block : half;
  const auto parts = x.unflatten(-1, {half / size, 2, size});
  return f(parts.select(-2, 0), parts.select(-2, 1)).flatten(-2);
}
Tensor situglu(const Trial& t) {
  const auto beta1 = number(*t.op, "beta1"), beta2 = number(*t.op, "beta2");
  return gated(t.x, [&](const auto& a, const auto& b) { return situ(a, beta1) * at::sigmoid(a) * situ(b, beta2); });
}
Tensor clamped_swiglu(const Trial& t) {
  const auto limit = number(*t.op, "limit"), alpha = number(*t.op, "alpha");
  const auto offset = number(*t.op, "glu_linear_offset");
  // The derivative at the limits is 1; that of at::clamp is 0 since torch 2.14.
  const auto bounded = [](const Tensor& x, double low, double high) {
    return at::where((x >= low).logical_and(x <= high), x, at::clamp(x.detach(), low, high));
  };
  return gated(t.x, [&](const auto& a, const auto& b) {
    return swish(bounded(a, -INFINITY, limit), alpha) * (bounded(b, -limit, limit) + offset);
  });
}
Tensor swiglu(const Trial& t) {
  return gated(t.x, [](const auto& a, const auto& b) { return swish(a) * b; }, /*block=*/2);
}
Tensor tanh_srelu(const Trial& t) {
  const auto c = number(*t.op, "tanh_clamp_scale");
  return squared_relu(at::tanh(t.x / c) * c);
}
/// f scaled by the first extra input, one value per row.
Formula scaled(Formula f) {
  return [f = std::move(f)](const Trial& t) { return f(t) * t.extra[0].unsqueeze(1); };
}

/// The sample of RMSNorm has γ' = 1 + γ; the row of LayerNorm's sample has two dimensions.
Tensor rms_norm(const Trial& t) {
  return t.x * at::rsqrt(t.x.pow(2).mean({-1}, /*keepdim=*/true) + number(*t.op, "eps")) * (t.params[0] + 1);
}
Tensor layer_norm(const Trial& t) {
  const auto centred = t.x - t.x.mean({-2, -1}, /*keepdim=*/true);
  const auto variance = centred.pow(2).mean({-2, -1}, /*keepdim=*/true);
  return centred * at::rsqrt(variance + number(*t.op, "eps")) * t.params[0] + t.params[1];
}
Tensor l2_norm(const Trial& t) {
  return t.x * at::rsqrt(t.x.pow(2).sum({-1}, /*keepdim=*/true) + number(*t.op, "eps"));
}
/// The sample has two query heads, a key and a value of two channels each; the angle of row t is t.
Tensor rotary_embedding(const Trial& t) {
  const auto angles = at::arange(t.x.size(0), at::kDouble).view({-1, 1});
  const auto heads = t.x.unflatten(-1, {4, 2});
  const auto rotated = heads.narrow(1, 0, 3);
  const auto a = rotated.select(-1, 0), b = rotated.select(-1, 1);
  const auto y = at::stack({a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()}, -1);
  return at::cat({y, heads.narrow(1, 3, 1)}, 1).flatten(-2);
}
/// The sample has two query heads that share a key and a value of two channels; a row sees itself and the one before.
Tensor dot_product_attention(const Trial& t) {
  const auto parts = t.x.unflatten(-1, {4, 2});
  const auto q = parts.narrow(1, 0, 2).transpose(0, 1), k = parts.select(1, 2), v = parts.select(1, 3);
  const auto scores = q.matmul(k.t()) / std::sqrt(2.0);
  const auto seen = at::ones({t.x.size(0), t.x.size(0)}, at::kBool).tril().triu(-1);
  return scores.masked_fill(seen.logical_not(), -INFINITY).softmax(-1).matmul(v).transpose(0, 1).flatten(-2);
}
Tensor dropout(const Trial& t) {
  at::manual_seed(99);  // as in `forward`
  const auto p = number(*t.op, "p");
  return t.x * at::empty(t.x.sizes(), at::kBool).bernoulli_(1 - p) / (1 - p);
}
Tensor grouped_linear(const Trial& t) {
  const auto specs = t.op->params();
  const auto groups = static_cast<size_t>(t.extra[0].numel());
  EXPECT_EQ(specs.size(), 2 * groups);
  std::vector<Tensor> rows;
  int64_t row = 0;
  for (size_t g = 0; g < groups; ++g) {
    const auto count = t.extra[0][static_cast<int64_t>(g)].item<int64_t>();
    const auto scales = t.extra[1].narrow(0, row, count).unsqueeze(1);
    rows.push_back(at::mm(t.x.narrow(0, row, count), t.params[g].t()) + scales * t.params[groups + g]);
    row += count;
  }
  return at::cat(rows);
}

/// The sample has label smoothing, a z-loss and one loss per row.
Tensor cross_entropy(const Trial& t) {
  const auto eps = number(*t.op, "label_smoothing");
  const auto lse = t.x.exp().sum(1).log();
  const auto target = t.x.gather(1, t.extra[0].unsqueeze(1)).squeeze(1);
  return lse - target * (1 - eps) - t.x.mean(1) * eps + lse.pow(2) * number(*t.op, "z_loss");
}

std::map<std::string, Formula> formulas() {
  const auto unary = [](Tensor (*f)(const Tensor&)) { return [f](const Trial& t) { return f(t.x); }; };
  const auto gate = [](const std::function<Tensor(const Tensor&)>& f) {
    return [f](const Trial& t) { return gated(t.x, [&](const auto& a, const auto& b) { return f(a) * b; }); };
  };
  const Formula same = [](const Trial& t) { return t.x; };
  const auto quick = [](const Tensor& x) { return swish(x, 1.702); };
  const auto relu = [](const Tensor& x) { return at::relu(x); };
  return {{"GELU", unary(gelu)},
          {"QGELU", unary(quick)},
          {"ReLU", unary(relu)},
          {"SReLU", unary(squared_relu)},
          {"SiLU", unary([](const Tensor& x) { return swish(x); })},
          {"GLU", gate([](const Tensor& x) { return at::sigmoid(x); })},
          {"GEGLU", gate(gelu)},
          {"QGEGLU", gate(quick)},
          {"ReGLU", gate(relu)},
          {"SReGLU", gate(squared_relu)},
          {"SwiGLU", swiglu},
          {"SiTUGLU", situglu},
          {"ClampedSwiGLU", clamped_swiglu},
          {"ScaledSReLU", scaled(unary(squared_relu))},
          {"ScaledTanhSReLU", scaled(tanh_srelu)},
          {"ScaledSwiGLU", scaled(swiglu)},
          {"ScaledSiTUGLU", scaled(situglu)},
          {"ScaledClampedQGeGLU", scaled(clamped_swiglu)},
          {"RMSNorm", rms_norm},
          {"LayerNorm", layer_norm},
          {"L2Normalization", l2_norm},
          {"RotaryEmbedding", rotary_embedding},
          {"DotProductAttention", dot_product_attention},
          {"Dropout", dropout},
          {"BasicLinear", [](const Trial& t) { return at::mm(t.x, t.params[0].t()); }},
          {"GroupedLinear", grouped_linear},
          {"Bias", [](const Trial& t) { return t.x + t.params[0]; }},
          {"CrossEntropy", cross_entropy},
          {"ConstantScale", [](const Trial& t) { return t.x * number(*t.op, "scale"); }},
          {"AddExtraInput", [](const Trial& t) { return t.x + t.extra[0]; }},
          {"Reshape", [](const Trial& t) { return t.x.reshape({4, -1, 3}); }},
          {"MakeExtraOutput", same},
          {"Identity", same},
          {"Quantize", same},
          {"AllGather", same},  // one rank
          {"ReduceScatter", same},
          {"AllReduce", same}};
}

TEST(EveryOp, ValuesMatchFormula) {
  const auto all = formulas();
  size_t written_out = 0;
  for_each_op([&](const OpType& type, const Trial& trial) {
    const auto formula = all.find(type.name);
    if (formula == all.end()) return;  // not written out here; its gradients are those of its values
    ++written_out;
    const auto out = forward(trial, trial.plan(NeedsGrad::nothing));
    expect_close(out.y, formula->second(trial), 1e-12, 1e-12, "y");
    for (const auto& t : out.extra_out) expect_close(t, trial.x, 0, 0, "extra output");
  });
  EXPECT_EQ(written_out, all.size()) << "a formula belongs to no operation";
}

TEST(EveryOp, GradientsMatchCentralDifferences) {
  for_each_op([](const OpType& type, const Trial& trial) {
    for (const bool training : {true, false}) {
      if (!training && !type.sample->depends_on_training()) continue;
      const auto plan = trial.plan(NeedsGrad::all, training);
      const auto out = run(trial, plan);
      const auto check = [&](const Tensor& got, const Tensor& t, const char* what) {
        expect_close(got, central_differences(trial, plan, t), 1e-5, 1e-8, what);
      };
      check(out.dx, trial.x, "dx");
      for (size_t i = 0; i < trial.params.size(); ++i) check(out.dparams[i], trial.params[i], "dparam");
      for (size_t i = 0; i < trial.extra.size(); ++i)
        if (!trial.op->is_index(static_cast<int>(i))) check(out.dextra[i], trial.extra[i], "dextra");
    }
  });
}

/// The slot holds what `infer` says: x, a parameter, or a tensor that shares memory with neither.
void expect_origin(const Trial& trial, const Tensor& saved, const SavedSpec& spec) {
  if (spec.from != SavedFrom::own_memory) {
    EXPECT_TRUE(saved.equal(spec.from == SavedFrom::input ? trial.x : trial.params[spec.param]));
    return;
  }
  EXPECT_FALSE(saved.is_alias_of(trial.x));
  for (const auto& param : trial.params) EXPECT_FALSE(saved.is_alias_of(param));
}

void expect_inferred(const Trial& trial, const OpPlan& plan) {
  std::vector<Spec> extra, params;
  for (const auto& t : trial.extra) extra.push_back(Spec::of(t));
  for (const auto& t : trial.params) params.push_back(Spec::of(t));
  const auto inferred = trial.op->infer(plan, Spec::of(trial.x), extra, params);
  const auto out = forward(trial, plan);
  expect_spec(out.y, inferred.y, "y");
  ASSERT_EQ(inferred.extra_outputs.size(), out.extra_out.size());
  for (size_t i = 0; i < out.extra_out.size(); ++i)
    expect_spec(out.extra_out[i], inferred.extra_outputs[i], "extra output");
  ASSERT_EQ(inferred.saved.size(), out.saved.size());
  for (size_t i = 0; i < out.saved.size(); ++i) {
    const auto name = trial.op->saved_names()[i];
    ASSERT_EQ(out.saved[i].defined(), inferred.saved[i].has_value()) << name;
    if (!inferred.saved[i]) continue;
    expect_spec(out.saved[i], *inferred.saved[i], name);
    expect_origin(trial, out.saved[i], *inferred.saved[i]);
  }
}

TEST(EveryOp, InferMatchesForward) {
  for_each_op([](const OpType&, const Trial& trial) {
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
      for (const auto autocast : {kOff, at::kBFloat16, at::kFloat})
        for (const auto needs : {NeedsGrad::all, NeedsGrad::input, NeedsGrad::rest, NeedsGrad::nothing})
          for (const bool training : {true, false})
            expect_inferred(trial.in(dtype), trial.plan(needs, training, autocast));
  });
}

TEST(EveryOp, SavesAndReturnsOnlyWhatIsNeeded) {
  for_each_op([](const OpType&, const Trial& trial) {
    for (const auto& t : forward(trial, trial.plan(NeedsGrad::nothing)).saved) EXPECT_FALSE(t.defined());
    const auto input = run(trial, trial.plan(NeedsGrad::input));
    EXPECT_TRUE(input.dx.defined());
    for (const auto& t : input.dparams) EXPECT_FALSE(t.defined());
    for (const auto& t : input.dextra) EXPECT_FALSE(t.defined());
    if (trial.params.empty() && trial.extra.empty()) return;
    const auto rest = run(trial, trial.plan(NeedsGrad::rest));
    EXPECT_FALSE(rest.dx.defined());
    for (const auto& t : rest.dparams) EXPECT_TRUE(t.defined());
    for (size_t i = 0; i < rest.dextra.size(); ++i)
      EXPECT_EQ(rest.dextra[i].defined(), !trial.op->is_index(static_cast<int>(i)));
  });
}

TEST(EveryOp, EachDtypeMatchesFloat64) {
  struct Tolerance {
    at::ScalarType dtype;
    double rtol, atol;
  };
  for_each_op([](const OpType&, const Trial& trial) {
    for (const auto& [dtype, rtol, atol] : {Tolerance{at::kFloat, 1.3e-6, 1e-5}, Tolerance{at::kHalf, 1e-3, 1e-5},
                                            Tolerance{at::kBFloat16, 1.6e-2, 1e-5}}) {
      const auto rounded = trial.in(dtype);
      const auto plan = trial.plan(NeedsGrad::all);
      const auto expected = run(rounded.in(at::kDouble), plan).named();
      // On AMX, attention also rounds the operands of its GEMMs: probabilities and the gradients of scores.
      const bool rounds_operands = dtype == at::kBFloat16 && trial.op->name().ends_with("DotProductAttention");
      for (const auto& [name, got] : run(rounded, plan).named()) {
        const auto& exact = expected.at(name);
        const auto absolute = rounds_operands && exact.defined() ? 0x3p-8 * exact.abs().max().item<double>() : atol;
        expect_close(got, exact, rtol, absolute, name + " in " + std::string(dtype_name(dtype)));
      }
    }
  });
}

TEST(EveryOp, StridesDoNotMatter) {
  const auto strided = [](const Tensor& t) { return t.transpose(0, -1).contiguous().transpose(0, -1); };
  for_each_op([&](const OpType&, const Trial& trial) {
    const auto plan = trial.plan(NeedsGrad::all);
    const auto expected = run(trial, plan).named();
    for (const auto& [name, got] : run(trial.mapped(strided), plan).named())
      expect_close(got, expected.at(name), 1e-12, 1e-12, name);
  });
}

TEST(EveryOp, RunsOnZeroRows) {
  for (const auto& [name, type] : op_types()) {
    SCOPED_TRACE(name);
    const auto trial = trial_of(type, 0);
    for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      const auto out = run(trial.in(dtype), trial.plan(NeedsGrad::all));
      EXPECT_EQ(out.dx.sizes(), trial.x.sizes());
      EXPECT_EQ(out.y.sizes(), trial.dy.sizes());
      for (const auto& grad : out.dparams) EXPECT_EQ(grad.sum().item<double>(), 0.0);
    }
  }
}

TEST(EveryOp, MetaTensorsGiveSameSizes) {
  const auto meta = [](const Tensor& t) { return t.to(at::kMeta); };
  for_each_op([&](const OpType&, const Trial& trial) {
    for (const auto dtype : {at::kDouble, at::kBFloat16}) {
      const auto real = trial.in(dtype);
      const auto plan = trial.plan(NeedsGrad::all);
      const auto expected = run(real, plan), got = run(real.mapped(meta), plan);
      const auto names = got.named();
      for (const auto& [name, t] : expected.named()) {
        if (!t.defined()) continue;
        EXPECT_TRUE(names.at(name).is_meta()) << name;
        expect_spec(names.at(name), Spec::of(t), name);
      }
      for (size_t i = 0; i < expected.saved.size(); ++i)
        if (expected.saved[i].defined()) expect_spec(got.saved[i], Spec::of(expected.saved[i]), "saved");
    }
  });
}

TEST(EveryOp, TextRoundTrips) {
  for (const auto& [name, type] : op_types()) {
    const auto text = type.sample->text();
    Parser parser(text);
    ASSERT_EQ(parser.identifier(), name);
    Keywords keywords;
    parser.expect("(");
    while (!parser.accept(")")) {
      if (!keywords.empty()) parser.expect(",");
      auto key = parser.identifier();
      parser.expect("=");
      keywords.emplace_back(std::move(key), parser.value());
    }
    EXPECT_TRUE(parser.at_end());
    EXPECT_EQ(op_type(name).make(keywords)->text(), text);
  }
}

}  // namespace
}  // namespace weft::ops
