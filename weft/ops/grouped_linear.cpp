#include "weft/ops/grouped_linear.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "weft/kernels/gemm.h"
#include "weft/ops/leading_dims.h"
#include "weft/ops/registry.h"

namespace weft::ops {
namespace {

/// [..., n] as a matrix with contiguous rows.
at::Tensor dense_rows(const at::Tensor& t) {
  const auto matrix = as_matrix(t);
  return matrix.stride(1) == 1 || matrix.size(1) <= 1 ? matrix : matrix.contiguous();
}

bool are_disjoint(const at::Tensor& a, const at::Tensor& b) {
  return at::get_overlap_status(a, b) == at::MemOverlapStatus::No;
}

/// The caller's buffer as a matrix, with its version bumped for the coming write; undefined if there is none.
at::Tensor writable_matrix(const at::Tensor& given, int64_t columns) {
  if (!given.defined()) return {};
  if (!given.is_inference()) given.unsafeGetTensorImpl()->bump_version();
  return given.view({-1, columns});
}

/// The matrix reshaped to the leading sizes of `like`. In the caller's buffer it shares the buffer's version counter,
/// so that autograd detects a later write.
at::Tensor restore_output(const at::Tensor& matrix, const at::Tensor& like, const at::Tensor& given) {
  auto t = restore_leading_dims(matrix, like);
  return given.defined() ? share_version_counter(std::move(t), given) : t;
}

/// Gradients in callers' buffers, by address. Each has a separate storage, so that it can be moved to new memory when
/// the buffer is about to be overwritten while an alias is still in use.
class GradientsInBuffers {
 public:
  static GradientsInBuffers& instance() {
    static auto* table = new GradientsInBuffers;  // never destroyed: tensors may outlive static destructors
    return *table;
  }

  /// A tensor over the memory of `buffer`, registered here.
  at::Tensor add(const at::Tensor& buffer) {
    auto gradient = at::from_blob(buffer.data_ptr(), buffer.sizes(), [buffer](void*) {}, buffer.options());
    if (!gradient.is_inference() && !buffer.is_inference())
      gradient.unsafeGetTensorImpl()->set_version_counter(buffer.unsafeGetTensorImpl()->version_counter());
    const std::lock_guard lock(mutex_);
    entries_.push_back({range(buffer), gradient.storage().getWeakStorageImpl()});
    return gradient;
  }

  /// Moves the gradients in `buffer` to new memory, before `buffer` is written.
  void move_out_of(const at::Tensor& buffer) {
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> in_use;
    const auto [begin, end] = range(buffer);
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(entries_, [&](Entry& e) {
        const bool overlaps = e.range.first < end && begin < e.range.second;
        if (!overlaps) return e.storage.expired();
        if (auto storage = e.storage.lock()) in_use.push_back(std::move(storage));
        return true;
      });
    }
    for (auto& storage : in_use) {
      const auto bytes = at::empty({0}, buffer.options().dtype(at::kByte)).set_(c10::Storage(storage)).clone();
      storage->set_data_ptr(
          bytes.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, buffer.device())));
    }
  }

 private:
  using Range = std::pair<const char*, const char*>;
  struct Entry {
    Range range;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };
  static Range range(const at::Tensor& t) {
    const auto* begin = static_cast<const char*>(t.const_data_ptr());
    return {begin, begin + t.nbytes()};
  }

  std::mutex mutex_;
  std::vector<Entry> entries_;
};

/// One matrix per group; matrices that are not contiguous are copied.
kernels::GroupedMatrix contiguous_groups(Params list, int64_t rows, int64_t columns) {
  const auto dense = [](const at::Tensor& t) { return t.is_contiguous(); };
  if (std::all_of(list.begin(), list.end(), dense)) return {list, rows, columns};
  std::vector<at::Tensor> copies;
  for (const auto& t : list) copies.push_back(t.contiguous());
  return {copies, rows, columns};
}

}  // namespace

