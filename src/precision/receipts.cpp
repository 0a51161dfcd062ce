/// Receipts of AutocastKwargs and of fp8's recipes. A deprecated FP8RecipeKwargs has those of the recipe that it stands
/// for.
//
// settings: AutocastKwargs
// settings: AORecipeKwargs
// settings: TERecipeKwargs
// settings: MSAMPRecipeKwargs

#include "precision/receipts.hpp"

#include "precision/counts.hpp"

namespace accelerate {

static std::string text_of(const Float8LinearConfig& value) { return value.recipe; }

namespace receipts {
namespace {

using Ao = AORecipeKwargs;
using Te = TERecipeKwargs;
using MsAmp = MSAMPRecipeKwargs;

template <auto... Field> Asked given(const Fp8Facts& f) { return asked<&Fp8Facts::given, Field...>(f); }

// ---- autocast

constexpr const char* kAutocast = "with mixed_precision fp16, bf16 or fp8";

Deed autocast_enabled(const AutocastFacts& f) {
  if (f.precision == PrecisionType::NO) return nothing("mixed_precision is no");
  if (!f.given.enabled) return acted("forwards ran without autocast, in the model's own type");
  if (read(PrecisionCount::autocast_regions) == 0) return not_due("no prepared model was called");
  return acted("{} ran under autocast", counted(read(PrecisionCount::autocast_regions), "region", "regions"));
}

Deed autocast_cache_enabled(const AutocastFacts& f) {
  if (!f.given.cache_enabled) return off("unset");
  if (f.precision == PrecisionType::NO || !f.given.enabled) return nothing("there is no autocast");
  if (f.sharded && *f.given.cache_enabled) return nothing("models are sharded, of whose parameters no copies are kept");
  if (read(PrecisionCount::autocast_regions) == 0) return not_due("no prepared model was called");
  return acted("{}: casts of weights are {}", counted(read(PrecisionCount::autocast_regions), "region", "regions"),
               *f.given.cache_enabled ? "kept for the region" : "made anew each time");
}

// ---- fp8

constexpr const char* kTe = "with Transformer Engine's recipe";
constexpr const char* kAo = "with torchao's recipe";

std::optional<Deed> no_products(const Fp8Facts& f, FP8BackendType backend) {
  if (f.precision != PrecisionType::FP8) return nothing("mixed_precision is {}", to_string(f.precision));
  if (f.chosen.backend != backend) return nothing("the recipe is that of {}", to_string(f.chosen.backend));
  if (f.counts.fp8_products == 0) return not_due("no product was computed in fp8");
  return std::nullopt;
}
std::string products(int64_t n) { return counted(n, "product", "products"); }

/// Why a setting about scales from the past has no effect.
std::optional<Deed> no_past(const Fp8Facts& f) {
  if (auto none = no_products(f, FP8BackendType::TE)) return none;
  if (*f.chosen.settings.te.use_mxfp8_block_scaling) return nothing("blocks are scaled by what is in them");
  if (f.counts.updates == 0) return not_due("no scale was worked out");
  return std::nullopt;
}
std::string updates(const Fp8Facts& f) { return counted(f.counts.updates, "update", "updates") + " of scales"; }

Deed margin(const Fp8Facts& f) {
  if (const auto none = no_past(f)) return *none;
  if (*f.chosen.settings.te.margin == 0) return off("{} to the largest values", updates(f));
  return acted("{}, which left out a factor of 2^{}", updates(f), *f.chosen.settings.te.margin);
}
Deed interval(const Fp8Facts& f) {
  if (const auto none = no_past(f)) return *none;
  if (*f.chosen.settings.te.interval == 1) return off("{}, one in each step", updates(f));
  return acted("{}, of which each {}th worked scales out", updates(f), *f.chosen.settings.te.interval);
}
Deed format(const Fp8Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::TE)) return *none;
  return acted("{} of {} numbers", products(f.counts.fp8_products), *f.chosen.settings.te.fp8_format);
}
Deed history(const Fp8Facts& f) {
  if (const auto none = no_past(f)) return *none;
  if (*f.chosen.settings.te.amax_compute_algo == "most_recent") return nothing("amax_compute_algo is most_recent");
  return acted("{} from up to {} steps", updates(f), *f.chosen.settings.te.amax_history_len);
}
Deed algorithm(const Fp8Facts& f) {
  if (const auto none = no_past(f)) return *none;
  return acted("{} by the {} value", updates(f), *f.chosen.settings.te.amax_compute_algo);
}
Deed overrides(const Fp8Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::TE)) {
    // With all three there is none.
    if (f.precision != PrecisionType::FP8 || f.counts.high_products == 0) return *none;
  }
  const auto& [forward, input, weight] = *f.chosen.settings.te.override_linear_precision;
  if (!forward && !input && !weight) return off("all in fp8");
  return acted("in high precision:{}{}{}", forward ? " forward products" : "", input ? " gradients of inputs" : "",
               weight ? " gradients of weights" : "");
}
Deed blocks(const Fp8Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::TE)) return *none;
  if (!*f.chosen.settings.te.use_mxfp8_block_scaling) return off("tensors have one scale");
  return acted("{} of blocks of 32 with a scale each", products(f.counts.fp8_products));
}
Deed during_eval(const Fp8Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::TE)) return *none;
  if (!*f.chosen.settings.te.use_autocast_during_eval) return off("evaluation is in bf16");
  if (const int64_t n = read(PrecisionCount::fp8_evaluations); n > 0)
    return acted("{} of evaluated models", counted(n, "forward", "forwards"));
  return not_due("no model was evaluated");
}

