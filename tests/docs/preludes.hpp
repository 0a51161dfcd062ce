// clang-format off
// This file is made of statements outside of functions, hence the line above.
// The manual's code leaves these parts to its reader. Those that begin with `//: NAME` stand before a block in
// its function, those with `file` behind the name outside of it, `after OTHER` those that need another part first.
// snippets.py puts them there.

//: data file
struct MyDataset : torch::data::Dataset<MyDataset> {
  torch::Tensor x = torch::randn({64, 20}), y = (x.sum(1) > 0).to(torch::kLong);
  torch::data::Example<> get(size_t i) override { return {x[static_cast<int64_t>(i)], y[static_cast<int64_t>(i)]}; }
  std::optional<size_t> size() const override { return 64; }
};

//: objects after data
auto model = torch::nn::Sequential(torch::nn::Linear(20, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2));
auto optimizer = torch::optim::AdamW(model->parameters(), 5e-3);
auto loader = accelerate::data::DataLoader(MyDataset(), {.batch_size = 16, .shuffle = true});

//: prepared after objects
accelerate::Accelerator accelerator;
auto [m, opt, dl] = accelerator.prepare(model, optimizer, loader);

//: train_function file
inline void train() { accelerate::Accelerator accelerator; }

//: my_model file
struct MyModelImpl : torch::nn::Module {
  explicit MyModelImpl(int64_t width) : inner(register_module("inner", torch::nn::Linear(20, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return inner->forward(x).relu(); }
  torch::nn::Linear inner;
};
TORCH_MODULE(MyModel);

//: my_model
const int64_t options = 64;

//: plugin
const accelerate::FullyShardedDataParallelPlugin plugin{.fsdp_version = 2};

//: big file
struct BigModelImpl : torch::nn::Module {
  explicit BigModelImpl(int64_t width) : inner(register_module("inner", torch::nn::Linear(width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return inner->forward(x); }
  torch::nn::Linear inner;
};
TORCH_MODULE(BigModel);

//: big
const int64_t options = 32;
const auto input = torch::randn({1, 32});
{
  const BigModel trained(options);
  std::filesystem::create_directories("folder");
  accelerate::save_safetensors("folder/model.safetensors",
                               accelerate::checkpointing::state_dict(accelerate::ModelRef(trained.ptr())));
}

//: blocks file
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) : inner(register_module("inner", torch::nn::Linear(width, width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return x + inner->forward(x).tanh(); }
  torch::nn::Linear inner;
};
TORCH_MODULE(Block);
struct BlocksImpl : torch::nn::Module {
  BlocksImpl(int64_t depth, int64_t width) {
    for (int64_t i = 0; i < depth; ++i) blocks->push_back(Block(width));
    register_module("blocks", blocks);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return x;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Blocks);

//: sharded
accelerate::Accelerator accelerator({.fsdp_plugin = accelerate::FullyShardedDataParallelPlugin{.fsdp_version = 2}});
auto model = torch::nn::Sequential(torch::nn::Linear(20, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2));
auto m = accelerator.prepare(model);

//: deepspeed
accelerate::Accelerator accelerator({.deepspeed_plugin = accelerate::DeepSpeedPlugin{
    .hf_ds_config = R"({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}})"}});
auto model = torch::nn::Sequential(torch::nn::Linear(20, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2));
auto [m, optimizer] = accelerator.prepare(model, torch::optim::AdamW(model->parameters()));
accelerator.backward(m(torch::randn({4, 20})).square().mean());
optimizer.step();

//: gpt2
namespace models = accelerate::models;
models::GPT2Config config;
config.vocab_size = 64, config.n_embd = 32, config.n_layer = 4, config.n_head = 2, config.n_positions = 16;
const auto ids = torch::randint(0, 64, {8, 16}), example_ids = ids.narrow(0, 0, 1);

//: tiny_llama
const std::filesystem::path folder = "tiny";
{
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json")
      << R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
             "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": true})";
  const auto made = accelerate::models::AutoModelForCausalLM::from_config(folder);
  accelerate::save_safetensors(folder / "model.safetensors",
                               accelerate::checkpointing::state_dict(accelerate::ModelRef(made.module())));
}

//: scheduled after objects
accelerate::Accelerator accelerator;
auto scheduler = accelerate::optim::constant_schedule_with_warmup(optimizer, 10);

//: script_module
{
  torch::jit::Module made("Scale");
  made.register_parameter("weight", torch::ones({4}).requires_grad_(), /*is_buffer=*/false);
  made.define("def forward(self, x):\n    return x * self.weight\n");
  made.save("model.pt");
}