GroupedLinear::GroupedLinear(Options options) : options_(options) {
  const auto positive = [](const char* what, int64_t value) {
    TORCH_CHECK_VALUE(value > 0, "GroupedLinear: ", what, " is ", value, ", expected 1 or more.");
  };
  positive("num_groups", options_.num_groups);
  TORCH_CHECK_VALUE(options_.num_groups <= kMaxGroups, "GroupedLinear: num_groups is ", options_.num_groups,
                    ", expected at most ", kMaxGroups, ".");
  positive("in_features", options_.in_features);
  positive("out_features", options_.out_features);
  check_param_dtype("GroupedLinear", options_.dtype);
  if (!options_.bias) options_.single_grouped_bias = false;
}

// ---- parameters ---------------------------------------------------------------------------------------------------

int GroupedLinear::first_weight() const {
  return options_.single_grouped_weight && !options_.single_grouped_bias ? num_biases() : 0;
}
int GroupedLinear::first_bias() const { return first_weight() == 0 ? num_weights() : 0; }

/// All weights, then all biases, except that a single grouped weight follows per-group biases.
std::vector<ParamSpec> GroupedLinear::params() const {
  const auto groups = options_.num_groups, n = options_.out_features, k = options_.in_features;
  std::vector<ParamSpec> weights, biases;
  const auto add = [&](std::vector<ParamSpec>& list, const ParamSpec& one, bool single) {
    for (int64_t g = 0; g < (single ? 1 : groups); ++g) {
      list.push_back(one);
      if (single)
        list.back().shape.insert(list.back().shape.begin(), groups);
      else
        list.back().name += std::to_string(g);
    }
  };
  add(weights,
      {.name = "weight",
       .shape = {n, k},
       .dtype = options_.dtype,
       .init = Init::fan_in_uniform,
       .backward_read = BackwardRead::for_input_grad,
       .fan_in = k,
       .supports_main_grad = true},
      options_.single_grouped_weight);
  if (options_.bias)
    add(biases,
        {.name = "bias",
         .shape = {n},
         .dtype = options_.dtype,
         .init = Init::zeros,
         .backward_read = options_.scale_bias ? BackwardRead::always : BackwardRead::never},
        options_.single_grouped_bias);
  auto& first = first_weight() == 0 ? weights : biases;
  auto& second = first_weight() == 0 ? biases : weights;
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// Raises unless all parameters have the same dtype, device and requires_grad: one grouped GEMM serves them all.
void GroupedLinear::check_parameters(const OpContext& ctx, const at::Tensor& x, Params params) const {
  const auto& first = params[first_weight()];
  const bool needs_grad = ctx.needs_param_grad(first_weight());
  const auto check = [&](const char* what, int begin, int count, at::IntArrayRef shape) {
    for (int i = begin; i < begin + count; ++i) {
      const auto& p = params[i];
      TORCH_CHECK_VALUE(p.sizes() == shape, "GroupedLinear: ", what, " ", i - begin, " has shape ", p.sizes(),
                        ", expected ", shape, ".");
      TORCH_CHECK(p.scalar_type() == first.scalar_type() && p.device() == first.device(), "GroupedLinear: ", what, " ",
                  i - begin, " is ", dtype_name(p.scalar_type()), " on ", p.device(), ", the first weight is ",
                  dtype_name(first.scalar_type()), " on ", first.device(),
                  "; expected the same dtype and device for all weights and biases.");
      TORCH_CHECK(ctx.needs_param_grad(i) == needs_grad, "GroupedLinear: ", what, " ", i - begin,
                  needs_grad ? " does not require a gradient" : " requires a gradient", ", the first weight ",
                  needs_grad ? "does" : "does not", "; freeze all weights and biases of the operation or none.");
    }
  };
  const auto groups = options_.num_groups, n = options_.out_features, k = options_.in_features;
  const std::array<int64_t, 3> weight{groups, n, k};
  const std::array<int64_t, 2> bias{groups, n};
  check("weight", first_weight(), num_weights(), at::IntArrayRef(weight).slice(options_.single_grouped_weight ? 0 : 1));
  check("bias", first_bias(), num_biases(), at::IntArrayRef(bias).slice(options_.single_grouped_bias ? 0 : 1));
  TORCH_CHECK_VALUE(x.device() == first.device(), "GroupedLinear: input is on ", x.device(), ", weights are on ",
                    first.device(), "; expected the same device.");
}

kernels::GroupedMatrix GroupedLinear::biases_of(Params params) const {
  if (!options_.bias) return {};
  const auto list = params.slice(first_bias(), num_biases());
  const auto n = options_.out_features;
  if (options_.single_grouped_bias) return kernels::GroupedMatrix(list[0].contiguous().view({-1, 1, n}));
  return contiguous_groups(list, 1, n);
}

// ---- argument checks ----------------------------------------------------------------------------------------------

void GroupedLinear::check_input(const at::Tensor& x) const {
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) == options_.in_features, "input has shape ", x.sizes(), ", expected ",
                    options_.in_features, " features in the last dimension.");
}

