#include "benchmarks/driver/sweep.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <malloc.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <set>

#include "benchmarks/driver/format.h"
#include "benchmarks/driver/line.h"
#include "benchmarks/driver/measure.h"
#include "weft/fuser/autograd.h"
#include "weft/fuser/call_validation.h"

namespace bench {
namespace {

using at::Tensor;
using weft::fuser::Pipeline;
using Plan = std::shared_ptr<const weft::fuser::Plan>;

constexpr double kSlower = 1.02;

/// A pipeline as text with H input columns. `out` is the number of columns of the output and of an extra input.
struct Template {
  const char *text, *out;
};
const std::vector<Template>& templates() {
  static const std::vector<Template> list{
      {"BasicLinear(in_features=H, out_features=F); Bias(size=F)", "F"},
      {"BasicLinear(in_features=H, out_features=F); Bias(size=F); GELU()", "F"},
      {"BasicLinear(in_features=H, out_features=2F); Bias(size=2F); SwiGLU()", "F"},
      {"BasicLinear(in_features=H, out_features=F); Bias(size=F); AddExtraInput()", "F"},
      {"BasicLinear(in_features=H, out_features=F); ConstantScale(scale=0.5); AddExtraInput()", "F"},
      {"BasicLinear(in_features=H, out_features=F); ConstantScale(scale=0.5)", "F"},
      {"RMSNorm(normalized_shape=[H]); BasicLinear(in_features=H, out_features=F); Bias(size=F)", "F"},
      {"LayerNorm(normalized_shape=[H]); BasicLinear(in_features=H, out_features=F); Bias(size=F)", "F"},
      {"MakeExtraOutput(); BasicLinear(in_features=H, out_features=F)", "F"},
      {"MakeExtraOutput(); RMSNorm(normalized_shape=[H])", "H"},
      {"MakeExtraOutput(); LayerNorm(normalized_shape=[H])", "H"},
      {"Dropout(p=0.1); AddExtraInput()", "H"},
      {"Bias(size=H); GELU()", "H"},
      {"MakeExtraOutput() >>\"r\"; RMSNorm(normalized_shape=[H]); BasicLinear(in_features=H, out_features=F); "
       "Bias(size=F); GELU(); BasicLinear(in_features=F, out_features=H); Bias(size=H); AddExtraInput() <\"r\"",
       "H"},
      {"MakeExtraOutput() >>\"r\"; RMSNorm(normalized_shape=[H]); BasicLinear(in_features=H, out_features=2F); "
       "Bias(size=2F); SwiGLU(); BasicLinear(in_features=F, out_features=H); Bias(size=H); AddExtraInput() <\"r\"",
       "H"}};
  return list;
}

struct Shape {
  int64_t m, h, f;
};

/// Replaces H, F and 2F after `=` or `[` by numbers.
std::string substitute(std::string text, const Shape& shape) {
  const std::vector<std::pair<std::string, int64_t>> sizes{
      {"=2F", 2 * shape.f}, {"=F", shape.f}, {"=H", shape.h}, {"[H", shape.h}};
  for (const auto& [name, size] : sizes) {
    const auto digits = std::to_string(size);
    for (size_t pos = 0; (pos = text.find(name, pos)) != std::string::npos; ++pos)
      text.replace(pos + 1, name.size() - 1, digits);
  }
  return text;
}

/// Log-uniform sizes, half of them multiples of 32.
class Shapes {
 public:
  Shapes(uint32_t seed, double max_flop) : rng_(seed), max_flop_(max_flop) {}

  Shape next() {
    while (true) {
      const Shape shape{size(1), size(16), size(16)};
      const auto flop =
          12.0 * static_cast<double>(shape.m) * static_cast<double>(shape.h) * static_cast<double>(shape.f);
      if (flop <= max_flop_) return shape;
    }
  }
  size_t random_index(size_t count) { return std::uniform_int_distribution<size_t>(0, count - 1)(rng_); }

