/// Receipts of fp8's recipes. A deprecated FP8RecipeKwargs has those of the recipe that it stands for.

#include "accelerator/receipts.hpp"

namespace accelerate::receipts {
namespace {

using Ao = AORecipeKwargs;
using Te = TERecipeKwargs;
using MsAmp = MSAMPRecipeKwargs;

constexpr const char* kTe = "with Transformer Engine's recipe";
constexpr const char* kAo = "with torchao's recipe";

std::optional<Deed> no_products(const Facts& f, FP8BackendType backend) {
  if (f.precision != PrecisionType::FP8) return nothing("mixed_precision is {}", to_string(f.precision));
  if (f.fp8.backend != backend) return nothing("the recipe is that of {}", to_string(f.fp8.backend));
  if (f.fp8_counts.fp8_products == 0) return not_due("no product was computed in fp8");
  return std::nullopt;
}
std::string products(int64_t n) { return counted(n, "product", "products"); }

/// Of a setting that is about scales from the past.
std::optional<Deed> no_past(const Facts& f) {
  if (auto none = no_products(f, FP8BackendType::TE)) return none;
  if (*f.fp8.te.use_mxfp8_block_scaling) return nothing("blocks are scaled by what is in them");
  if (f.fp8_counts.updates == 0) return not_due("no scale was worked out");
  return std::nullopt;
}
std::string updates(const Facts& f) { return counted(f.fp8_counts.updates, "update", "updates") + " of scales"; }

Deed margin(const Facts& f) {
  if (const auto none = no_past(f)) return *none;
  if (*f.fp8.te.margin == 0) return off("{} to the largest values", updates(f));
  return acted("{}, which left out a factor of 2^{}", updates(f), *f.fp8.te.margin);
}
Deed interval(const Facts& f) {
  if (const auto none = no_past(f)) return *none;
  if (*f.fp8.te.interval == 1) return off("{}, one in each step", updates(f));
  return acted("{}, of which each {}th worked scales out", updates(f), *f.fp8.te.interval);
}
Deed format(const Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::TE)) return *none;
  return acted("{} of {} numbers", products(f.fp8_counts.fp8_products), *f.fp8.te.fp8_format);
}
Deed history(const Facts& f) {
  if (const auto none = no_past(f)) return *none;
  if (*f.fp8.te.amax_compute_algo == "most_recent") return nothing("amax_compute_algo is most_recent");
  return acted("{} from up to {} steps", updates(f), *f.fp8.te.amax_history_len);
}
Deed algorithm(const Facts& f) {
  if (const auto none = no_past(f)) return *none;
  return acted("{} by the {} value", updates(f), *f.fp8.te.amax_compute_algo);
}
Deed overrides(const Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::TE)) {
    // With all three there is none.
    if (f.precision != PrecisionType::FP8 || f.fp8_counts.high_products == 0) return *none;
  }
  const auto& [forward, input, weight] = *f.fp8.te.override_linear_precision;
  if (!forward && !input && !weight) return off("all in fp8");
  return acted("in high precision:{}{}{}", forward ? " forward products" : "", input ? " gradients of inputs" : "",
               weight ? " gradients of weights" : "");
}
Deed blocks(const Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::TE)) return *none;
  if (!*f.fp8.te.use_mxfp8_block_scaling) return off("tensors have one scale");
  return acted("{} of blocks of 32 with a scale each", products(f.fp8_counts.fp8_products));
}
Deed during_eval(const Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::TE)) return *none;
  if (!*f.fp8.te.use_autocast_during_eval) return off("evaluation is in bf16");
  if (const int64_t n = f[Count::fp8_evaluations]; n > 0)
    return acted("{} of evaluated models", counted(n, "forward", "forwards"));
  return not_due("no model was evaluated");
}