void GroupedLinear::check_splits(const at::Tensor& splits, const at::Tensor& x) const {
  TORCH_CHECK_TYPE(at::isIntegralType(splits.scalar_type(), /*includeBool=*/false), "split sizes are ",
                   dtype_name(splits.scalar_type()), ", expected integers (int32 or int64).");
  TORCH_CHECK_VALUE(splits.numel() == options_.num_groups, "expected ", options_.num_groups,
                    " split sizes, one per group, got ", splits.numel(), ".");
  TORCH_CHECK_VALUE(splits.device() == x.device(), "split sizes are on ", splits.device(), ", the input is on ",
                    x.device(), "; expected the same device.");
}

void GroupedLinear::check_buffer(const OpContext& ctx, const char* what, const at::Tensor& buffer,
                                 at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& x,
                                 Params params) const {
  TORCH_CHECK_VALUE(buffer.sizes() == sizes && buffer.scalar_type() == dtype && buffer.device() == x.device(),
                    "buffer '", what, "' is ", dtype_name(buffer.scalar_type()), " of shape ", buffer.sizes(), " on ",
                    buffer.device(), ", expected ", dtype_name(dtype), " of shape ", sizes, " on ", x.device(), ".");
  bool disjoint = are_disjoint(buffer, x);
  for (const auto& param : params) disjoint = disjoint && are_disjoint(buffer, param);
  for (int i = 0; i < extra_inputs(); ++i) disjoint = disjoint && are_disjoint(buffer, ctx.extra_input(i));
  TORCH_CHECK_VALUE(disjoint, "buffer '", what,
                    "' shares memory with an input or a parameter; pass a separate buffer.");
}

// ---- GEMMs --------------------------------------------------------------------------------------------------------

bool GroupedLinear::needs_weight_grad(const OpContext& ctx) const {
  const auto& needed = ctx.plan().needs_param_grad;
  return std::any_of(needed.begin() + first_weight(), needed.begin() + first_weight() + num_weights(),
                     [](uint8_t w) { return w != 0; });
}

/// All weights in `dtype`. If they need a cast, the copies are in one block, returned in `cast`.
kernels::GroupedMatrix GroupedLinear::weights_of(Params params, at::ScalarType dtype, at::Tensor& cast) const {
  const auto list = params.slice(first_weight(), num_weights());
  const auto groups = options_.num_groups, n = options_.out_features, k = options_.in_features;
  const bool single = options_.single_grouped_weight;
  if (list[0].scalar_type() != dtype) {
    cast = at::empty({groups, n, k}, list[0].options().dtype(dtype));
    for (int g = 0; g < num_weights(); ++g) (single ? cast : cast.select(0, g)).copy_(list[g]);
    return kernels::GroupedMatrix(cast);
  }
  if (single) return kernels::GroupedMatrix(list[0].contiguous());
  return contiguous_groups(list, n, k);
}

