/// Weights and activations that are elsewhere while nobody computes with them: training is the same, bit for bit.
#include <accelerate/accelerate.hpp>
#include <accelerate/residency/recompute.hpp>

#include "gpu.hpp"
#include "residency/activations/checkpoint_rules.hpp"
#include "residency/counters.hpp"
#include "scratch.hpp"

namespace gpu_test {
namespace {

using namespace accelerate;

class GpuOffload : public GpuTest {
 protected:
  ~GpuOffload() override { residency::set_paranoid(false); }
};

constexpr int64_t kOffloadWidth = 96, kOffloadDepth = 6;
constexpr int64_t kOffloadBudget = 3 * 4 * (kOffloadWidth * kOffloadWidth + 2 * 128);

/// Losses of SGD, which changes the weights where they are: on the device, among operators.
std::vector<double> sgd_losses(Mlp& net) {
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  std::vector<double> losses;
  for (uint64_t step = 0; step < 5; ++step) {
    const auto loss = loss_of(net(numbers({16, kOffloadWidth}, step)));
    losses.push_back(loss.item<double>());
    loss.backward();
    sgd.step();
    sgd.zero_grad();
  }
  return losses;
}

std::vector<double> losses_in_memory() {
  Mlp net(kOffloadWidth, kOffloadDepth);
  net->to(device());
  return sgd_losses(net);
}

TEST_F(GpuOffload, TrainsWithWeightsInHostMemory) {
  for (const bool paranoid : {false, true}) {
    residency::set_paranoid(paranoid);
    Mlp net(kOffloadWidth, kOffloadDepth);
    const auto model = cpu_offload(net, {.execution_device = device(), .offload = {.budget_bytes = kOffloadBudget}});
    EXPECT_EQ(sgd_losses(net), losses_in_memory()) << "paranoid " << paranoid;
    if (on_cuda()) {
      EXPECT_GT(model.streamed_bytes(), 0);
    }
  }
}

TEST_F(GpuOffload, TrainsWithWeightsOnDisk) {
  for (const bool paranoid : {false, true}) {
    residency::set_paranoid(paranoid);
    Mlp net(kOffloadWidth, kOffloadDepth);
    const auto model =
        disk_offload(net, support::scratch("paranoid" + std::to_string(paranoid)),
                     {.execution_device = device(), .offload = {.budget_bytes = kOffloadBudget, .always_read = true}});
    EXPECT_GT(model.streamed_bytes(), 0);
    residency::reset_stats();
    EXPECT_EQ(sgd_losses(net), losses_in_memory()) << "paranoid " << paranoid;
    EXPECT_GT(residency::stats().bytes_stored, 0) << "what was trained is written";
  }
}

TEST_F(GpuOffload, ResidentBytesKeepToTheBudget) {
  const at::NoGradGuard no_grad;
  Mlp net(kOffloadWidth, kOffloadDepth);
  const auto before = residency::stats().resident_bytes;
  const auto model =
      disk_offload(net, support::scratch("weights"),
                   {.execution_device = device(), .offload = {.budget_bytes = kOffloadBudget, .always_read = true}});
  residency::reset_stats();
  for (uint64_t i = 0; i < 3; ++i) net(numbers({4, kOffloadWidth}, i));
  EXPECT_LE(residency::stats().peak_resident_bytes - before, kOffloadBudget);
}

struct Backward {
  std::vector<at::Tensor> gradients;
  ActivationOffloadStats stats;
  int64_t held = 0;  ///< bytes of the device's memory between forward and backward
};

int64_t allocated() {
  return on_cuda() ? at::accelerator::getDeviceStats(device().index()).allocated_bytes[0].current : 0;
}

Backward backward_with(const std::optional<ActivationOffloadOptions>& options) {
  const int64_t rows = on_gpu() ? 4096 : 256;
  Mlp net(kOffloadWidth, kOffloadDepth);
  net->to(device());
  const auto x = numbers({rows, kOffloadWidth}, 1);
  {
    const at::NoGradGuard no_grad;
    net(x);  // libraries have their workspaces from now on
  }
  Backward result;
  const int64_t before = allocated();
  at::Tensor loss;
  if (options) {
    ActivationOffload offload(*options);
    loss = loss_of(net(x));
    offload.close();
    synchronize();
    result.held = allocated() - before;
    loss.backward();
    result.stats = offload.stats();
  } else {
    loss = loss_of(net(x));
    result.held = allocated() - before;
    loss.backward();
  }
  result.gradients = gradients_of(*net);
  return result;
}

void expect_same_gradients(const Backward& found, const Backward& expected) {
  ASSERT_EQ(found.gradients.size(), expected.gradients.size());
  for (size_t i = 0; i < found.gradients.size(); ++i)
    EXPECT_TRUE(same_bits(found.gradients[i], expected.gradients[i])) << i;
}

TEST_F(GpuOffload, ActivationsGoToTheHostAndComeBack) {
  const auto plain = backward_with({});
  for (const bool pin : {true, false})
    for (int again = 0; again < 5; ++again) {
      const auto offloaded = backward_with(ActivationOffloadOptions{.min_bytes = 0, .pin_memory = pin});
      expect_same_gradients(offloaded, plain);
      if (!on_cuda()) continue;
      EXPECT_GT(offloaded.stats.moved, 0);
      EXPECT_LT(offloaded.held, plain.held / 2) << "the device must have less to hold";
    }
  NEEDS_DEVICE("activations are on the host already");
}

/// Each layer recomputed.
struct RecomputingImpl : MlpImpl {
  using MlpImpl::MlpImpl;
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers)
      x = checkpoint([layer](const at::Tensor& x) mutable { return torch::tanh(layer(x)); }, {}, x);
    return x;
  }
};
TORCH_MODULE(Recomputing);