Deed config(const Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::AO)) return *none;
  return acted("{} by the recipe {}", products(f.fp8_counts.fp8_products), f.fp8.ao.config->recipe);
}
Deed filter(const Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::AO)) return *none;
  if (!f.fp8.ao.module_filter_func) return off("unset: all but the first and the last linear layer");
  return acted("{} in fp8", counted(f.fp8_weights, "weight takes part", "weights take part"));
}
Deed pad(const Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::AO)) return *none;
  if (!*f.fp8.ao.pad_inner_dim) return acted("all inner sizes were multiples of 16; others are errors");
  return off("inner sizes may be any");
}
Deed gather(const Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::AO)) return *none;
  if (!f.sharding) return nothing("models are not sharded");
  if (f.sharding->fsdp_version != 2) return nothing("fsdp_version is 1");
  if (!*f.fp8.ao.enable_fsdp_float8_all_gather) return acted("weights travelled in bf16");
  if (const int64_t n = f[Count::parts_as_fp8]; n > 0)
    return acted("weights of {} travelled in fp8", counted(n, "unit", "units"));
  return nothing("no weight travels: ranks share memory, or there is one of them");
}

Deed level(const Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::MSAMP)) return *none;
  if (f.ranks == 1) return nothing("one process has nobody to send gradients to");
  if (f[Count::bytes_saved] == 0) return not_due("no gradient travelled");
  return acted("{} of gradients did not travel{}", bytes(f[Count::bytes_saved]),
               *f.fp8.msamp.opt_level == "O2" ? "; optimizer states are as the optimizer has them" : "");
}

}  // namespace

std::vector<Row> rows_of_fp8() {
  return {
      {"TERecipeKwargs.use_autocast_during_eval", "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", kTe,
       asked<&Facts::te, &Te::use_autocast_during_eval>, during_eval},
      {"TERecipeKwargs.margin", "ACCELERATE_FP8_MARGIN", kTe, asked<&Facts::te, &Te::margin>, margin},
      {"TERecipeKwargs.interval", "ACCELERATE_FP8_INTERVAL", kTe, asked<&Facts::te, &Te::interval>, interval},
      {"TERecipeKwargs.fp8_format", "ACCELERATE_FP8_FORMAT", kTe, asked<&Facts::te, &Te::fp8_format>, format},
      {"TERecipeKwargs.amax_history_len", "ACCELERATE_FP8_AMAX_HISTORY_LEN", kTe,
       asked<&Facts::te, &Te::amax_history_len>, history},
      {"TERecipeKwargs.amax_compute_algo", "ACCELERATE_FP8_AMAX_COMPUTE_ALGO", kTe,
       asked<&Facts::te, &Te::amax_compute_algo>, algorithm},
      {"TERecipeKwargs.override_linear_precision", nullptr, kTe, asked<&Facts::te, &Te::override_linear_precision>,
       overrides},
      {"TERecipeKwargs.use_mxfp8_block_scaling", "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", kTe,
       asked<&Facts::te, &Te::use_mxfp8_block_scaling>, blocks},
      {"AORecipeKwargs.config", nullptr, kAo, asked<&Facts::ao, &Ao::config>, config},
      {"AORecipeKwargs.module_filter_func", nullptr, kAo,
       [](const Facts& f) {
         return Asked{f.ao.module_filter_func != nullptr, f.ao.module_filter_func ? "set" : "unset"};
       },
       filter},
      {"AORecipeKwargs.pad_inner_dim", "ACCELERATE_FP8_PAD_INNER_DIM", kAo, asked<&Facts::ao, &Ao::pad_inner_dim>, pad},
      {"AORecipeKwargs.enable_fsdp_float8_all_gather", "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", kAo,
       asked<&Facts::ao, &Ao::enable_fsdp_float8_all_gather>, gather},
      {"MSAMPRecipeKwargs.opt_level", "ACCELERATE_FP8_OPT_LEVEL", "with MS-AMP's recipe",
       asked<&Facts::msamp, &MsAmp::opt_level>, level},
  };
}

}  // namespace accelerate::receipts
