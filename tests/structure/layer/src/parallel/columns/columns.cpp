#include <ATen/core/Dict.h>
#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "accelerate/parallel/layers/columns_plugin.hpp"
#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "observe/receipt_rows.hpp"
#include "parallel/engines.hpp"
#include "parallel/layer.hpp"
#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

/// How many times parameters were made whole after a step, which a resumed run goes on counting.
struct Steps {
  int64_t here = 0;
};

/// Modules keep whole parameters, optimizers hold some columns.
class Columns final : public Layer {
 public:
  Columns(const std::vector<Held>& given, std::shared_ptr<Steps> steps)
      : group_(comm::mesh().along({comm::Axis::tp})), given_(given), steps_(std::move(steps)) {
    for (const Held& from : given_) {
      Held& held = held_.emplace_back(from);
      const int64_t columns = from.value.size(-1), width = (columns + places() - 1) / places();
      const int64_t begin = std::min(width * place(), columns);
      held.slice.corner.back() += begin;
      held.slice.sizes.back() = std::min(begin + width, columns) - begin;
      held.slice.numel = c10::multiply_integers(held.slice.sizes);
      held.value = columns_of(from.value.detach(), held).clone().requires_grad_();
      held.cut = held.cut | comm::Axes{comm::Axis::tp};
      held.part = static_cast<int64_t>(held_.size()) - 1;
    }
  }

  std::string name() const override { return "columns"; }
  void after_backward() override {
    if (!sync_) return;
    for (size_t i = 0; i < held_.size(); ++i) {
      at::Tensor& gradient = given_[i].value.mutable_grad();
      if (!gradient.defined()) continue;
      const at::Tensor mine = columns_of(gradient, held_[i]).clone();
      if (held_[i].value.grad().defined()) held_[i].value.mutable_grad().add_(mine);
      else held_[i].value.mutable_grad() = mine;
      gradient.reset();
    }
  }
  void after_step() override {
    const at::NoGradGuard no_grad;
    for (const Held& held : held_)
      given_[static_cast<size_t>(held.part)].value.detach().copy_(widen(held, held.value.detach()));
    ++steps_->here;
  }
  void set_require_backward_grad_sync(bool value) override { sync_ = value; }
  void prepare_backward_sync() override { sync_ = true; }

  bool cuts() const override { return true; }
  std::vector<Held> held() const override { return held_; }
  std::optional<Held> gradient(const at::Tensor& parameter) const override {
    for (Held held : held_)
      if (held.tensor.is_same(parameter) || held.value.is_same(parameter)) {
        held.value = held.value.grad();
        return held;
      }
    return std::nullopt;
  }
  at::Tensor widen(const Held& held, const at::Tensor& piece) const override {
    if (!group_) return piece;
    // Columns first, so that those of all ranks lie one after the other; the last rank may have fewer.
    const at::Tensor& whole = given_[static_cast<size_t>(held.part)].value;
    const int64_t columns = whole.size(-1), width = (columns + places() - 1) / places();
    at::Tensor mine = at::zeros({width, whole.numel() / columns}, piece.options());
    mine.narrow(0, 0, piece.size(-1)).copy_(piece.reshape({-1, piece.size(-1)}).t());
    const at::Tensor all = group_->all_gather(mine, "all_gather of columns");
    std::vector<at::Tensor> parts;
    for (int64_t place = 0; place < places(); ++place) {
      const int64_t begin = std::min(width * place, columns);
      parts.push_back(all.narrow(0, place * width, std::min(begin + width, columns) - begin));
    }
    return at::cat(parts).t().reshape(whole.sizes());
  }

  c10::IValue own_state() const override {
    c10::impl::GenericDict state(c10::StringType::get(), c10::AnyType::get());
    state.insert("steps", steps_->here);
    return state;
  }
  std::function<void()> stage_own_state(const c10::IValue& state) override {
    return [steps = steps_, value = state.toGenericDict().at("steps").toInt()] { steps->here = value; };
  }

  /// Ranks that share columns have the same batches.
  void begin_join() override {}
  void finish_join(int64_t) override {
    const at::NoGradGuard no_grad;
    for (Held& held : held_)
      held.value.detach().copy_(columns_of(given_[static_cast<size_t>(held.part)].value.detach(), held));
  }

 private:
  int64_t places() const { return group_ ? group_->world_size() : 1; }
  int64_t place() const { return group_ ? group_->rank() : 0; }
  /// This place's columns of a tensor of the sizes that were given.
  at::Tensor columns_of(const at::Tensor& tensor, const Held& held) const {
    const int64_t columns = tensor.size(-1), width = (columns + places() - 1) / places();
    return tensor.narrow(-1, std::min(width * place(), columns), held.slice.sizes.back());
  }

  std::shared_ptr<comm::Group> group_;  ///< null: one place
  std::vector<Held> given_, held_;
  std::shared_ptr<Steps> steps_;
  bool sync_ = true;
};

/// The facts that the receipts of its settings are made from.
struct ColumnsFacts {
  ColumnsPlugin given;
  int64_t size = 1, steps = 0;
};
receipts::Deed shared_columns(const ColumnsFacts& f) {
  if (f.size == 1) return receipts::nothing("one rank has all columns");
  return receipts::acted("columns were gathered after {} steps", f.steps);
}
constexpr receipts::ReceiptRow<ColumnsFacts> kColumnsRows[] = {
    {"ColumnsPlugin.size", "ACCELERATE_COLUMNS_SIZE", "where more than one rank shares the columns of parameters",
     receipts::asked<&ColumnsFacts::given, &ColumnsPlugin::size>, shared_columns},
};

class ChosenColumns final : public ChosenLayer {
 public:
  ChosenColumns(const ColumnsPlugin& given, int64_t size) : given_(given), size_(size) {}
  bool splits(const std::string& axis) const override { return axis == "tp"; }
  std::vector<comm::AxisSize> axes(const comm::Group& all) const override {
    if (all.world_size() % size_ != 0)
      raise<ConfigError>("ColumnsPlugin::size is {}, expected a divisor of the {} ranks of the job", size_,
                         all.world_size());
    return {{comm::Axis::dp_replicate, all.world_size() / size_}, {comm::Axis::tp, size_}};
  }
  std::vector<Receipt> receipts() const override { return receipts::made(kColumnsRows, {given_, size_, steps_->here}); }
  std::unique_ptr<Layer> make(const ModelRef&, const at::Device&, bool evaluation_mode,
                              const std::vector<Held>& given) const override {
    return evaluation_mode ? nullptr : std::make_unique<Columns>(given, steps_);
  }

 private:
  ColumnsPlugin given_;
  int64_t size_;
  std::shared_ptr<Steps> steps_ = std::make_shared<Steps>();
};

}  // namespace

std::unique_ptr<ChosenLayer> choose_columns(const EngineRequest& request) {
  const auto* plugin = request.plugin<ColumnsPlugin>();
  if (!plugin) return nullptr;
  const int64_t size = plugin->size ? *plugin->size : environment::integer({"ACCELERATE_COLUMNS_SIZE"}).value_or(1);
  if (size < 1) raise<ConfigError>("ColumnsPlugin::size is {}, expected at least 1", size);
  return std::make_unique<ChosenColumns>(*plugin, size);
}

}  // namespace accelerate::parallel
