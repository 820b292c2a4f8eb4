#include "weft/ops/collectives.h"

#include "weft/ops/parallel.h"
#include "weft/ops/registry.h"

namespace weft::ops {

AllGather::AllGather(Options options) : options_(std::move(options)) {
  refuse_parallel("AllGather", options_.process_group_size);
}

ReduceScatter::ReduceScatter(Options options) : options_(std::move(options)) {
  refuse_parallel("ReduceScatter", options_.process_group_size);
}

AllReduce::AllReduce(Options options) : options_(std::move(options)) {
  refuse_parallel("AllReduce", options_.process_group_size);
}

static const Register<AllGather> all_gather{
    "AllGather", "y is x of all ranks, one after the other in the first dimension.", {}};
static const Register<ReduceScatter> reduce_scatter{
    "ReduceScatter", "y is this rank's part, in the first dimension, of the sum of x over all ranks.", {}};
static const Register<AllReduce> all_reduce{"AllReduce", "y is the sum of x over all ranks.", {}};

}  // namespace weft::ops
