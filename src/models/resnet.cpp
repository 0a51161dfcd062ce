#include <torch/torch.h>

#include "models/activations.hpp"
#include "models/architecture.hpp"
#include "models/images.hpp"
#include "models/layers.hpp"
#include "utils/raise.hpp"

// ResNet. Source: arXiv:1512.03385; the architecture as transformers has it. Registered names are Hugging Face's; they
// make the parameter names of the files. Shapes: B images, C channels.

namespace accelerate::models {
namespace {

using namespace detail;
using torch::Tensor;

struct ResNetConfig {
  explicit ResNetConfig(const JsonFile& file)
      : channels(file.size("num_channels", 3)),
        embedding_size(file.size("embedding_size", 64)),
        labels(count_labels(file)),
        hidden_sizes(file.sizes("hidden_sizes", {256, 512, 1024, 2048})),
        depths(file.sizes("depths", {3, 4, 6, 3})),
        bottleneck(file.get("layer_type", "bottleneck") == "bottleneck"),
        downsample_in_first_stage(file.get("downsample_in_first_stage", false)),
        downsample_in_bottleneck(file.get("downsample_in_bottleneck", false)),
        activation(read_activation(file, "hidden_act", "relu")) {
    const auto type = file.get("layer_type", "bottleneck");
    if (type != "bottleneck" && type != "basic") file.fail("layer_type", type, "bottleneck or basic");
    int64_t layers = 0;
    for (const auto depth : depths)
      if (depth > kMostLayers || (layers += depth) > kMostLayers)
        file.fail("depths", depths, fmt::format("at most {} layers", kMostLayers));
    if (depths.size() != hidden_sizes.size())
      file.fail("depths", depths, fmt::format("as many numbers as hidden_sizes has, {}", hidden_sizes.size()));
  }

  int64_t channels, embedding_size, labels;
  std::vector<int64_t> hidden_sizes, depths;  ///< of each stage
  bool bottleneck, downsample_in_first_stage, downsample_in_bottleneck;
  Activation activation;
};

/// Convolution, batch norm and perhaps an activation.
class ResNetConvLayer : public torch::nn::Cloneable<ResNetConvLayer>, public NoSplit {
 public:
  struct Options {
    int64_t inputs, outputs, kernel = 3, stride = 1;
    Activation activation = nullptr;  ///< Null: none.
  };
  explicit ResNetConvLayer(const Options& options, const char* class_name = "ResNetConvLayer")
      : Cloneable(class_name), options_(options) {
    reset();
  }

  void reset() override {
    convolution_ = register_module(
        "convolution", torch::nn::Conv2d(torch::nn::Conv2dOptions(options_.inputs, options_.outputs, options_.kernel)
                                             .stride(options_.stride)
                                             .padding(options_.kernel / 2)
                                             .bias(false)));
    normalization_ = register_module("normalization", torch::nn::BatchNorm2d(options_.outputs));
  }
  Tensor forward(const Tensor& x) {
    const auto normal = normalization_(convolution_(x));
    return options_.activation ? options_.activation(normal) : normal;
  }

 private:
  Options options_;
  torch::nn::Conv2d convolution_ = nullptr;
  torch::nn::BatchNorm2d normalization_ = nullptr;
};

/// A residual branch of two convolutions of 3 x 3, or of three of which those of 1 x 1 make the middle one cheaper.
class ResNetBlock : public torch::nn::Cloneable<ResNetBlock> {
 public:
  ResNetBlock(const ResNetConfig& config, int64_t inputs, int64_t outputs, int64_t stride)
      : Cloneable(config.bottleneck ? "ResNetBottleNeckLayer" : "ResNetBasicLayer"),
        config_(config),
        inputs_(inputs),
        outputs_(outputs),
        stride_(stride) {
    reset();
  }

  void reset() override {
    if (inputs_ != outputs_ || stride_ != 1)
      shortcut_ = register_module(
          "shortcut",
          std::make_shared<ResNetConvLayer>(
              ResNetConvLayer::Options{.inputs = inputs_, .outputs = outputs_, .kernel = 1, .stride = stride_},
              "ResNetShortCut"));
    layer_ = register_module("layer", torch::nn::ModuleList());
    const auto add = [&](const ResNetConvLayer::Options& options) {
      layer_->push_back(std::make_shared<ResNetConvLayer>(options));
    };
    if (config_.bottleneck) {
      const int64_t reduced = outputs_ / 4, first = config_.downsample_in_bottleneck ? stride_ : 1;
      add({.inputs = inputs_, .outputs = reduced, .kernel = 1, .stride = first, .activation = inner_activation});
      add({.inputs = reduced, .outputs = reduced, .stride = stride_ / first, .activation = inner_activation});
      add({.inputs = reduced, .outputs = outputs_, .kernel = 1});
    } else {
      add({.inputs = inputs_, .outputs = outputs_, .stride = stride_, .activation = inner_activation});
      add({.inputs = outputs_, .outputs = outputs_});
    }
  }

  Tensor forward(const Tensor& x) {
    auto branch = x;
    for (const auto& layer : *layer_) branch = layer->as<ResNetConvLayer>()->forward(branch);
    return config_.activation(branch + (shortcut_ ? shortcut_->forward(x) : x));
  }