void GroupedLinear::check_buffers(const OpContext& ctx, const at::Tensor& x, Params params) const {
  const auto* given = ctx.buffers();
  if (!given) return;
  const auto dtype = ctx.dtype(params[first_weight()].scalar_type());
  if (given->grad_input.defined()) check_buffer(ctx, "grad_input", given->grad_input, x.sizes(), dtype, x, params);
  if (!given->output.defined()) return;
  auto sizes = x.sizes().vec();
  sizes.back() = options_.out_features;
  check_buffer(ctx, "output", given->output, sizes, dtype, x, params);
}

GroupedLinear::ForwardResult GroupedLinear::forward_gemm(OpContext& ctx, const at::Tensor& x, Params params) const {
  check_input(x);
  check_parameters(ctx, x, params);
  auto splits = ctx.extra_input(kSplitSizes);
  check_splits(splits, x);
  splits = (splits.scalar_type() == at::kInt ? splits : as_dtype(splits, at::kLong)).contiguous();
  auto input = as_dtype(x, ctx.dtype(params[first_weight()].scalar_type()));
  const auto matrix = dense_rows(input);
  at::Tensor cast, scales;
  if (scales_bias()) {
    scales = ctx.extra_input(kBiasScales);
    TORCH_CHECK_VALUE(scales.numel() == matrix.size(0), "bias scales have shape ", scales.sizes(), ", the input has ",
                      matrix.size(0), " rows; expected one value per row.");
  }
  const auto w = weights_of(params, input.scalar_type(), cast);
  check_buffers(ctx, x, params);
  kernels::GroupedEpilogue epilogue{.bias = biases_of(params), .path = path()};
  const auto* recipe = ctx.plan().recipe;
  if (recipe) {
    TORCH_CHECK_NOT_IMPLEMENTED(!recipe->is_delayed(), "delayed scaling is not supported. Use another recipe.");
    epilogue.quantization = {.a = recipe->input.quantization(),
                             .b = recipe->weight.quantization(),
                             .checks_hadamard = needs_weight_grad(ctx) && !recipe->backward_override};
  }
  if (const auto* given = ctx.buffers()) epilogue.out = writable_matrix(given->output, options_.out_features);
  if (scales.defined()) epilogue.scales = scales.reshape({-1});
  auto y = kernels::grouped_gemm(kernels::GroupIndex(splits), matrix, w, /*transposed=*/true, epilogue);
  auto saved_recipe = recipe ? save_recipe(*recipe, ctx.needs_grad()) : at::Tensor();
  if (ctx.needs_grad()) {
    ctx.save(kSplits, splits);
    if (scales.defined()) ctx.save(kScales, scales);
    if (ctx.needs_input_grad() && cast.defined()) ctx.save(kCastWeight, cast);
    if (saved_recipe.defined()) ctx.save(kRecipe, std::move(saved_recipe));
  }
  return {std::move(y), std::move(input)};
}

at::Tensor GroupedLinear::prepare_output_gradient(const OpContext& ctx, const at::Tensor& dy, Params params) const {
  const auto &x = ctx.saved(kInput), &cast = ctx.saved(kCastWeight);
  auto dtype = dy.scalar_type();
  if (x.defined())
    dtype = x.scalar_type();
  else if (cast.defined())
    dtype = cast.scalar_type();
  else if (ctx.needs_input_grad())
    dtype = params[first_weight()].scalar_type();
  auto gradient = dense_rows(as_dtype(dy, dtype));
  const auto* given = ctx.buffers();
  return given && given->grad_input.defined() && !are_disjoint(given->grad_input, gradient) ? gradient.clone()
                                                                                            : gradient;
}

void GroupedLinear::bias_gradient(OpContext& ctx, const at::Tensor& dy, Params params) const {
  const bool needs_bias_grad = options_.bias && ctx.needs_param_grad(first_bias());
  const bool needs_scales_grad = scales_bias() && ctx.needs_extra_grad(kBiasScales);
  if (!needs_bias_grad && !needs_scales_grad) return;
  const auto& scales = ctx.saved(kScales);
  const auto [db, ds] = kernels::grouped_bias_gradient(
      kernels::GroupIndex(ctx.saved(kSplits)), dy, scales.defined() ? scales.reshape({-1}) : scales,
      needs_scales_grad ? biases_of(params) : kernels::GroupedMatrix(), needs_bias_grad, needs_scales_grad);
  for (int i = 0; needs_bias_grad && i < num_biases(); ++i)
    ctx.set_param_grad(first_bias() + i, options_.single_grouped_bias ? db : db.select(0, i));
  if (ds.defined()) ctx.set_extra_input_grad(kBiasScales, as_dtype(ds, scales.scalar_type()).view(scales.sizes()));
}

