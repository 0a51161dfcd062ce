
#include <torch/torch.h>

#include "models/activations.hpp"
#include "models/architecture.hpp"
#include "models/attention.hpp"
#include "models/images.hpp"
#include "models/layers.hpp"
#include "utils/raise.hpp"

// ViT. Source: arXiv:2010.11929; the architecture as transformers has it. Registered names are those of the Hub's
// files. Shapes: B images, C channels, T patches and the class token before them, D hidden_size.

namespace accelerate::models {
namespace {

using namespace detail;
using torch::Tensor;

/// A size that is given as one number or as [height, width].
std::vector<int64_t> read_area(const JsonFile& file, const char* key, int64_t fallback) {
  const auto found = file.root().find(key);
  if (found == file.root().end() || !found->is_array()) return std::vector<int64_t>(2, file.size(key, fallback));
  auto area = file.sizes(key, {});
  if (area.size() != 2) file.fail(key, *found, "a number or [height, width]");
  return area;
}

struct ViTConfig {
  explicit ViTConfig(const JsonFile& file)
      : hidden_size(file.size("hidden_size", 768)),
        layers(file.size("num_hidden_layers", 12)),
        heads(file.divisor("num_attention_heads", 12, "hidden_size", hidden_size)),
        intermediate_size(file.size("intermediate_size", 3072)),
        channels(file.size("num_channels", 3)),
        labels(count_labels(file)),
        image(read_area(file, "image_size", 224)),
        patch(read_area(file, "patch_size", 16)),
        qkv_bias(file.get("qkv_bias", true)),
        activation(read_activation(file, "hidden_act", "gelu")),
        dropout(file.probability("hidden_dropout_prob", 0)),
        attention_dropout(file.probability("attention_probs_dropout_prob", 0)),
        norm_epsilon(file.get("layer_norm_eps", 1e-12)),
        deviation(file.get("initializer_range", 0.02)) {}

  int64_t hidden_size, layers, heads, intermediate_size, channels, labels;
  std::vector<int64_t> image, patch;  ///< height, width
  bool qkv_bias;
  Activation activation;
  double dropout, attention_dropout, norm_epsilon, deviation;

  int64_t tokens() const { return (image[0] / patch[0]) * (image[1] / patch[1]) + 1; }
  torch::nn::LayerNorm norm() const { return make_layer_norm(hidden_size, norm_epsilon); }
};

class ViTPatchEmbeddings : public torch::nn::Cloneable<ViTPatchEmbeddings> {
 public:
  explicit ViTPatchEmbeddings(const ViTConfig& config) : config_(config) { reset(); }

  void reset() override {
    projection_ =
        register_module("projection", torch::nn::Conv2d(torch::nn::Conv2dOptions(config_.channels, config_.hidden_size,
                                                                                 {config_.patch[0], config_.patch[1]})
                                                            .stride({config_.patch[0], config_.patch[1]})));
  }
  Tensor forward(const Tensor& pixel_values) { return projection_(pixel_values).flatten(2).transpose(1, 2); }

 private:
  ViTConfig config_;
  torch::nn::Conv2d projection_ = nullptr;
};

/// [B, C, height, width] -> [B, T, D]
class ViTEmbeddings : public torch::nn::Cloneable<ViTEmbeddings>, public NoSplit {
 public:
  explicit ViTEmbeddings(const ViTConfig& config) : config_(config) { reset(); }

  void reset() override {
    cls_token_ = register_parameter("cls_token", torch::empty({1, 1, config_.hidden_size}));
    position_embeddings_ =
        register_parameter("position_embeddings", torch::empty({1, config_.tokens(), config_.hidden_size}));
    patch_embeddings_ = register_module("patch_embeddings", std::make_shared<ViTPatchEmbeddings>(config_));
  }

  Tensor forward(const Tensor& pixel_values) {
    const auto tokens =
        torch::cat({cls_token_.expand({pixel_values.size(0), -1, -1}), patch_embeddings_->forward(pixel_values)}, 1);
    return torch::dropout(tokens + position_embeddings_, config_.dropout, is_training());
  }

 private:
  ViTConfig config_;
  Tensor cls_token_, position_embeddings_;
  std::shared_ptr<ViTPatchEmbeddings> patch_embeddings_;
};

class ViTSelfAttention : public torch::nn::Cloneable<ViTSelfAttention> {
 public:
  explicit ViTSelfAttention(const ViTConfig& config) : config_(config) { reset(); }

  void reset() override {
    const auto projection = [&](const char* name) {
      return register_module(name, std::make_shared<Dense>(config_.hidden_size, config_.hidden_size, config_.qkv_bias));
    };
    query_ = projection("query");
    key_ = projection("key");
    value_ = projection("value");
  }

  Tensor forward(const Tensor& hidden) {
    const auto heads = [&](const Tensor& x) { return split_heads(x, config_.hidden_size / config_.heads); };
    return attend(heads(query_->forward(hidden)), heads(key_->forward(hidden)), heads(value_->forward(hidden)), {},
                  {.dropout = is_training() ? config_.attention_dropout : 0.0});
  }

 private:
  ViTConfig config_;
  std::shared_ptr<Dense> query_, key_, value_;
};

/// The file's names have a level more than there is to do: "output.dense".
class ViTOutput : public torch::nn::Cloneable<ViTOutput> {
 public:
  ViTOutput(std::string class_name, int64_t inputs, int64_t outputs)
      : Cloneable(std::move(class_name)), inputs_(inputs), outputs_(outputs) {
    reset();
  }
  void reset() override { dense_ = register_module("dense", std::make_shared<Dense>(inputs_, outputs_)); }
  Tensor forward(const Tensor& hidden) { return dense_->forward(hidden); }

