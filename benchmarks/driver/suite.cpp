#include "benchmarks/driver/suite.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <fstream>
#include <iostream>
#include <optional>

#include "benchmarks/driver/problem.h"
#include "benchmarks/driver/report.h"

namespace bench {

const char* const kSuiteUsage =
    "weft_bench suite --check|--time [--threads N] [--rounds N] [--only TEXT] [--json FILE] [problem files]\n"
    "  problems are lines of the files or of standard input:\n";

namespace {

struct Arguments {
  bool check = false, time = false;
  Method method;
  std::string only, json;
  std::vector<std::string> files;
};

std::optional<Arguments> parse(const std::vector<std::string>& words) {
  Arguments out;
  for (size_t i = 0; i < words.size(); ++i) {
    const auto value = [&] { return i + 1 < words.size() ? words[++i] : std::string(); };
    if (words[i] == "--check") {
      out.check = true;
    } else if (words[i] == "--time") {
      out.time = true;
    } else if (words[i] == "--threads") {
      out.method.threads = std::stoi(value());
    } else if (words[i] == "--rounds") {
      out.method.rounds = std::stoi(value());
      out.method.max_rounds = 4 * out.method.rounds;
    } else if (words[i] == "--only") {
      out.only = value();
    } else if (words[i] == "--json") {
      out.json = value();
    } else if (words[i].starts_with("--")) {
      return {};
    } else {
      out.files.push_back(words[i]);
    }
  }
  if (out.check == out.time) return {};
  return out;
}

/// Returns the lines of the files that contain `only`, without comments.
std::vector<Line> lines_of(const Arguments& arguments) {
  std::vector<Line> lines;
  const auto read = [&](std::istream& file) {
    for (std::string text; std::getline(file, text);) {
      text = text.substr(0, text.find('#'));
      text.erase(text.find_last_not_of(' ') + 1);
      if (!text.empty() && text.find(arguments.only) != std::string::npos) lines.emplace_back(text);
    }
  };
  if (arguments.files.empty()) read(std::cin);
  for (const auto& name : arguments.files) {
    std::ifstream file(name);
    TORCH_CHECK(file, "cannot open ", name);
    read(file);
  }
  return lines;
}

}  // namespace

int run_suite(const std::vector<std::string>& words) {
  const auto arguments = parse(words);
  if (!arguments) {
    std::cerr << kSuiteUsage << known_kinds();
    return 2;
  }
  at::set_num_threads(arguments->method.threads);
  Meter meter(arguments->method);
  Report report(arguments->method);
  bool fine = true;
  for (const auto& line : lines_of(*arguments)) {
    at::manual_seed(0);
    const Target target(line);
    const auto problem = make_case(line);
    const auto found = errors(problem);
    const bool correct = within_tolerance(problem, found);
    fine = fine && correct;
    if (arguments->check || !correct) print_errors(line, found, correct);
    if (arguments->check || !correct) continue;
    auto measured = meter.measure(problem.sides);
    if (target.missed(measured)) measured = meter.measure(problem.sides);  // missed only if over the bound twice
    fine = fine && !target.missed(measured);
    report.add(line, target, measured, found);
    if (!arguments->json.empty()) report.write(arguments->json);  // after each row, in case the run is interrupted
  }
  return fine ? 0 : 1;
}

}  // namespace bench
