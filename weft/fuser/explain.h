#pragma once
#include <string>
#include <vector>

#include "weft/fuser/fuser.h"

namespace weft::fuser {

/// What a call does and why, as data. `text()` and `dot()` (Graphviz) format it.
struct Explanation {
  struct StepLine {
    int first, count;  // the operations that it covers
    std::string name;  // the rule of a fused operation, or the operation
    bool fused;
    std::string tier;            // kernel tier
    std::string tier_rejection;  // why faster tiers are not used
    bool runs;                   // false: no gradient that it computes is needed
    int64_t min_rows;            // with fewer rows, the basic operations run instead
    std::string note;            // run-time decision of the last call
  };
  struct SavedLine {
    int op;
    std::string name, sizes, dtype;
    int64_t bytes;       // 0 if it aliases another tensor
    std::string shared;  // the tensor that it aliases, or empty
  };
  struct Note {
    int op;
    std::string text;
  };
  struct Channel {
    int from, to;  // operations
    std::string name;
  };

  std::vector<std::string> ops;  // BasicOp::brief() of each operation
  std::vector<std::string> op_names;
  std::vector<StepLine> forward, backward;
  std::vector<Rejection> rejections;
  std::vector<Note> quantized;  // per quantized operation: its recipe
  std::vector<Note> in_place;   // per in-place operation: whether it writes in place or copies, and why
  std::vector<SavedLine> saved;
  std::vector<Channel> channels;
  std::vector<int> from_caller, to_caller;      // operations with extra inputs from, or extra outputs to, the caller
  bool saved_known = true;                      // false if an operation is written in Python
  bool packs = false;                           // a step uses packed weights
  int64_t packed_bytes = 0, packing_limit = 0;  // of the process

  int64_t saved_bytes() const;
  std::string saved_text() const;
  std::string text() const;
  std::string dot() const;
};

/// Plans a call as `Fuser::operator()` does, with the same checks, but does not run it.
Explanation explain(Fuser& fuser, const at::Tensor& x, ops::Params params, c10::ArrayRef<at::Tensor> extras,
                    uint64_t eval_mask = 0);
/// The same for a given plan.
Explanation explain(const Pipeline& pipeline, const Plan& plan, const at::Tensor& x, ops::Params params,
                    c10::ArrayRef<at::Tensor> extras);

}  // namespace weft::fuser
