#!/usr/bin/env python3
"""Mutation testing: plants faults in the source one by one and checks that the unit tests of the same layer find each.

    tools/planted_faults.py                 every fault; exits with 0 only if each is killed
    tools/planted_faults.py --quick         one fault of each layer
    tools/planted_faults.py --only NAME ... these faults; a NAME may be a prefix
    tools/planted_faults.py --list          lists names, layers and files; also checks that every text is found
    tools/planted_faults.py --json FILE     also as JSON

A fault is killed if the tests of its layer (tests/cpp/<layer>) fail, crash or hang; tests of other layers do not count.
The working tree must be clean. Each file is restored after its fault was tried, also if this program is stopped. Only
objects that depend on the file are recompiled. Builds in build/release, on a CPU without AMX in build/emulated-amx.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU = Path("/proc/cpuinfo").read_text()
PRESET = "release" if "amx_bf16" in CPU else "emulated-amx"
BUILD = ROOT / "build" / PRESET
TIMEOUT = 300  # seconds for the tests of one fault


@dataclass(frozen=True)
class Fault:
    name: str  # <layer>/<fault>
    file: str
    before: str  # found exactly once in the file
    after: str
    tests: str = ""  # substring of the names of the suites to run; empty: all suites of the layer
    tier: str = ""  # WEFT_TIER; empty: the machine's best
    cpu_flag: str = ""  # the faulty code runs only on a CPU with this flag

    @property
    def layer(self) -> str:
        return self.name.split("/")[0]


FAULTS = [
    # ---- kernels: GEMM ----------------------------------------------------------------------------------------------
    Fault(
        "kernels/partial-k-step-missed",
        "weft/kernels/cpu/macrokernel_amx.cpp",
        "std::min<int64_t>(blocking_.kc_steps, ceil_div(streamed_.k - k0, kKStep))",
        "std::min<int64_t>(blocking_.kc_steps, std::max<int64_t>(1, (streamed_.k - k0) / kKStep))",
        "KernelsGemm",
    ),
    Fault(
        "kernels/partial-sums-of-earlier-k-blocks-dropped",
        "weft/kernels/cpu/macrokernel_amx.cpp",
        "k_block > 0,",
        "false,",
        "KernelsGemm",
    ),
    Fault(
        "kernels/gated-halves-swapped",
        "weft/kernels/cpu/macrokernel_amx.cpp",
        "(2 * pair + n % 2) * kBlockElems",
        "(2 * pair + 1 - n % 2) * kBlockElems",
        "KernelsGemm",
    ),
    Fault(
        "kernels/tiles-lost-in-progress-callback",
        "weft/kernels/cpu/macrokernel_amx.cpp",
        "    (*call_)();\n    TileConfig::load();",
        "    (*call_)();",
        "KernelsProgressCallback",
    ),
    Fault(
        "kernels/scratch-shared-with-progress-callback",
        "weft/kernels/cpu/macrokernel_amx.cpp",
        "Scratch::NestedScope::NestedScope() { ++ScratchStack::current().depth; }\n"
        "Scratch::NestedScope::~NestedScope() { --ScratchStack::current().depth; }",
        "Scratch::NestedScope::NestedScope() {}\nScratch::NestedScope::~NestedScope() {}",
        "KernelsProgressCallback",
    ),
    Fault(
        "kernels/tail-column-dropped",
        "weft/kernels/cpu/epilogue_rows_amx.h",
        "  store16(to, row, column + 16, v1, lane_mask(left - 16));",
        "  store16(to, row, column + 16, v1, lane_mask(left - 17));",
        "KernelsGemm",
    ),
    Fault(
        "kernels/partial-tile-not-transposed",
        "weft/kernels/cpu/pack_amx.h",
        "  if constexpr (kLeft != kAlongK) transpose16(r);",
        "  if constexpr (kLeft != kAlongK)\n    if (rows == 16 || ks == kKStep) transpose16(r);",
        "KernelsGemm",
    ),
    Fault(
        "kernels/second-output-assumed-aligned",
        "weft/kernels/cpu/epilogue_amx.h",
        "non_temporal(w.out) && non_temporal(w.pre_act) && non_temporal(w.act_output);",
        "non_temporal(w.out);",
        "KernelsNonTemporalStores",
    ),
    Fault(
        "kernels/scale-applied-twice",
        "weft/kernels/cpu/vector_gemm.cpp",
        "    part.scale = 1, part.bias = {};",
        "    part.bias = {};",
        "KernelsVectorGemm",
        cpu_flag="avx512_bf16",
    ),
    Fault(
        "kernels/addend-of-the-first-row-block-in-all",
        "weft/kernels/cpu/vector_gemm.cpp",
        "{&call.pre_act, &call.act_input, &call.act_output, &call.addend, &call.out}",
        "{&call.pre_act, &call.act_input, &call.act_output, &call.out}",
        "KernelsGemm",
    ),
    Fault(
        "kernels/addend-overwritten-by-the-gemm",
        "weft/kernels/cpu/vector_gemm.cpp",
        "    const bool free = !read_later(addend) && !read_later(act_input);",
        "    const bool free = true;",
        "KernelsVectorGemm",
    ),
    Fault(
        "kernels/rounded-before-main-grad",
        "weft/kernels/cpu/vector_gemm.cpp",
        "    if (dtype != at::kFloat && to == at::kFloat && fits",
        "    if (false && dtype != at::kFloat && to == at::kFloat && fits",
        "KernelsVectorGemm",
        cpu_flag="avx512_bf16",
    ),
    Fault(
        "kernels/bias-off-by-one",
        "weft/kernels/cpu/gemm_epilogue_vec.h",
        "read(call.bias.dtype, call.bias.data, j, count)",
        "read(call.bias.dtype, call.bias.data, j > 0 ? j - 1 : j, count)",
        "KernelsVectorGemm",
    ),
    Fault(
        "kernels/only-the-last-k-block-accumulated",
        "weft/kernels/ref/gemm.cpp",
        "add || k > 0 ? 1 : 0, scale);",
        "add ? 1 : 0, scale);",
        "KernelsGemm",
        tier="ref",
    ),
    Fault(
        "kernels/addend-of-a-row-chunk-replaces-the-epilogues",
        "weft/kernels/row_chunks.cpp",
        "      e.addend = e.addend.defined() ? sum_of(e.addend, chunk_addend) : chunk_addend;",
        "      e.addend = chunk_addend;",
        "KernelsRowChunks",
    ),
    Fault(
        "kernels/rows-of-a-row-chunk-misplaced",
        "weft/kernels/row_chunks.cpp",
        "    auto dst = all.narrow(0, row, rows.size(0));",
        "    auto dst = all.narrow(0, 0, rows.size(0));",
        "KernelsRowChunks",
    ),
    Fault(
        "kernels/addend-of-a-row-chunk-from-row-0",
        "weft/kernels/cpu/row_chunks_amx.cpp",
        "    for (int i = 0; i < w.num_addends; ++i) move(w.addends[i]);\n",
        "",
        "KernelsRowChunks",
    ),
    # ---- kernels: attention -----------------------------------------------------------------------------------------
    Fault(
        "kernels/window-off-by-one",
        "weft/kernels/cpu/attention_blocks_amx.h",
        "std::clamp<int64_t>(key + row + before_ + 1 - query,",
        "std::clamp<int64_t>(key + row + before_ - query,",
        "KernelsAttention",
    ),
    Fault(
        "kernels/keys-past-the-last-not-masked",
        "weft/kernels/cpu/attention_blocks_amx.h",
        "key + kBlockDim <= keys_ && key >=",
        "key >=",
        "KernelsAttention",
    ),
    Fault(
        "kernels/sums-not-corrected-for-new-maximum",
        "weft/kernels/cpu/attention_forward_amx.cpp",
        "if (corrects) correct(correction);",
        "",
        "KernelsAttention",
    ),
    Fault(
        "kernels/second-keys-of-pairs-not-summed",
        "weft/kernels/cpu/attention_forward_amx.cpp",
        "_mm512_add_ps(sum_.high, _mm512_add_ps(high0, high1))",
        "_mm512_add_ps(sum_.high, high0)",
        "KernelsAttention",
    ),
    Fault(
        "kernels/first-head-overwritten-in-key-gradients",
        "weft/kernels/cpu/attention_backward_amx.cpp",
        "has_query_sums_.assign(queries_, false);",
        "has_query_sums_.assign(queries_, false), has_key_sums_.assign(keys_, false);",
        "KernelsAttention",
    ),
    Fault(
        "kernels/delta-of-other-queries",
        "weft/kernels/cpu/attention_backward_amx.cpp",
        "delta_ = {_mm512_load_ps(delta), _mm512_load_ps(delta + 16)};",
        "delta_ = {_mm512_load_ps(delta), _mm512_load_ps(delta)};",
        "KernelsAttention",
    ),
    Fault(
        "kernels/region-overwritten-before-its-sums",
        "weft/kernels/cpu/attention_backward_amx.cpp",
        "regions_[region_ ^= 1]",
        "regions_[0]",
        "KernelsAttention",
    ),
    Fault(
        "kernels/dq-of-a-part-of-the-keys-dropped",
        "weft/kernels/cpu/attention_backward_amx.cpp",
        "for (int64_t part = 1; part < parts; ++part)\n          for",
        "for (int64_t part = 2; part < parts; ++part)\n          for",
        "KernelsAttention",
    ),
    # ---- kernels: GEMM over several threads -------------------------------------------------------------------------
    Fault(
        "kernels/part-of-k-not-added",
        "weft/kernels/cpu/gemm_amx.cpp",
        "for (int part = 0; part < grid_.k; ++part,",
        "for (int part = 0; part < grid_.k - 1; ++part,",
        "KernelsGemmThreads",
    ),
    Fault(
        "kernels/part-of-k-finished-early",
        "weft/kernels/cpu/gemm_amx.cpp",
        "std::memory_order_acq_rel) + 1 == grid_.k;",
        "std::memory_order_acq_rel) == 0;",
        "KernelsGemmThreads",
    ),
    Fault(
        "kernels/panel-not-packed",
        "weft/kernels/cpu/shared_panels_amx.h",
        "      pack_piece(strip, k_block, i);\n      states[i].store(kReady,",
        "      if (panel > 0) pack_piece(strip, k_block, i);\n      states[i].store(kReady,",
        "KernelsGemmThreads",
    ),
    Fault(
        "kernels/panel-packed-by-every-thread",
        "weft/kernels/cpu/shared_panels_amx.h",
        "      if (states[i].load(std::memory_order_relaxed) != kFree) continue;",
        "      pack_piece(strip, k_block, i);",
        "KernelsGemmThreads",
    ),
    # ---- kernels: grouped GEMM --------------------------------------------------------------------------------------
    Fault(
        "kernels/group-offset-off-by-one",
        "weft/kernels/cpu/grouped_amx.cpp",
        "offsets_.begin(g));\n    x.ld = call_.x.strides()[0];\n    x.extent = offsets_.rows(g);",
        "std::max<int64_t>(offsets_.begin(g), 1) - 1);\n    x.ld = call_.x.strides()[0];\n"
        "    x.extent = offsets_.rows(g);",
        "KernelsGrouped",
    ),
    Fault(
        "kernels/empty-group-not-zeroed",
        "weft/kernels/cpu/grouped_amx.cpp",
        "return call_.accumulate ? 0 : 2;",
        "return 0;",
        "KernelsGrouped",
    ),
    Fault(
        "kernels/bias-of-the-first-group-in-all",
        "weft/kernels/cpu/grouped_amx.cpp",
        "    p.bias = matrix_of(call_.bias, g);",
        "    p.bias = matrix_of(call_.bias, 0);",
        "KernelsGrouped",
    ),
    Fault(
        "kernels/scale-gradients-of-the-first-group-only",
        "weft/kernels/cpu/vector_grouped.cpp",
        "call.ds.mutable_data_ptr<float>() + offsets.begin(g);",
        "call.ds.mutable_data_ptr<float>();",
        "KernelsGrouped",
    ),
    Fault(
        "kernels/group-overwrites-main-grad",
        "weft/kernels/grouped_split.cpp",
        "  if (call.accumulate) e.addend = out;\n",
        "",
        "KernelsGrouped",
    ),
    # ---- quant ------------------------------------------------------------------------------------------------------
    Fault(
        "quant/maximum-not-moved-to-the-history",
        "weft/quant/delayed_scaling.cpp",
        "if (length > 1) history[(length - 1) * n + i] = last;",
        "",
    ),
    Fault(
        "quant/infinite-maximum-sets-the-scale",
        "weft/quant/delayed_scaling.cpp",
        "std::isfinite(amax) && amax > 0",
        "amax > 0",
    ),
    Fault(
        "quant/recipe-of-another-thread",
        "weft/quant/recipe.cpp",
        "thread_local uint32_t active = 0;",
        "uint32_t active = 0;",
    ),
    # ---- kernels: quantization --------------------------------------------------------------------------------------
    Fault(
        "kernels/ties-of-codes-rounded-up",
        "weft/kernels/quantize_math.h",
        "((clamped >> shift) & 1) + ((1 << (shift - 1)) - 1)",
        "1 + ((clamped & 0) + ((1 << (shift - 1)) - 1))",
        "Quantize",
    ),
    Fault(
        "kernels/e8m0-scale-rounded-down",
        "weft/kernels/quantize_math.h",
        "splat_int<I>(0) : exponent + rounds_up;",
        "splat_int<I>(0) : exponent + 0 * rounds_up;",
        "Quantize",
    ),
    Fault(
        "kernels/random-numbers-of-both-copies-equal",
        "weft/kernels/cpu/quantize_lanes_vec.h",
        "(columnwise ? 1U << 31 : 0)",
        "(columnwise ? 0U : 0)",
        "Quantize",
    ),
    Fault(
        "kernels/stale-code-beside-the-last-of-an-odd-number",
        "weft/kernels/cpu/quantize_vec.h",
        "      for (auto j = left; j < kLanes; ++j) codes[i + j] = Bytes{};\n",
        "      for (auto j = left; j < kLanes; ++j) codes[i + j] = codes[i];\n",
        "Quantize",
    ),
    Fault(
        "kernels/column-scales-of-the-first-lane-only",
        "weft/kernels/cpu/quantize_vec.h",
        "column + lane), scale.inverse[lane],\n                  scale.code[lane]);",
        "column + lane), scale.inverse[0],\n                  scale.code[0]);",
        "Quantize",
    ),
    Fault(
        "kernels/scale-of-the-right-operand-dropped",
        "weft/kernels/quantized_gemm.cpp",
        "return static_cast<double>(factor_of(a)) * factor_of(b);",
        "return static_cast<double>(factor_of(a));",
        "Quantize",
    ),
    # ---- kernels: norms, activations, rows --------------------------------------------------------------------------
    Fault(
        "kernels/statistics-of-the-neighbour-row",
        "weft/kernels/cpu/norm_vec.h",
        "    if (c.rstd) c.rstd[row] = rstd;",
        "    if (c.rstd) c.rstd[row > begin ? row - 1 : row] = rstd;",
        "Norm",
    ),
    Fault(
        "kernels/eps-dropped",
        "weft/kernels/cpu/norm_vec.h",
        "std::sqrt(squares / c.divisor + c.eps)",
        "std::sqrt(squares / c.divisor)",
        "Norm",
    ),
    Fault(
        "kernels/dgamma-without-the-last-row",
        "weft/kernels/norm.cpp",
        "    parallel_reduce_rows(rows, both * n,",
        "    parallel_reduce_rows(std::max<int64_t>(rows - 1, 0), both * n,",
        "Norm",
    ),
    Fault(
        "kernels/dbeta-added-to-dgamma",
        "weft/kernels/norm.cpp",
        "part.dbeta = partial + (both - 1) * n;",
        "part.dbeta = partial;",
        "Norm",
    ),
    Fault(
        "kernels/column-sums-of-the-wrong-rows",
        "weft/kernels/activation.cpp",
        "act_loops(tier).backward(part, taken + begin, taken + end);",
        "act_loops(tier).backward(part, begin, end);",
        "Activation",
    ),
    Fault(
        "kernels/activation-gradient-at-dy-instead-of-x",
        "weft/kernels/ref/activation.cpp",
        "      return at::silu_backward(dy, x);\n",
        "      return at::silu_backward(dy, dy);\n",
        "Activation",
        tier="ref",
    ),
    Fault(
        "kernels/activation-gradient-of-large-inputs-is-nan",
        "weft/kernels/ref/activation.cpp",
        "{ return at::clamp(x, -1e4, 1e4).add_(at::mul(x, 0)); }",
        "{ return at::mul(x, 1); }",
        "Activation",
        tier="ref",
    ),
    Fault(
        "kernels/dropout-mask-shifted",
        "weft/kernels/cpu/rows_vec.h",
        "read_mask(c.mask + begin + i, count) * scale;",
        "read_mask(c.mask + begin + (i > 0 ? i - 1 : 0), count) * scale;",
        "Rows",
    ),
    # ---- ops --------------------------------------------------------------------------------------------------------
    Fault(
        "ops/dropout-gradient-not-scaled",
        "weft/ops/dropout.cpp",
        "  return kernels::scaled_mask_add(dy, ctx.saved(kMask), 1 / (1 - options_.p));",
        "  return kernels::scaled_mask_add(dy, ctx.saved(kMask), 1);",
    ),
    Fault(
        "ops/bias-gradient-without-the-first-row",
        "weft/ops/bias.cpp",
        "set_gradient(ctx, sum_rows(dy));",
        "set_gradient(ctx, sum_rows(dy.slice(0, 1)));",
    ),
    Fault(
        "ops/scale-squared-in-backward",
        "weft/ops/constant_scale.cpp",
        "at::mul(dy, options_.scale)",
        "at::mul(dy, options_.scale * options_.scale)",
    ),
    Fault(
        "ops/zero-centred-gamma-ignored",
        "weft/ops/norm.cpp",
        "return o.zero_centered_gamma ? at::add(gamma, 1) : gamma;",
        "return gamma;",
    ),
    Fault(
        "ops/eps-dropped",
        "weft/ops/l2_normalization.cpp",
        "l2_norm_forward(x, options_.eps)",
        "l2_norm_forward(x, 0)",
    ),
    Fault(
        "ops/clamp-limit-dropped",
        "weft/ops/activation_op.h",
        "    act.limit = options.limit;\n",
        "",
    ),
    Fault(
        "ops/main-grad-overwritten",
        "weft/ops/wgrad_sink.cpp",
        "  if (accumulate) epilogue.addend = epilogue.out;\n",
        "",
    ),
    Fault(
        "ops/second-use-of-a-weight-overwrites",
        "weft/ops/wgrad_sink.cpp",
        "sinks[0].accumulate || state->overwritten_by == gemm.graph_task_id;",
        "sinks[0].accumulate;",
    ),
    Fault(
        "ops/uncast-weight-in-backward",
        "weft/ops/basic_linear.cpp",
        "  if (ctx.needs_input_grad() && !out.w.is_same(weight)) ctx.save(kWeight, out.w);\n",
        "",
    ),
    Fault(
        "ops/gathered-scales-of-the-first-rank",
        "weft/ops/quantized_gather.cpp",
        "    copy_part(to.scales, from.scales, rank, dim);",
        "    copy_part(to.scales, from.scales, 0, dim);",
        "QuantizedGather",
    ),
    Fault(
        "ops/gathered-rows-not-compared",
        "weft/ops/quantized_gather.cpp",
        "found == expected,",
        "found.rows > 0,",
        "QuantizedGather",
    ),
    Fault(
        "ops/residual-gradient-replaces-the-other",
        "weft/ops/make_extra_output.cpp",
        "g.add_(dy) : at::add(g, dy);",
        "g.add_(dy) : g;",
    ),
    # ---- fused ------------------------------------------------------------------------------------------------------
    Fault("fused/bias-dropped", "weft/fused/epilogues.cpp", "epilogue{.bias = bias_of(ctx, bias)};", "epilogue;"),
    Fault(
        "fused/scale-dropped",
        "weft/fused/forward/linear_add.cpp",
        "    if (scale_) epilogue.scale = scale_->options().scale;\n",
        "",
    ),
    Fault(
        "fused/weight-gradient-scaled-twice",
        "weft/fused/backward/linear_scale.cpp",
        "linear_->weight_gradient(linear, dy, scale_);",
        "linear_->weight_gradient(linear, dy, scale_ * scale_);",
    ),
    Fault(
        "fused/bias-gradient-of-dy-instead-of-dx",
        "weft/fused/epilogues.cpp",
        "bias->set_gradient(ctx.op(bias.index), std::move(db));",
        "bias->set_gradient(ctx.op(bias.index), dy.sum(0));",
    ),
    Fault(
        "fused/gradient-of-another-activation",
        "weft/fused/backward/activation_linear.cpp",
        "{.act_grad = activation_->act(),",
        "{.act_grad = kernels::Act{.kind = kernels::ActKind::swiglu},",
    ),
    Fault(
        "fused/residual-gradient-dropped",
        "weft/fused/backward/add_norm.cpp",
        "ctx.params(1), g, /*reuse=*/false)",
        "ctx.params(1), at::Tensor{}, /*reuse=*/false)",
    ),
    Fault(
        "fused/residual-dropped-behind-dropout",
        "weft/fused/forward/dropout_add.cpp",
        "kernels::scaled_mask_add(x, mask, scale, sum);",
        "kernels::scaled_mask_add(x, mask, scale);",
    ),
    Fault(
        "fused/gradient-that-others-hold-overwritten",
        "weft/fused/epilogues.cpp",
        "sum_dtype == g.scalar_type() && g.is_contiguous() && sole_owner(g);",
        "sum_dtype == g.scalar_type() && g.is_contiguous();",
    ),
    # ---- overlap ----------------------------------------------------------------------------------------------------
    Fault(
        "overlap/blocks-of-ranks-swapped",
        "weft/overlap/all_gather_gemm.cpp",
        ".a = rank == transport_.rank() ? x_ : collective.incoming(rank), .row = rank * rows_}",
        ".a = rank == transport_.rank() ? x_ : collective.incoming(rank), "
        ".row = (transport_.size() - 1 - rank) * rows_}",
    ),
    Fault(
        "overlap/tiles-of-ranks-swapped",
        "weft/overlap/all_gather_gemm.cpp",
        ".row = owner_[i] * rows_, .packed_rows = rows_}",
        ".row = owner_[owner_.size() - i] * rows_, .packed_rows = rows_}",
    ),
    Fault(
        "overlap/addends-of-peers-dropped",
        "weft/overlap/gemm_reduce_scatter.cpp",
        "    for (const int peer : peers_) chunks.list.back().addends.push_back(collective.incoming(peer));\n",
        "",
    ),
    Fault(
        "overlap/own-rows-not-gathered",
        "weft/overlap/blocks.h",
        "  rows_of(transport.rank()).copy_(local);\n",
        "",
    ),
    Fault(
        "overlap/latency-counted-once-for-two-exchanges",
        "weft/overlap/costs.cpp",
        "out.plain = gemm + (twice ? 2 : 1) * costs.plain_latency",
        "out.plain = gemm + costs.plain_latency",
        "OverlapCosts",
    ),
    # ---- fuser ------------------------------------------------------------------------------------------------------
    Fault(
        "fuser/gradients-of-a-channel-not-added",
        "weft/fuser/executor.cpp",
        "    sum = at::add(sum, grad);",
        "    sum = grad;",
    ),
    Fault(
        "fuser/gradient-that-others-hold-added-to",
        "weft/fuser/executor.cpp",
        "sole_owner(sum) && sum.scalar_type() == grad.scalar_type()",
        "sum.scalar_type() == grad.scalar_type()",
    ),
    Fault(
        "fuser/channel-taken-before-its-last-reader",
        "weft/fuser/executor.cpp",
        "route.last ? std::move(frame.extra_out[route.from]) : frame.extra_out[route.from];",
        "std::move(frame.extra_out[route.from]);",
    ),
    Fault(
        "fuser/plan-of-another-call-taken",
        "weft/fuser/fuser.cpp",
        "if (!plans_.empty() && plans_.front()->key == key) return plans_.front();",
        "if (!plans_.empty()) return plans_.front();",
    ),
]


def suites(layer: str) -> list[str]:
    """Returns the test suites of a layer."""
    found: set[str] = set()
    for path in (ROOT / "tests/cpp" / layer).glob("*_test.cpp"):
        found.update(re.findall(r"^TEST(?:_F|_P)?\((\w+),", path.read_text(), re.MULTILINE))
    return sorted(found)


def test_filter(fault: Fault) -> str:
    chosen = [suite for suite in suites(fault.layer) if fault.tests in suite]
    if not chosen:
        sys.exit(f"{fault.name}: no test suite in tests/cpp/{fault.layer} matches {fault.tests}")
    return ":".join(f"{suite}.*:*/{suite}.*" for suite in chosen) + "-*Slow*"


def original(fault: Fault) -> str:
    text = (ROOT / fault.file).read_text()
    if text.count(fault.before) != 1:
        sys.exit(f"{fault.name}: its text occurs {text.count(fault.before)} times in {fault.file}, expected once")
    return text


def build() -> str:
    """Builds the tests; returns the compiler's messages on failure."""
    command = ["cmake", "--build", str(BUILD), "--target", "weft_tests", "-j", str(os.cpu_count())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr)[-3000:] if done.returncode else ""