 private:
  static Tensor inner_activation(const Tensor& x) {
    return torch::relu(x);
  }  // whatever hidden_act is, as in transformers

  ResNetConfig config_;
  int64_t inputs_, outputs_, stride_;
  std::shared_ptr<ResNetConvLayer> shortcut_;
  torch::nn::ModuleList layer_ = nullptr;
};

class ResNetStage : public torch::nn::Cloneable<ResNetStage> {
 public:
  ResNetStage(const ResNetConfig& config, size_t stage) : config_(config), stage_(stage) { reset(); }

  void reset() override {
    const int64_t inputs = stage_ == 0 ? config_.embedding_size : config_.hidden_sizes[stage_ - 1],
                  outputs = config_.hidden_sizes[stage_];
    const int64_t stride = stage_ > 0 || config_.downsample_in_first_stage ? 2 : 1;
    layers_ = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < config_.depths[stage_]; ++i)
      layers_->push_back(std::make_shared<ResNetBlock>(config_, i ? outputs : inputs, outputs, i ? 1 : stride));
  }
  Tensor forward(Tensor x) {
    for (const auto& layer : *layers_) x = layer->as<ResNetBlock>()->forward(x);
    return x;
  }

 private:
  ResNetConfig config_;
  size_t stage_;
  torch::nn::ModuleList layers_ = nullptr;
};

class ResNetEmbeddings : public torch::nn::Cloneable<ResNetEmbeddings> {
 public:
  explicit ResNetEmbeddings(const ResNetConfig& config) : config_(config) { reset(); }

  void reset() override {
    embedder_ = register_module(
        "embedder", std::make_shared<ResNetConvLayer>(ResNetConvLayer::Options{.inputs = config_.channels,
                                                                               .outputs = config_.embedding_size,
                                                                               .kernel = 7,
                                                                               .stride = 2,
                                                                               .activation = config_.activation}));
  }
  Tensor forward(const Tensor& pixel_values) { return torch::max_pool2d(embedder_->forward(pixel_values), 3, 2, 1); }

 private:
  ResNetConfig config_;
  std::shared_ptr<ResNetConvLayer> embedder_;
};

class ResNetEncoder : public torch::nn::Cloneable<ResNetEncoder> {
 public:
  explicit ResNetEncoder(const ResNetConfig& config) : config_(config) { reset(); }

  void reset() override {
    stages_ = register_module("stages", torch::nn::ModuleList());
    for (size_t i = 0; i < config_.hidden_sizes.size(); ++i)
      stages_->push_back(std::make_shared<ResNetStage>(config_, i));
  }
  Tensor forward(Tensor x) {
    for (const auto& stage : *stages_) x = stage->as<ResNetStage>()->forward(x);
    return x;
  }

 private:
  ResNetConfig config_;
  torch::nn::ModuleList stages_ = nullptr;
};

class ResNetModel : public torch::nn::Cloneable<ResNetModel> {
 public:
  explicit ResNetModel(const ResNetConfig& config) : config_(config) { reset(); }

  void reset() override {
    embedder_ = register_module("embedder", std::make_shared<ResNetEmbeddings>(config_));
    encoder_ = register_module("encoder", std::make_shared<ResNetEncoder>(config_));
  }

  /// [B, C, height, width] -> [B, last hidden size]
  Tensor forward(const Tensor& pixel_values) {
    check_images("ResNetModel", pixel_values, config_.channels);
    return encoder_->forward(embedder_->forward(pixel_values)).mean({2, 3});
  }

 private:
  ResNetConfig config_;
  std::shared_ptr<ResNetEmbeddings> embedder_;
  std::shared_ptr<ResNetEncoder> encoder_;
};

class ResNetForImageClassification : public torch::nn::Cloneable<ResNetForImageClassification> {
 public:
  explicit ResNetForImageClassification(const ResNetConfig& config) : config_(config) { reset(); }

  void reset() override {
    resnet_ = register_module("resnet", std::make_shared<ResNetModel>(config_));
    // The file's names count a layer without parameters before it.
    classifier_ = register_module(
        "classifier", torch::nn::ModuleList(torch::nn::Flatten(),
                                            std::make_shared<Dense>(config_.hidden_sizes.back(), config_.labels)));
  }
  Tensor forward(const Tensor& pixel_values) {
    return classifier_->ptr<Dense>(1)->forward(resnet_->forward(pixel_values));
  }

 private:
  ResNetConfig config_;
  std::shared_ptr<ResNetModel> resnet_;
  torch::nn::ModuleList classifier_ = nullptr;
};

}  // namespace

Architecture build_resnet(const std::filesystem::path& path, const std::string&) {
  const auto model = std::make_shared<ResNetForImageClassification>(ResNetConfig{JsonFile(path)});
  return {.module = model,
          .rules = {.names = formats::weight_names_of_type("resnet"), .head_prefixes = {"classifier."}},
          .initialize = initialize_convolutional,
          .forward = image_forward(model)};
}

}  // namespace accelerate::models
