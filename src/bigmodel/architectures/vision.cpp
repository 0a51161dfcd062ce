#include <numeric>

#include "accelerate/config.hpp"
#include "bigmodel/architectures/architectures.hpp"
#include "bigmodel/architectures/layers.hpp"
#include "utils/raise.hpp"

namespace accelerate::bigmodel {
namespace {

constexpr int64_t kImageClasses = 1000;
constexpr int64_t kReduction = 4;  // how much narrower the middle of a bottleneck is

}  // namespace

OutlinedArchitecture vit(const Config& config, const std::string& family) {
  const int64_t dim = config.size("hidden_size", 768), inner = config.size("intermediate_size", 3072),
                channels = config.size("num_channels", 3);
  const auto [patch_height, patch_width] = config.sides("patch_size", 16);
  const auto [height, width] = config.sides("image_size", 224);
  const int64_t patches = (height / patch_height) * (width / patch_width);
  const auto projection = with_parameters(module("projection", "Conv2d"),
                                          {{"weight", {dim, channels, patch_height, patch_width}}, {"bias", {dim}}});
  const bool bias = config.flag("qkv_bias", true);
  const int64_t heads = config.divisor("num_attention_heads", 12), attended = dim / heads * heads;
  const auto embeddings =
      with_parameters(module("embeddings", family + "Embeddings",
                             {module("patch_embeddings", family + "PatchEmbeddings", {projection})}),
                      {{"cls_token", {1, 1, dim}}, {"position_embeddings", {1, patches + 1, dim}}});
  const auto layer = [&](int64_t) {
    return module("", family + "Layer",
                  {module("attention", family + "Attention",
                          {linear("q_proj", dim, attended, bias), linear("k_proj", dim, attended, bias),
                           linear("v_proj", dim, attended, bias), linear("o_proj", attended, dim)}),
                   layer_norm("layernorm_before", dim), layer_norm("layernorm_after", dim),
                   module("mlp", family + "MLP", {linear("fc1", dim, inner), linear("fc2", inner, dim)})});
  };
  return {
      module("", family + "Model",
             {embeddings, list_of("layers", config.count("num_hidden_layers", 12), layer), layer_norm("layernorm", dim),
              module("pooler", family + "Pooler", {linear("dense", dim, config.size("pooler_output_size", dim))})}),
      {family + "Embeddings", family + "Layer"}};
}

OutlinedArchitecture resnet(const Config& config, const std::string& family) {
  const int64_t stem = config.size("embedding_size", 64);
  const auto widths = config.counts("hidden_sizes", {256, 512, 1024, 2048}),
             depths = config.counts("depths", {3, 4, 6, 3});
  const bool bottleneck = config.text("layer_type", "bottleneck") == "bottleneck",
             early = config.flag("downsample_in_first_stage", false);
  if (widths.size() != depths.size())
    throw CheckpointError(
        "config.json: hidden_sizes and depths have different lengths, expected one number for each stage.");

  constexpr int64_t kMostLayers = 10'000;  // of all stages: a list of some KB could say a hundred million
  if (const auto layers = std::accumulate(depths.begin(), depths.end(), int64_t{0}); layers > kMostLayers)
    raise<CheckpointError>("config.json: depths are {} layers in all, expected at most {}.", layers, kMostLayers);

  const auto convolution = [&](const char* name, int64_t in, int64_t out, int64_t kernel) {
    return module(name, family + "ConvLayer",
                  {conv2d("convolution", in, out, kernel), batch_norm("normalization", out)});
  };
  const auto stage = [&](int64_t index) {
    const auto at = static_cast<size_t>(index);
    const auto layer = [&](int64_t i) {
      const int64_t out = widths[at], in = i > 0 ? out : index > 0 ? widths[at - 1] : stem, middle = out / kReduction;
      const bool strided = i == 0 && (index > 0 || early);
      auto tree = module("", family + (bottleneck ? "BottleNeckLayer" : "BasicLayer"));
      if (in != out || strided)
        tree.children.push_back(module("shortcut", family + "ShortCut",
                                       {conv2d("convolution", in, out, 1), batch_norm("normalization", out)}));
      if (bottleneck)
        tree.children.push_back(module(
            "layer", "Sequential",
            {convolution("0", in, middle, 1), convolution("1", middle, middle, 3), convolution("2", middle, out, 1)}));
      else
        tree.children.push_back(
            module("layer", "Sequential", {convolution("0", in, out, 3), convolution("1", out, out, 3)}));
      return tree;
    };
    return module("", family + "Stage", {list_of("layers", depths[at], layer, "Sequential")});
  };
  return {
      module("", family + "Model",
             {module("embedder", family + "Embeddings",
                     {convolution("embedder", config.size("num_channels", 3), stem, 7)}),
              module("encoder", family + "Encoder", {list_of("stages", static_cast<int64_t>(widths.size()), stage)})}),
      {family + "ConvLayer", family + "ShortCut"}};
}

OutlinedArchitecture timm_resnet(const Config& config, const std::string& family) {
  struct Size {
    const char* name;
    bool bottleneck;
    std::vector<int64_t> depths;
  };
  const std::vector<Size> sizes = {{"resnet18", false, {2, 2, 2, 2}},
                                   {"resnet34", false, {3, 4, 6, 3}},
                                   {"resnet50", true, {3, 4, 6, 3}},
                                   {"resnet101", true, {3, 4, 23, 3}},
                                   {"resnet152", true, {3, 8, 36, 3}}};
  constexpr int64_t kStem = 64;
  const Size* size = nullptr;
  for (const auto& candidate : sizes)
    if (candidate.name == family) size = &candidate;
  if (!size) raise<InternalError>("timm_resnet: '{}' is in no table.", family);
  const int64_t expansion = size->bottleneck ? kReduction : 1;
  std::vector<ModuleTree> parts = {conv2d("conv1", config.size("in_chans", 3), kStem, 7), batch_norm("bn1", kStem)};
  int64_t in = kStem;
  for (size_t stage = 0; stage < size->depths.size(); ++stage) {
    const int64_t width = kStem << stage, out = width * expansion;
    parts.push_back(list_of(
        "layer" + std::to_string(stage + 1), size->depths[stage],
        [&](int64_t i) {
          auto block = module("", size->bottleneck ? "Bottleneck" : "BasicBlock");
          if (size->bottleneck)
            block.children = {conv2d("conv1", in, width, 1),    batch_norm("bn1", width),
                              conv2d("conv2", width, width, 3), batch_norm("bn2", width),
                              conv2d("conv3", width, out, 1),   batch_norm("bn3", out)};
          else
            block.children = {conv2d("conv1", in, width, 3), batch_norm("bn1", width), conv2d("conv2", width, width, 3),
                              batch_norm("bn2", width)};
          if (i == 0 && (in != out || stage > 0))
            block.children.push_back(
                module("downsample", "Sequential", {conv2d("0", in, out, 1), batch_norm("1", out)}));
          in = out;
          return block;
        },
        "Sequential"));
  }
  parts.push_back(linear("fc", in, config.size("num_classes", kImageClasses)));
  return {module("", "ResNet", std::move(parts)), {}};
}

}  // namespace accelerate::bigmodel