@functools.cache
def passes(filter_: str, tier: str, state: str) -> tuple[bool, str]:
    """Returns whether tests pass, and the first failure. `state` distinguishes cached runs on different sources."""
    environment = {**os.environ, **({"WEFT_TIER": tier} if tier else {})}
    command = [str(BUILD / "weft_tests"), f"--gtest_filter={filter_}", "--gtest_brief=1", "--gtest_fail_fast"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return False, "hangs"
    if done.returncode == 0:
        return True, ""
    failed = re.search(r"\[  FAILED  \] (\S+?),? ", done.stdout)
    return False, failed.group(1) if failed else f"exit status {done.returncode}"


def attempt(fault: Fault) -> tuple[str, str]:
    """Plants a fault, runs the tests and restores the file. Returns the verdict and the test that found it."""
    text, path = original(fault), ROOT / fault.file
    filter_ = test_filter(fault)
    try:
        path.write_text(text.replace(fault.before, fault.after))
        if messages := build():
            return "does not compile", messages
        passed, why = passes(filter_, fault.tier, fault.name)
        return ("survived", "") if passed else ("killed", why)
    finally:
        path.write_text(text)


def check_baseline(faults: list[Fault]) -> None:
    """Exits if a test fails without a fault: it would kill every fault."""
    if not (BUILD / "build.ninja").exists():
        subprocess.run(["cmake", "--preset", PRESET, f"-DPython3_EXECUTABLE={sys.executable}"], cwd=ROOT, check=True)
    if messages := build():
        sys.exit(f"The tree does not build:\n{messages}")
    for fault in faults:
        passed, why = passes(test_filter(fault), fault.tier, "")
        if not passed:
            sys.exit(f"Tests of {fault.layer} fail without a fault: {why}")


def select(arguments: argparse.Namespace) -> list[Fault]:
    if arguments.only:
        chosen = [f for f in FAULTS if any(f.name.startswith(name) for name in arguments.only)]
        if not chosen:
            sys.exit(f"Unknown fault {' or '.join(arguments.only)}; see --list.")
        return chosen
    if not arguments.quick:
        return FAULTS
    first = {fault.layer: fault for fault in reversed(FAULTS)}
    return list(reversed(first.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    faults = select(arguments)
    if arguments.list:
        for fault in faults:
            original(fault)
            print(f"{fault.name:55} {fault.file}")
        print(f"{len(faults)} faults")
        return 0
    status = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if status.stdout:
        sys.exit(f"The working tree has changes; commit or stash them first:\n{status.stdout}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that `finally` restores the file
    for fault in (f for f in faults if f.cpu_flag not in CPU):
        print(f"not planted: {fault.name}, whose code does not run on a CPU without {fault.cpu_flag}")
    faults = [f for f in faults if f.cpu_flag in CPU]
    check_baseline(faults)
    verdicts = []
    for fault in faults:
        start = time.monotonic()
        verdict, why = attempt(fault)
        verdicts.append({"fault": fault.name, "verdict": verdict, "by": why})
        print(f"{verdict:10} {fault.name:55} {time.monotonic() - start:4.0f} s  {why}", flush=True)
    build()  # without any fault
    killed = sum(v["verdict"] == "killed" for v in verdicts)
    print(f"{killed} of {len(verdicts)} planted faults killed")
    if arguments.json:
        arguments.json.write_text(json.dumps(verdicts, indent=1) + "\n")
    return 0 if killed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
