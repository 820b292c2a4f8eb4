#include "weft/ops/activation.h"

#include "weft/ops/registry.h"

namespace weft::ops {

using kernels::ActKind;

/// The names of the kinds without fields, in the order of ActKind.
static constexpr std::string_view kKindNames[] = {"GELU", "QGELU", "ReLU",   "SReLU", "SiLU",
                                                  "GLU",  "GEGLU", "QGEGLU", "ReGLU", "SReGLU"};

static std::string_view kind_name(ActKind kind) {
  const auto i = static_cast<size_t>(kind);
  TORCH_CHECK_VALUE(i < std::size(kKindNames), "Activation: use SwiGLU, SiTUGLU or ClampedSwiGLU for this kind.");
  return kKindNames[i];
}

Activation::Activation(Options options)
    : ActivationOp(kind_name(options.kind), {.kind = options.kind}, options.cache_quantized_input), options_(options) {}

std::string_view Activation::name() const { return kind_name(options_.kind); }

static Register<Activation> register_activation(ActKind kind, std::string doc) {
  return {std::string(kind_name(kind)), std::move(doc), {.kind = kind}, {.kind = kind}};
}

static const std::string kHalves = ", where a is the first and b the second half of the last dimension.";
static const Register<Activation> registered[] = {
    register_activation(ActKind::gelu, "y = x·(½ + ½·tanh(√(2/π)·(x + 0.044715·x³)))."),
    register_activation(ActKind::qgelu, "y = x·σ(1.702·x)."),
    register_activation(ActKind::relu, "y = max(x, 0)."),
    register_activation(ActKind::srelu, "y = max(x, 0)²."),
    register_activation(ActKind::silu, "y = x·σ(x)."),
    register_activation(ActKind::glu, "y = σ(a)·b" + kHalves),
    register_activation(ActKind::geglu, "y = GELU(a)·b" + kHalves),
    register_activation(ActKind::qgeglu, "y = a·σ(1.702·a)·b" + kHalves),
    register_activation(ActKind::reglu, "y = max(a, 0)·b" + kHalves),
    register_activation(ActKind::sreglu, "y = max(a, 0)²·b" + kHalves),
};

}  // namespace weft::ops