 private:
  int64_t size(double least) {
    const auto value = std::exp(std::uniform_real_distribution(std::log(least), std::log(4096.5))(rng_));
    const auto whole = static_cast<int64_t>(value);
    return whole >= 32 && random_index(2) == 0 ? whole / 32 * 32 : whole;
  }

  std::mt19937 rng_;
  double max_flop_;
};

/// A pipeline with tensors, and its plan with all rules.
struct Sample {
  std::shared_ptr<const Pipeline> pipeline;
  Tensor x;
  std::vector<Tensor> params, extras, grads;
  Plan plan;
  std::shared_ptr<const weft::fused::RuleList> rules;

  Plan planned(const weft::fused::RuleList& list) const {
    return weft::fuser::make_plan(*pipeline, weft::fuser::make_plan_key(*pipeline, x, params, extras, 0), list);
  }
  Plan without(const std::string& rule) const {
    auto fewer = *rules;
    std::erase_if(fewer, [&](const auto& entry) { return weft::fused::name_of(entry.second) == rule; });
    return planned(fewer);
  }
  weft::fuser::Tensors forward(const Plan& chosen) const {
    return weft::fuser::run_plan(pipeline, chosen, x, params, {extras.begin(), extras.end()});
  }
  void pass(const Plan& chosen) const {
    const auto outputs = forward(chosen);
    std::vector<Tensor> inputs{x};
    inputs.insert(inputs.end(), params.begin(), params.end());
    inputs.insert(inputs.end(), extras.begin(), extras.end());
    torch::autograd::grad({outputs.begin(), outputs.end()}, inputs, grads, {}, false, /*allow_unused=*/true);
  }
  /// Names of the rules used for this number of rows.
  std::vector<std::string> used() const {
    std::set<std::string> names;
    for (const auto* steps : {&plan->forward, &plan->backward})
      for (const auto& planned : *steps)
        if (planned.step.fused && planned.step.min_rows <= x.size(0)) names.insert(planned.step.rule);
    return {names.begin(), names.end()};
  }
};

Sample make_sample(const Template& row, const Shape& shape, at::ScalarType dtype) {
  const auto leaf = [&](at::IntArrayRef sizes, double scale) {
    return at::randn(sizes).mul_(scale).to(dtype).requires_grad_();
  };
  Sample out;
  out.pipeline = std::make_shared<const Pipeline>(Pipeline::parse(substitute(row.text, shape)));
  out.x = leaf({shape.m, shape.h}, 1);
  for (const auto& spec : out.pipeline->params())
    out.params.push_back(leaf(spec.shape, 1 / std::sqrt(static_cast<double>(spec.shape.back()))));
  for (size_t i = 0; i < out.pipeline->caller_inputs().size(); ++i)
    out.extras.push_back(leaf({shape.m, row.out[0] == 'F' ? shape.f : shape.h}, 1));
  out.rules = weft::fused::current_rules().list;
  out.plan = out.planned(*out.rules);
  for (const auto& y : out.forward(out.plan)) out.grads.push_back(at::randn_like(y));
  return out;
}

struct Comparison {
  std::string rule, pipeline;
  Shape shape;
  Measured measured;
  bool slower;
  const Ratio& ratio() const { return measured.ratios[0]; }
};

std::string row_of(const Comparison& f) {
  return format("%s m=%ld h=%ld f=%ld: fused / without %.3f [%.3f, %.3f]%s", f.rule.c_str(), f.shape.m, f.shape.h,
                f.shape.f, f.ratio().median, f.ratio().low, f.ratio().high, f.slower ? "  SLOWER" : "");
}

Comparison compare(const Sample& sample, const Template& row, const Shape& shape, const std::string& rule,
                   Meter& meter) {
  const auto unfused = sample.without(rule);
  const std::vector<Side> sides{{"fused", [&] { sample.pass(sample.plan); }},
                                {"without", [&] { sample.pass(unfused); }}};
  auto found = meter.measure(sides);
  // Slower only if measured so twice, the second time with enough rounds.
  const auto slower = [&] { return found.ratios[0].low > kSlower; };
  if (slower()) found = meter.measure(sides, Method{});
  for (int again = 0; again < 3 && slower() && found.kept < Method{}.rounds; ++again)
    found = meter.measure(sides, Method{});
  return {rule, row.text, shape, found, slower()};
}

/// Compares one shape for every pipeline that uses `rule`.
int compare_one(const Shape& shape, const std::string& rule, at::ScalarType dtype, Meter& meter) {
  int slower = 0;
  for (const auto& row : templates()) {
    const auto sample = make_sample(row, shape, dtype);
    const auto used = sample.used();
    if (std::find(used.begin(), used.end(), rule) == used.end()) continue;
    const auto found = compare(sample, row, shape, rule, meter);
    slower += found.slower;
    std::cout << row_of(found) << "  " << row.text << "\n" << std::flush;
  }
  return slower == 0 ? 0 : 1;
}

void write(const std::string& name, const std::vector<Comparison>& rows) {
  std::ofstream file(name);
  file << "[";
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& f = rows[i];
    file << (i ? ",\n " : "\n ")
         << format(R"({"rule": "%s", "m": %ld, "h": %ld, "f": %ld, "ratio": %.4f, "interval": [%.4f, %.4f], )",
                   f.rule.c_str(), f.shape.m, f.shape.h, f.shape.f, f.ratio().median, f.ratio().low, f.ratio().high)
         << format(R"("control": %.4f, "kept": %d, "slower": %s})", f.measured.control, f.measured.kept,
                   f.slower ? "true" : "false");
  }
  file << "\n]\n";
}

/// Prints how often each rule was compared; 0 if no pipeline used it.
void print_rules(std::map<std::string, int> times_compared) {
  for (const auto& [id, rule] : *weft::fused::current_rules().list) {
    const auto& name = weft::fused::name_of(rule);
    std::cout << "  " << name << ": " << times_compared[name] << " shapes\n";
  }
}

/// Keeps malloc from returning freed memory to the kernel after one plan and requesting it again for the other, which
/// takes as long as many of these shapes.
void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

}  // namespace

