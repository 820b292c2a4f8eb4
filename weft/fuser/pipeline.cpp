#include "weft/fuser/pipeline.h"

#include <algorithm>
#include <map>

#include "weft/core/errors.h"
#include "weft/ops/registry.h"

namespace weft::fuser {
namespace {

int owner(const std::vector<int>& bases, int slot) {
  return static_cast<int>(std::upper_bound(bases.begin(), bases.end(), slot) - bases.begin()) - 1;
}

Stage parse_stage(Parser& text) {
  const auto name = text.identifier();
  ops::Keywords keywords;
  for (text.expect("("); !text.accept(")");) {
    if (!keywords.empty()) text.expect(",");
    auto key = text.identifier();
    text.expect("=");
    keywords.emplace_back(std::move(key), text.value());
  }
  Stage stage{.op = ops::op_type(name).make(keywords)};
  const auto channel = [&] { return text.accept("-") ? std::string{} : text.string(); };
  while (text.accept("<")) stage.in.push_back(channel());
  while (text.accept(">")) {
    const bool hidden = text.accept(">");
    stage.out.push_back({channel(), !hidden});
  }
  return stage;
}

/// Raises if an extra output goes neither to the caller nor to an operation: what it holds, such as a residual, would
/// be lost.
void check_readers(const std::vector<Stage>& stages, const std::vector<int>& sources) {
  int slot = -1;
  for (size_t i = 0; i < stages.size(); ++i) {
    for (const auto& out : stages[i].out) {
      ++slot;
      if (out.to_caller || std::find(sources.begin(), sources.end(), slot) != sources.end()) continue;
      std::vector<std::string> read;
      for (const auto& stage : stages)
        for (const auto& channel : stage.in)
          if (!channel.empty()) read.push_back(channel);
      TORCH_CHECK_VALUE(false, "Channel '", out.channel, "' has no reader: ", stages[i].label,
                        " produces it with output_to_caller=false, and no operation reads it.",
                        did_you_mean(out.channel, read),
                        " Read it with set_extra_input_channel, or set output_to_caller to true.");
    }
  }
}

}  // namespace

std::vector<int> channel_sources(const std::vector<Stage>& stages) {
  std::map<std::string, std::pair<size_t, int>> producers;  // operation and slot of each channel
  int slot = 0;
  for (size_t i = 0; i < stages.size(); ++i) {
    for (const auto& out : stages[i].out) {
      const std::pair producer{i, slot++};
      if (out.channel.empty()) continue;
      const auto [first, inserted] = producers.emplace(out.channel, producer);
      TORCH_CHECK_VALUE(inserted, "Channel '", out.channel,
                        "' has multiple producers: ", stages[first->second.first].label, " and ", stages[i].label,
                        ". Give each its own name.");
    }
  }
  std::vector<int> sources;
  for (size_t i = 0; i < stages.size(); ++i) {
    for (size_t k = 0; k < stages[i].in.size(); ++k) {
      const auto& channel = stages[i].in[k];
      sources.push_back(-1);
      if (channel.empty()) continue;
      const auto found = producers.find(channel);
      if (found == producers.end()) {
        std::vector<std::string> known;
        for (const auto& [name, producer] : producers) known.push_back(name);
        TORCH_CHECK_VALUE(false, "Channel '", channel, "' has no producer; extra input ", k, " of ", stages[i].label,
                          " reads it.", did_you_mean(channel, known),
                          " Produced: ", known.empty() ? "none" : join(known),
                          ". Set one with set_extra_output_channel.");
      }
      const auto [op, source] = found->second;
      TORCH_CHECK_VALUE(op < i, "Channel '", channel, "' has no earlier producer: ", stages[i].label, " reads it, ",
                        stages[op].label, " produces it. Put the producer first.");
      sources.back() = source;
    }
  }
  check_readers(stages, sources);
  return sources;
}

Pipeline::Pipeline(std::vector<Stage> stages) : stages_(std::move(stages)) {
  int eval_bits = 0;
  for (auto& stage : stages_) {
    const auto& op = *stage.op;
    stage.in.resize(op.extra_inputs());
    stage.out.resize(op.extra_outputs());
    for (auto& spec : op.params()) params_.push_back(std::move(spec));
    param_base_.push_back(static_cast<int>(params_.size()));
    saved_base_.push_back(saved_base_.back() + static_cast<int>(op.saved_names().size()));
    extra_in_base_.push_back(extra_in_base_.back() + op.extra_inputs());
    extra_out_base_.push_back(extra_out_base_.back() + op.extra_outputs());
    process_local_ |= op.process_local();
    quantizes_ |= op.quantizes();
    eval_bits_.push_back(op.depends_on_training() ? eval_bits++ : -1);
    if (!stage.label.empty()) continue;
    stage.label = op.name();
    if (size() > 1) stage.label = c10::str("operation ", param_base_.size() - 2, " (", stage.label, ")");
  }
  TORCH_CHECK_VALUE(eval_bits <= 64,
                    "Pipeline: expected at most 64 operations that depend on training mode (such as Dropout), got ",
                    eval_bits, ". Split the pipeline.");
  sources_ = channel_sources(stages_);
  for (int slot = 0; slot < num_extra_in(); ++slot)
    if (sources_[slot] < 0) caller_inputs_.push_back(slot);
  for (int slot = 0; slot < num_extra_out(); ++slot)
    if (output(slot).to_caller) caller_outputs_.push_back(slot);
}

std::string Pipeline::labels(int first, int count) const {
  std::vector<std::string> different{label(first)};
  for (int i = first + 1; i < first + count; ++i)
    if (label(i) != different.back()) different.push_back(label(i));
  return join(different);
}

int Pipeline::consumer(int extra_in_slot) const { return owner(extra_in_base_, extra_in_slot); }
int Pipeline::producer(int extra_out_slot) const { return owner(extra_out_base_, extra_out_slot); }
const Stage::Out& Pipeline::output(int extra_out_slot) const {
  const int i = producer(extra_out_slot);
  return stages_[i].out[extra_out_slot - extra_out_base(i)];
}

std::string Pipeline::text() const {
  std::string text;
  const auto name = [](const std::string& channel) { return channel.empty() ? std::string("-") : to_text(channel); };
  for (const auto& stage : stages_) {
    text += (text.empty() ? "" : "; ") + stage.op->text();
    for (const auto& channel : stage.in) text += " <" + name(channel);
    for (const auto& out : stage.out) text += (out.to_caller ? " >" : " >>") + name(out.channel);
  }
  return text;
}

Pipeline Pipeline::parse(std::string_view text) {
  Parser parser(text);
  std::vector<Stage> stages;
  while (!parser.at_end()) {
    if (!stages.empty()) parser.expect(";");
    stages.push_back(parse_stage(parser));
  }
  return Pipeline(std::move(stages));
}

}  // namespace weft::fuser