 private:
  int64_t inputs_, outputs_;
  std::shared_ptr<Dense> dense_;
};

class ViTAttention : public torch::nn::Cloneable<ViTAttention> {
 public:
  explicit ViTAttention(const ViTConfig& config) : config_(config) { reset(); }

  void reset() override {
    attention_ = register_module("attention", std::make_shared<ViTSelfAttention>(config_));
    output_ = register_module("output",
                              std::make_shared<ViTOutput>("ViTSelfOutput", config_.hidden_size, config_.hidden_size));
  }
  Tensor forward(const Tensor& hidden) { return output_->forward(attention_->forward(hidden)); }

 private:
  ViTConfig config_;
  std::shared_ptr<ViTSelfAttention> attention_;
  std::shared_ptr<ViTOutput> output_;
};

class ViTLayer : public torch::nn::Cloneable<ViTLayer>, public NoSplit {
 public:
  explicit ViTLayer(const ViTConfig& config) : config_(config) { reset(); }

  void reset() override {
    attention_ = register_module("attention", std::make_shared<ViTAttention>(config_));
    intermediate_ = register_module(
        "intermediate", std::make_shared<ViTOutput>("ViTIntermediate", config_.hidden_size, config_.intermediate_size));
    output_ = register_module("output",
                              std::make_shared<ViTOutput>("ViTOutput", config_.intermediate_size, config_.hidden_size));
    layernorm_before_ = register_module("layernorm_before", config_.norm());
    layernorm_after_ = register_module("layernorm_after", config_.norm());
  }

  Tensor forward(const Tensor& hidden) {
    const auto dropped = [&](const Tensor& x) { return torch::dropout(x, config_.dropout, is_training()); };
    const auto attended = hidden + dropped(attention_->forward(layernorm_before_(hidden)));
    return attended + dropped(output_->forward(config_.activation(intermediate_->forward(layernorm_after_(attended)))));
  }

 private:
  ViTConfig config_;
  std::shared_ptr<ViTAttention> attention_;
  std::shared_ptr<ViTOutput> intermediate_, output_;
  torch::nn::LayerNorm layernorm_before_ = nullptr, layernorm_after_ = nullptr;
};

class ViTEncoder : public torch::nn::Cloneable<ViTEncoder> {
 public:
  explicit ViTEncoder(const ViTConfig& config) : config_(config) { reset(); }

  void reset() override {
    layer_ = register_module("layer", torch::nn::ModuleList());
    for (int64_t i = 0; i < config_.layers; ++i) layer_->push_back(std::make_shared<ViTLayer>(config_));
  }
  Tensor forward(Tensor hidden) {
    for (const auto& layer : *layer_) hidden = layer->as<ViTLayer>()->forward(hidden);
    return hidden;
  }

 private:
  ViTConfig config_;
  torch::nn::ModuleList layer_ = nullptr;
};

class ViTModel : public torch::nn::Cloneable<ViTModel> {
 public:
  explicit ViTModel(const ViTConfig& config) : config_(config) { reset(); }

  void reset() override {
    embeddings_ = register_module("embeddings", std::make_shared<ViTEmbeddings>(config_));
    encoder_ = register_module("encoder", std::make_shared<ViTEncoder>(config_));
    layernorm_ = register_module("layernorm", config_.norm());
  }

  Tensor forward(const Tensor& pixel_values) {
    if (pixel_values.dim() != 4 || pixel_values.size(1) != config_.channels ||
        pixel_values.size(2) != config_.image[0] || pixel_values.size(3) != config_.image[1]) {
      raise<ShapeError>(
          "ViTModel::forward: pixel_values has shape {}, expected [B, {}, {}, {}]. Resize images to the size that the "
          "model was trained with.",
          pixel_values.sizes(), config_.channels, config_.image[0], config_.image[1]);
    }
    return layernorm_(encoder_->forward(embeddings_->forward(pixel_values)));
  }

 private:
  ViTConfig config_;
  std::shared_ptr<ViTEmbeddings> embeddings_;
  std::shared_ptr<ViTEncoder> encoder_;
  torch::nn::LayerNorm layernorm_ = nullptr;
};

class ViTForImageClassification : public torch::nn::Cloneable<ViTForImageClassification> {
 public:
  explicit ViTForImageClassification(const ViTConfig& config) : config_(config) { reset(); }

  void reset() override {
    vit_ = register_module("vit", std::make_shared<ViTModel>(config_));
    classifier_ = register_module("classifier", std::make_shared<Dense>(config_.hidden_size, config_.labels));
  }
  Tensor forward(const Tensor& pixel_values) { return classifier_->forward(vit_->forward(pixel_values).select(1, 0)); }

 private:
  ViTConfig config_;
  std::shared_ptr<ViTModel> vit_;
  std::shared_ptr<Dense> classifier_;
};

}  // namespace

Architecture build_vit(const std::filesystem::path& path, const std::string&) {
  const ViTConfig config{JsonFile(path)};
  const auto model = std::make_shared<ViTForImageClassification>(config);
  return {.module = model,
          .rules = {.names = formats::weight_names_of_type("vit"),
                    .head_prefixes = {"classifier."},
                    .ignored_suffixes = {"pooler.dense.weight", "pooler.dense.bias"}},
          .initialize = initialize_normal(config.deviation),
          .forward = image_forward(model)};
}

}  // namespace accelerate::models