std::optional<kernels::GroupedQuantization> GroupedLinear::backward_quantization(
    const OpContext& ctx, quant::Quantizer quant::Recipe::* other) const {
  const auto* recipe = ctx.plan().recipe;
  if (!recipe || recipe->backward_override == quant::BackwardOverride::high_precision) return {};
  std::optional<kernels::Quantization> dy;
  if (!recipe->backward_override) dy = recipe->grad_output.quantization();
  return kernels::GroupedQuantization{
      .a = dy, .b = (recipe->*other).quantization(), .seed = rounding_seed(ctx.saved(kRecipe))};
}

at::Tensor GroupedLinear::input_gradient_gemm(OpContext& ctx, const at::Tensor& dy, Params params) const {
  if (!ctx.needs_input_grad()) return {};
  auto cast = ctx.saved(kCastWeight);
  const auto w = cast.defined() ? kernels::GroupedMatrix(cast) : weights_of(params, dy.scalar_type(), cast);
  kernels::GroupedEpilogue epilogue{.path = path(), .quantization = backward_quantization(ctx, &quant::Recipe::weight)};
  const auto* given = ctx.buffers();
  if (given && given->grad_input.defined()) {
    GradientsInBuffers::instance().move_out_of(given->grad_input);
    epilogue.out = writable_matrix(given->grad_input, options_.in_features);
  }
  return kernels::grouped_gemm(kernels::GroupIndex(ctx.saved(kSplits)), dy, w, /*transposed=*/false, epilogue);
}

void GroupedLinear::weight_gradient(OpContext& ctx, const at::Tensor& dy, const at::Tensor& x) const {
  if (!needs_weight_grad(ctx)) return;
  ops::weight_gradient(ctx, wgrad(), first_weight(), num_weights(),
                       {.dy = dy,
                        .x = dense_rows(x),
                        .splits = ctx.saved(kSplits),
                        .stacked = options_.single_grouped_weight,
                        .path = path(),
                        .quantization = backward_quantization(ctx, &quant::Recipe::input)});
}

at::Tensor GroupedLinear::differentiate(OpContext& ctx, const at::Tensor& dy, Params params,
                                        const at::Tensor& x) const {
  bias_gradient(ctx, dy, params);
  auto dx = input_gradient_gemm(ctx, dy, params);
  weight_gradient(ctx, dy, x);
  return dx;
}

bool GroupedLinear::backward_dw(Params params) const {
  return delays_wgrad() && ops::backward_dw(wgrad(), params.slice(first_weight(), num_weights()));
}

// ---- forward and backward -----------------------------------------------------------------------------------------

kernels::TierChoice GroupedLinear::kernel(const TierQuery& q) const {
  auto n = options_.out_features, k = options_.in_features;
  if (q.backward) std::swap(n, k);
  return options_.split_path ? kernels::choose_gemm_tier(q.device, q.dtype, n, k)
                             : kernels::choose_grouped_tier(q.device, q.dtype, n, k);
}