Deed config(const Fp8Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::AO)) return *none;
  return acted("{} by the recipe {}", products(f.counts.fp8_products), f.chosen.settings.ao.config->recipe);
}
Deed filter(const Fp8Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::AO)) return *none;
  if (!f.chosen.settings.ao.module_filter_func) return off("unset: all but the first and the last linear layer");
  return acted("{} in fp8", counted(f.weights, "weight takes part", "weights take part"));
}
Deed pad(const Fp8Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::AO)) return *none;
  if (!*f.chosen.settings.ao.pad_inner_dim) return acted("all inner sizes were multiples of 16; others are errors");
  return off("inner sizes may be any");
}
Deed gather(const Fp8Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::AO)) return *none;
  if (!f.fsdp_version) return nothing("models are not sharded");
  if (*f.fsdp_version != 2) return nothing("fsdp_version is 1");
  if (!*f.chosen.settings.ao.enable_fsdp_float8_all_gather) return acted("weights travelled in bf16");
  if (const int64_t n = f.parts_as_fp8; n > 0)
    return acted("weights of {} travelled in fp8", counted(n, "unit", "units"));
  return nothing("no weight travels: ranks share memory, or there is one of them");
}

Deed level(const Fp8Facts& f) {
  if (const auto none = no_products(f, FP8BackendType::MSAMP)) return *none;
  if (f.run.ranks == 1) return nothing("one process has nobody to send gradients to");
  if (f.bytes_saved == 0) return not_due("no gradient travelled");
  return acted("{} of gradients did not travel{}", bytes(f.bytes_saved),
               *f.chosen.settings.msamp.opt_level == "O2" ? "; optimizer states are as the optimizer has them" : "");
}

constexpr ReceiptRow<AutocastFacts> kAutocastRows[] = {
    {"AutocastKwargs.enabled", nullptr, kAutocast, asked<&AutocastFacts::given, &AutocastKwargs::enabled>,
     autocast_enabled},
    {"AutocastKwargs.cache_enabled", nullptr, kAutocast, asked<&AutocastFacts::given, &AutocastKwargs::cache_enabled>,
     autocast_cache_enabled},
};

constexpr ReceiptRow<Fp8Facts> kFp8Rows[] = {
    {"TERecipeKwargs.use_autocast_during_eval", "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", kTe,
     given<&FP8Settings::te, &Te::use_autocast_during_eval>, during_eval},
    {"TERecipeKwargs.margin", "ACCELERATE_FP8_MARGIN", kTe, given<&FP8Settings::te, &Te::margin>, margin},
    {"TERecipeKwargs.interval", "ACCELERATE_FP8_INTERVAL", kTe, given<&FP8Settings::te, &Te::interval>, interval},
    {"TERecipeKwargs.fp8_format", "ACCELERATE_FP8_FORMAT", kTe, given<&FP8Settings::te, &Te::fp8_format>, format},
    {"TERecipeKwargs.amax_history_len", "ACCELERATE_FP8_AMAX_HISTORY_LEN", kTe,
     given<&FP8Settings::te, &Te::amax_history_len>, history},
    {"TERecipeKwargs.amax_compute_algo", "ACCELERATE_FP8_AMAX_COMPUTE_ALGO", kTe,
     given<&FP8Settings::te, &Te::amax_compute_algo>, algorithm},
    {"TERecipeKwargs.override_linear_precision", nullptr, kTe, given<&FP8Settings::te, &Te::override_linear_precision>,
     overrides},
    {"TERecipeKwargs.use_mxfp8_block_scaling", "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", kTe,
     given<&FP8Settings::te, &Te::use_mxfp8_block_scaling>, blocks},
    {"AORecipeKwargs.config", nullptr, kAo, given<&FP8Settings::ao, &Ao::config>, config},
    {"AORecipeKwargs.module_filter_func", nullptr, kAo,
     [](const Fp8Facts& f) { return asked_for(f.given.ao.module_filter_func); }, filter},
    {"AORecipeKwargs.pad_inner_dim", "ACCELERATE_FP8_PAD_INNER_DIM", kAo, given<&FP8Settings::ao, &Ao::pad_inner_dim>,
     pad},
    {"AORecipeKwargs.enable_fsdp_float8_all_gather", "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", kAo,
     given<&FP8Settings::ao, &Ao::enable_fsdp_float8_all_gather>, gather},
    {"MSAMPRecipeKwargs.opt_level", "ACCELERATE_FP8_OPT_LEVEL", "with MS-AMP's recipe",
     given<&FP8Settings::msamp, &MsAmp::opt_level>, level},
};

}  // namespace

std::vector<Receipt> of_autocast(const AutocastFacts& facts) { return made(kAutocastRows, facts); }
std::vector<Receipt> of_fp8(const Fp8Facts& facts) { return made(kFp8Rows, facts); }

}  // namespace receipts
}  // namespace accelerate