int run_sweep(const std::vector<std::string>& words) {
  std::string text = "sweep";
  for (size_t i = 0; i + 1 < words.size(); i += 2)
    text.append(" ").append(words[i], 2).append("=").append(words[i + 1]);
  const Line line(text);
  const auto shapes = static_cast<size_t>(line.number("shapes", 200));
  Shapes draw(static_cast<uint32_t>(line.number("seed", 1)), line.number("flop", 40e9));
  const auto dtype = line.dtype();
  const auto json = line.word("json", ""), only = line.word("rule", "");
  const auto size = [&](const char* field) { return static_cast<int64_t>(line.number(field, 64)); };
  const Shape one{size("m"), size("h"), size("f")};
  line.finish();

  keep_freed_memory();
  at::set_num_threads(1);
  at::manual_seed(0);
  Meter meter({.threads = 1, .rounds = 11, .max_rounds = 22, .sample_seconds = 3e-3});
  if (!only.empty()) return compare_one(one, only, dtype, meter);
  std::map<std::string, int> times_compared;
  std::vector<Comparison> rows;
  int slower = 0;
  for (size_t drawn = 0; rows.size() < shapes && drawn < 20 * shapes; ++drawn) {
    const auto& row = templates()[draw.random_index(templates().size())];
    const auto shape = draw.next();
    const auto sample = make_sample(row, shape, dtype);
    const auto used = sample.used();
    if (used.empty()) continue;
    const auto rule = *std::min_element(used.begin(), used.end(),
                                        [&](auto& a, auto& b) { return times_compared[a] < times_compared[b]; });
    ++times_compared[rule];
    rows.push_back(compare(sample, row, shape, rule, meter));
    slower += rows.back().slower;
    std::cout << row_of(rows.back()) << "\n" << std::flush;
  }
  print_rules(times_compared);
  std::cout << rows.size() << " shapes, " << slower << " slower\n";
  if (!json.empty()) write(json, rows);
  return slower == 0 && rows.size() == shapes ? 0 : 1;
}

}  // namespace bench
