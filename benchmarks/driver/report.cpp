#include "benchmarks/driver/report.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <fstream>
#include <iostream>

#include "benchmarks/driver/format.h"
#include "weft/kernels/tier.h"

namespace bench {
namespace {

/// The commit of the repository in the working directory.
std::string commit() {
  std::string head;
  std::getline(std::ifstream(".git/HEAD") >> std::ws, head);
  if (!head.starts_with("ref: ")) return head.empty() ? "unknown" : head;
  std::string id = "unknown";
  std::getline(std::ifstream(".git/" + head.substr(5)) >> std::ws, id);
  return id;
}

std::string cpu() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

std::string today() {
  const auto time = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&time, &parts);
  return format("%04d-%02d-%02d", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
}

std::string join(const std::vector<std::string>& parts, const char* separator) {
  std::string out;
  for (const auto& part : parts) out += (out.empty() ? "" : separator) + part;
  return out;
}

}  // namespace

Target::Target(const Line& line) : against_(line.word("against", "")) {
  if (line.has("at_most")) at_most_ = line.number("at_most", 0);
  if (line.has("at_least")) at_most_ = 1 / line.number("at_least", 0);
  inverse_ = line.has("at_least");
}

const Ratio& Target::ratio(const Measured& measured) const {
  if (against_.empty()) return measured.ratios.front();
  const auto found = std::find_if(measured.ratios.begin(), measured.ratios.end(),
                                  [&](const auto& ratio) { return ratio.against == against_; });
  TORCH_CHECK_VALUE(found != measured.ratios.end(), "against=", against_, ": unknown peer");
  return *found;
}

bool Target::missed(const Measured& measured) const { return at_most_ && ratio(measured).low > *at_most_; }

void print_errors(const Line& line, const std::vector<Error>& errors, bool correct) {
  std::cout << line.text() << ": " << (correct ? "correct" : "WRONG") << "\n";
  for (const auto& error : errors)
    std::cout << format("  %-10s error %.3e   eager's %.3e\n", error.what.c_str(), error.ours, error.eager);
}

void Report::add(const Line& line, const Target& target, const Measured& m, const std::vector<Error>& errors) {
  std::cout << line.text() << format("\n  weft %.3f ms", m.ms);
  for (const auto& r : m.ratios) {
    const char* name = r.against.c_str();
    const bool inverse = target.inverse() && &r == &target.ratio(m);
    std::cout << (inverse ? format("  %s / weft %.2f [%.2f, %.2f]", name, 1 / r.median, 1 / r.high, 1 / r.low)
                          : format("  weft / %s %.2f [%.2f, %.2f]", name, r.median, r.low, r.high));
  }
  std::cout << (!target.at_most()  ? ""
                : target.missed(m) ? "  MISSED"
                                   : "  holds")
            << format("\n  control %.3f%s  kept %d of %d  steal %.1f %%\n", m.control,
                      std::abs(m.control - 1) > 0.02 ? " (not 1 ± 0.02)" : "", m.kept, m.rounds, 100 * m.steal)
            << std::flush;
  rows_.push_back(json(line, target, m, errors));
}

std::string Report::json(const Line& line, const Target& target, const Measured& m,
                         const std::vector<Error>& errors) const {
  std::vector<std::string> sides, found;
  for (const auto& r : m.ratios)
    sides.push_back(format(R"({"against": "%s", "ratio": %.4f, "interval": [%.4f, %.4f], "ms": %.4f})",
                           r.against.c_str(), r.median, r.low, r.high, r.ms));
  for (const auto& e : errors)
    found.push_back(format(R"({"result": "%s", "ours": %.3e, "eager": %.3e})", e.what.c_str(), e.ours, e.eager));
  const auto bound = target.at_most() ? format("%.4f", *target.at_most()) : "null";
  return format(R"({"problem": "%s", "threads": %d, "ms": %.4f, "versus": [%s],)", line.text().c_str(), method_.threads,
                m.ms, join(sides, ", ").c_str()) +
         format(R"( "target": {"against": "%s", "at_most": %s, "inverse": %s, "holds": %s},)",
                target.ratio(m).against.c_str(), bound.c_str(), target.inverse() ? "true" : "false",
                target.missed(m) ? "false" : "true") +
         format(R"( "control": %.4f, "kept": %d, "rounds": %d, "steal": %.4f, "errors": [%s]})", m.control, m.kept,
                m.rounds, m.steal, join(found, ", ").c_str());
}

void Report::write(const std::string& name) const {
  std::ofstream file(name);
  file << R"({"date": ")" << today() << R"(", "commit": ")" << commit() << R"(", "cpu": ")" << cpu()
       << R"(", "tier": ")" << weft::kernels::tier_name(weft::kernels::machine_tier()) << R"(", "rows": [)"
       << "\n " << join(rows_, ",\n ") << "\n]}\n";
  TORCH_CHECK(file, "cannot write ", name);
}

}  // namespace bench