Inferred GroupedLinear::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec> extra,
                              c10::ArrayRef<Spec> params) const {
  TORCH_CHECK_VALUE(!x.sizes.empty() && same_size(x.sizes.back(), options_.in_features), "input has shape ", x.sizes,
                    ", expected ", options_.in_features, " features in the last dimension.");
  TORCH_CHECK_VALUE(same_size(extra[kSplitSizes].numel(), options_.num_groups), "expected ", options_.num_groups,
                    " split sizes, one per group, got ", extra[kSplitSizes].numel(), ".");
  TORCH_CHECK_VALUE(!scales_bias() || same_size(extra[kBiasScales].numel(), x.rows()), "bias scales have shape ",
                    extra[kBiasScales].sizes, ", the input has ", x.rows(), " rows; expected one value per row.");
  const auto given = params[first_weight()].dtype, dtype = plan.dtype(given);
  Inferred out{.y = x.with_last(options_.out_features).as(dtype)};
  out.saved.resize(5);
  if (!plan.needs_grad) return out;
  if (plan.needs_param_grad[first_weight()]) out.saved[kInput] = saved_input(x, dtype);
  out.saved[kSplits] = extra[kSplitSizes].as(extra[kSplitSizes].dtype == at::kInt ? at::kInt : at::kLong);
  if (scales_bias()) out.saved[kScales] = extra[kBiasScales];
  if (plan.needs_input_grad && given != dtype)
    out.saved[kCastWeight] = Spec{{options_.num_groups, options_.out_features, options_.in_features}, dtype};
  if (plan.recipe) out.saved[kRecipe] = saved_recipe_spec(*plan.recipe);
  return out;
}

Flops GroupedLinear::flops(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>) const {
  const auto gemm = 2 * x.rows() * options_.in_features * options_.out_features;
  return {.forward = gemm,
          .backward = gemm * (int{plan.needs_input_grad} + int{plan.needs_param_grad[first_weight()] != 0})};
}

at::Tensor GroupedLinear::finish_output(const OpContext& ctx, const at::Tensor& y, const at::Tensor& like) const {
  return restore_output(y, like, ctx.buffers() ? ctx.buffers()->output : at::Tensor());
}

at::Tensor GroupedLinear::finish_input_gradient(const OpContext& ctx, const at::Tensor& dx,
                                                const at::Tensor& like) const {
  const auto buffer = ctx.buffers() ? ctx.buffers()->grad_input : at::Tensor();
  const bool in_buffer = dx.defined() && buffer.defined() && dx.numel() > 0 && dx.is_alias_of(buffer);
  if (in_buffer) return GradientsInBuffers::instance().add(buffer);
  return dx.defined() ? restore_leading_dims(dx, like) : dx;
}

at::Tensor GroupedLinear::forward(OpContext& ctx, const at::Tensor& x, Params params) const {
  auto [y, input] = forward_gemm(ctx, x, params);
  if (needs_weight_grad(ctx)) ctx.save(kInput, input);
  return finish_output(ctx, y, x);
}

at::Tensor GroupedLinear::backward(OpContext& ctx, const at::Tensor& dy, Params params) const {
  return finish_input_gradient(
      ctx, differentiate(ctx, prepare_output_gradient(ctx, dy, params), params, ctx.saved(kInput)), dy);
}

static const Register<GroupedLinear> grouped_linear{
    "GroupedLinear",
    {.summary = "Applies a separate affine transformation to each group of rows: y[g] = x[g] W_gᵀ + b_g.",
     .details =
         "The groups are consecutive rows; the first extra input gives their sizes. With scale_bias, b_g is multiplied "
         "by a factor per row, the second extra input. Rows after the last group are ignored and are 0 in y and dx.",
     .parameters =
         "weight0, weight1 and so on: ``(out_features, in_features)``, initially uniform in ±1/√in_features; with "
         "single_grouped_weight one ``weight`` of shape ``(num_groups, out_features, in_features)``.\n"
         "bias0, bias1 and so on: ``(out_features)``, initially zeros; with single_grouped_bias one ``bias`` of "
         "shape ``(num_groups, out_features)``.",
     .shape = "Input: ``(*, in_features)``.\n"
              "First extra input: ``(num_groups)``, the number of rows of each group, int32 or int64.\n"
              "Second extra input, with scale_bias: one factor per row of the input.\n"
              "Output: ``(*, out_features)``.",
     .example_inputs = "torch.randn(6, 8), torch.tensor([1, 2, 3])",
     .example_shape = "[6, 4]"},
    {.num_groups = 3, .in_features = 8, .out_features = 4, .scale_bias = true}};

}  // namespace weft::ops
