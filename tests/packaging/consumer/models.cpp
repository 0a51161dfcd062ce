// Ready models are a library of their own.
#include <accelerate/models/bert.hpp>

#include <cstdio>

int main() {
  accelerate::models::BertConfig config;
  config.vocab_size = 10;
  config.hidden_size = 8;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 2;
  config.intermediate_size = 16;
  int64_t count = 0;
  for (const auto& parameter : accelerate::models::BertModel(config)->parameters()) count += parameter.numel();
  std::printf("parameters %lld\n", static_cast<long long>(count));
}