/// The effect of a DeepSpeed configuration's activation_checkpointing on layers that a model recomputes.
struct Recomputed {
  std::vector<at::Tensor> weights;
  int64_t inputs_moved = 0, waits = 0;
};
Recomputed trained_with(const std::string& activation_checkpointing) {
  start_again();
  Accelerator accelerator(
      {.deepspeed_plugin =
           DeepSpeedPlugin{.hf_ds_config = R"({"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 2},
                               "activation_checkpointing": {)" +
                                           activation_checkpointing + "}}"}});
  Recomputing net(kOffloadWidth, kOffloadDepth);
  auto [m, sgd] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.05));
  const int64_t moved = counts::read(residency::ResidencyCount::inputs_offloaded),
                waits = residency::checkpoint_waits();
  accelerator.backward(loss_of(m(numbers({16, kOffloadWidth}, 1))));
  sgd.step();
  Recomputed result{.inputs_moved = counts::read(residency::ResidencyCount::inputs_offloaded) - moved,
                    .waits = residency::checkpoint_waits() - waits};
  for (const auto& parameter : net->parameters()) result.weights.push_back(parameter.detach().cpu());
  return result;
}
void expect_same_weights(const Recomputed& found, const Recomputed& expected) {
  for (size_t i = 0; i < expected.weights.size(); ++i)
    EXPECT_TRUE(same_bits(found.weights[i], expected.weights[i])) << i;
}

TEST_F(GpuOffload, TheFilePutsInputsOfRecomputedLayersOnTheHost) {
  NEEDS_DEVICE("inputs are on the host already");
  const auto plain = trained_with(""), on_host = trained_with(R"("cpu_checkpointing": true)");
  expect_same_weights(on_host, plain);
  EXPECT_EQ(plain.inputs_moved, 0);
  EXPECT_EQ(on_host.inputs_moved, kOffloadDepth);
}

TEST_F(GpuOffload, TheFileWaitsForTheDeviceAroundRecomputedLayers) {
  NEEDS_DEVICE("operators of the CPU are done when they return");
  const auto plain = trained_with(""), waiting = trained_with(R"("synchronize_checkpoint_boundary": true)");
  expect_same_weights(waiting, plain);
  EXPECT_EQ(plain.waits, 0);
  EXPECT_EQ(waiting.waits, 4 * kOffloadDepth) << "before and after each run, of which there are two";
}

TEST_F(GpuOffload, ActivationsGoToAFileAndComeBack) {
  const auto plain = backward_with({});
  const auto offloaded = backward_with(ActivationOffloadOptions{.directory = support::scratch_dir(), .min_bytes = 0});
  expect_same_gradients(offloaded, plain);
  EXPECT_GT(offloaded.stats.moved, 0);
}

TEST_F(GpuOffload, RecomputedActivationsDrawTheSameNumbers) {
  const auto gradients = [](bool recompute) {
    Mlp net(kOffloadWidth, kOffloadDepth);
    net->to(device());
    torch::manual_seed(3);  // of all devices
    at::Tensor x = numbers({16, kOffloadWidth}, 1);
    for (auto& layer : net->layers) {
      const auto one = [layer](const at::Tensor& input) {
        auto own = layer;
        return torch::dropout(torch::tanh(own(input)), 0.3, /*train=*/true);
      };
      x = recompute ? checkpoint(one, {}, x) : one(x);
    }
    loss_of(x).backward();
    return gradients_of(*net);
  };
  const auto found = gradients(true), expected = gradients(false);
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(same_bits(found[i], expected[i])) << i;
}

}  // namespace
}  // namespace gpu_test
