// The Graphviz source: one table with a row per operation. A forward or backward step is a cell that spans the
// operations it covers.
#include <sstream>

#include "weft/fuser/explain.h"
#include "weft/fuser/explain_format.h"

namespace weft::fuser {
namespace {

constexpr const char* kInk = "#1d2733";
constexpr const char* kFaint = "#7a8793";
constexpr const char* kChannel = "#c2571a";
constexpr const char* kForward = "#cfe8d5";
constexpr const char* kBackward = "#cfe0f5";

/// Escapes `text` for an HTML-like label.
std::string html(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '&')
      out += "&amp;";
    else
      out += c;
  }
  return out;
}

std::string small(const std::string& text, const char* colour, int size = 9) {
  return "<FONT POINT-SIZE=\"" + std::to_string(size) + "\" COLOR=\"" + colour + "\">" + html(text) + "</FONT>";
}

/// Text on new lines of a cell, wrapped at about `width` characters.
std::string below(const std::string& text, const char* colour, size_t width = 52) {
  std::string lines, line;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (!line.empty() && line.size() + word.size() >= width) {
      lines += "<BR ALIGN=\"LEFT\"/>" + small(line, colour);
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return lines + "<BR ALIGN=\"LEFT\"/>" + small(line, colour);
}

std::string heading(const std::string& text) {
  return std::string("<TD BGCOLOR=\"") + kInk + "\"><FONT COLOR=\"white\"><B>" + text + "</B></FONT></TD>";
}

std::string step_cell(const std::vector<Explanation::StepLine>& steps, int op, const char* colour) {
  for (const auto& step : steps) {
    if (step.first != op) continue;
    const auto* fill = !step.runs ? "#f4f4f4" : step.fused ? colour : "#ffffff";
    const auto name = step.fused ? "<B>" + html(step.name) + "</B>" : html(step.name);
    return "<TD ROWSPAN=\"" + std::to_string(step.count) + "\" BGCOLOR=\"" + fill + "\"><FONT COLOR=\"" +
           (step.runs ? kInk : "#a0a0a0") + "\">" + name + "</FONT><BR/><FONT POINT-SIZE=\"4\"> </FONT><BR/>" +
           small(step.runs ? step.tier : "not needed", kFaint) + "</TD>";
  }
  return {};  // covered by a cell above
}

std::string op_cell(const Explanation& e, int i) {
  std::string cell =
      "<TD ALIGN=\"LEFT\">" + small(std::to_string(i), kFaint, 11) + "  <B>" + html(e.op_names[i]) + "</B>";
  const auto open = e.ops[i].find('(');  // in "Name(field=value, …)"
  if (open != std::string::npos && open + 2 < e.ops[i].size())
    cell += "  " + small(e.ops[i].substr(open + 1, e.ops[i].size() - open - 2), "#4a5561", 10);
  for (const auto& c : e.channels) {
    if (c.from == i) cell += below("→ " + c.name + " (to " + std::to_string(c.to) + ")", kChannel);
    if (c.to == i) cell += below("← " + c.name + " (from " + std::to_string(c.from) + ")", kChannel);
  }
  for (const int op : e.from_caller)
    if (op == i) cell += below("← extra input from the caller", kChannel);
  for (const int op : e.to_caller)
    if (op == i) cell += below("→ extra output to the caller", kChannel);
  for (const auto& note : e.in_place)
    if (note.op == i) cell += below(note.text, kFaint);
  return cell + "<BR ALIGN=\"LEFT\"/></TD>";
}

std::string saved_cell(const Explanation& e, int i) {
  std::string lines;
  for (const auto& line : e.saved) {
    if (line.op != i) continue;
    const auto size = line.shared.empty() ? format_bytes(line.bytes) : "(aliases " + line.shared + ")";
    lines += small(line.name + " " + line.sizes + " " + size, kInk, 10) + "<BR ALIGN=\"LEFT\"/>";
  }
  return "<TD ALIGN=\"LEFT\">" + (lines.empty() ? " " : lines) + "</TD>";
}

std::string footer(const Explanation& e) {
  std::string text = "<TR><TD COLSPAN=\"4\" BORDER=\"0\" ALIGN=\"LEFT\">";
  text += small("saved for backward: " + e.saved_text(), kInk, 10);
  for (const auto& r : e.rejections)
    text += below("rejected " + r.rule + " at " + format_range(r.first, r.count) + " (" + fused::pass_name(r.pass) +
                      "): " + r.reason,
                  kInk, 120);
  return text + "<BR ALIGN=\"LEFT\"/></TD></TR>";
}

}  // namespace

std::string Explanation::dot() const {
  std::ostringstream dot;
  dot << "digraph weft {\n  graph [bgcolor=\"white\", pad=0.3];\n  node [fontname=\"Helvetica\", fontsize=11, "
         "shape=plain];\n"
      << "  plan [label=<<TABLE BORDER=\"0\" CELLBORDER=\"1\" CELLSPACING=\"0\" CELLPADDING=\"7\" COLOR=\"#c9d1d9\">\n"
      << "  <TR>" << heading("forward ↓") << heading("operation") << heading("backward ↑")
      << heading("saved for backward") << "</TR>\n";
  for (int i = 0; i < static_cast<int>(ops.size()); ++i)
    dot << "  <TR>" << step_cell(forward, i, kForward) << op_cell(*this, i) << step_cell(backward, i, kBackward)
        << saved_cell(*this, i) << "</TR>\n";
  dot << "  " << footer(*this) << "\n  </TABLE>>];\n}\n";
  return dot.str();
}

}  // namespace weft::fuser
