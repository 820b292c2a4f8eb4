#pragma once
#include <string>
#include <vector>

#include "weft/fuser/fuser.h"

namespace weft::fuser {

/// What a call does and why, as data. `text()` and `dot()` (Graphviz) print it.
struct Explanation {
  struct StepLine {
    int first, count;
    std::string name;  // the fused operation's rule, or the operation
    bool fused;
    std::string tier;            // which kernels compute it
    std::string tier_rejection;  // why no faster ones do
    bool runs;                   // false: nothing it could compute is wanted
    int64_t min_rows;            // below, its parts run one by one
    std::string note;            // what it decided in the last call
  };
  struct SavedLine {
    int op;
    std::string name, sizes, dtype;
    int64_t bytes;       // 0 if it keeps memory that exists anyway
    std::string shared;  // whose memory that is
  };
  struct Note {
    int op;
    std::string text;
  };
  struct Channel {
    int from, to;
    std::string name;
  };

  std::vector<std::string> ops;  // their text
  std::vector<std::string> op_names;
  std::vector<StepLine> forward, backward;
  std::vector<Rejection> rejections;
  std::vector<Note> in_place;  // permissions to overwrite, and why a copy is made instead
  std::vector<SavedLine> saved;
  std::vector<Channel> channels;
  std::vector<int> from_caller, to_caller;      // operations whose extra inputs the caller gives, whose outputs it gets
  bool saved_known = true;                      // false if an operation cannot tell its sizes
  std::string saved_unknown = {};               // why
  bool packs = false;                           // a step multiplies by packed weights
  int64_t packed_bytes = 0, packing_limit = 0;  // of all pipelines together

  int64_t saved_bytes() const;
  std::string saved_text() const;
  std::string text() const;
  std::string dot() const;
};

Explanation explain(Fuser& fuser, const at::Tensor& x, ops::Params params, c10::ArrayRef<at::Tensor> extras,
                    uint64_t eval_mask = 0);
/// From a plan that exists already.
Explanation explain(const Pipeline& pipeline, const Plan& plan, const at::Tensor& x, ops::Params params,
                    c10::ArrayRef<at::Tensor> extras);

}  // namespace weft::fuser
