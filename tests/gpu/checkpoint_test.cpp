/// Checkpoints know no devices: written on one, they are read on the other.
#include <accelerate/accelerate.hpp>

#include "gpu.hpp"
#include "scratch.hpp"

namespace gpu_test {
namespace {

using namespace accelerate;

class GpuCheckpoint : public GpuTest {};

/// A run on one device: `steps` losses from where it stands.
struct TrainingRun {
  explicit TrainingRun(bool cpu, uint64_t seed, const std::optional<FullyShardedDataParallelPlugin>& plugin = {})
      : accelerator((start_again(), AcceleratorOptions{.cpu = cpu, .fsdp_plugin = plugin})),
        net(32, 3, seed),
        model(accelerator.prepare_model(net)),
        optimizer(accelerator.prepare_optimizer(torch::optim::AdamW(net->parameters(), 1e-2))) {}
  std::vector<double> losses(uint64_t first, uint64_t last) {
    std::vector<double> found;
    for (uint64_t step = first; step < last; ++step) {
      const auto loss = loss_of(model(numbers({16, 32}, step, accelerator.device())));
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      found.push_back(loss.item<double>());
    }
    return found;
  }
  Accelerator accelerator;
  Mlp net;
  Prepared<Mlp> model;
  AcceleratedOptimizer optimizer;
};

void expect_to_continue(bool written_on_cpu, bool read_on_cpu) {
  const auto folder = support::scratch(std::to_string(written_on_cpu) + std::to_string(read_on_cpu));
  std::vector<double> expected;
  at::Tensor drawn;
  {
    TrainingRun writer(written_on_cpu, 5);
    writer.losses(0, 3);
    writer.accelerator.save_state(folder);
    drawn = torch::rand({8}, writer.accelerator.device());
    expected = writer.losses(3, 6);
  }
  TrainingRun reader(read_on_cpu, 6);
  reader.losses(0, 1);  // another model, and other moments
  reader.accelerator.load_state(folder);
  const bool same_device = written_on_cpu == read_on_cpu || !on_cuda();
  const auto drawn_again = torch::rand({8}, reader.accelerator.device());
  if (same_device) {
    EXPECT_TRUE(same_bits(drawn_again, drawn)) << "the generator's state is a part of it";
  }
  const auto found = reader.losses(3, 6);
  // The other device rounds otherwise, and Adam amplifies that a little.
  for (size_t i = 0; i < expected.size(); ++i) {
    if (same_device) {
      EXPECT_EQ(found[i], expected[i]) << i;
    } else {
      EXPECT_NEAR(found[i], expected[i], 1e-4 * expected[i]) << i;
    }
  }
}

TEST_F(GpuCheckpoint, GpuToGpu) { expect_to_continue(false, false); }
TEST_F(GpuCheckpoint, GpuToCpu) { expect_to_continue(false, true); }
TEST_F(GpuCheckpoint, CpuToGpu) { expect_to_continue(true, false); }

/// Each form in which sharded training writes; a plain run on the CPU reads it.
TEST_F(GpuCheckpoint, ShardedOnTheGpuToPlainOnTheCpu) {
  for (const auto type : {StateDictType::full_state_dict, StateDictType::sharded_state_dict}) {
    const auto folder = support::scratch(std::to_string(static_cast<int>(type)));
    std::vector<double> expected;
    {
      TrainingRun writer(false, 5,
                         FullyShardedDataParallelPlugin{.auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
                                                        .state_dict_type = type,
                                                        .transformer_cls_names_to_wrap = {{"Linear"}}});
      writer.losses(0, 3);
      writer.accelerator.save_state(folder);
      expected = writer.losses(3, 6);
    }
    TrainingRun reader(true, 6);
    reader.accelerator.load_state(folder);
    const auto found = reader.losses(3, 6);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-4 * expected[i]) << i;
  }
}

TEST_F(GpuCheckpoint, SavedModelsAreReadAnywhere) {
  const auto folder = support::scratch("model");
  TrainingRun writer(false, 5);
  writer.losses(0, 2);
  writer.accelerator.save_model(writer.model, folder, "8KB");
  for (const bool on_host : {true, false}) {
    Mlp net(32, 3, 9);
    const auto model = load_checkpoint_and_dispatch(
        net, folder, {.device_map = DeviceMap{{"", on_host || !on_cuda() ? Place("cpu") : Place(0)}}});
    const auto found = net->parameters(), expected = writer.net->parameters();
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(same_bits(found[i], expected[i])) << i;
      EXPECT_EQ(found[i].is_cpu(), on_host || !on_cuda());
    }
  }
  for (const auto& [name, tensor] : writer.accelerator.get_state_dict(writer.model))
    EXPECT_EQ(tensor.scalar_type(), at::kFloat) << name;
}

}  // namespace
}  // namespace gpu_test
