#include "pass.hpp"

namespace accelerate::data::detail {

std::optional<LoadedBatch> Pass::next() {
  if (!pool_) {
    const Read read = done_ ? Read() : next_read_();
    auto loaded = read ? read() : std::nullopt;
    done_ = !loaded;
    return loaded;
  }
  fill();
  if (waiting_.empty()) return std::nullopt;
  auto future = std::move(waiting_.front());
  waiting_.pop_front();
  auto loaded = future.get();
  if (!loaded) {
    done_ = true;
    waiting_.clear();
  }
  return loaded;
}

void Pass::fill() {
  while (!done_ && waiting_.size() < ahead_) {
    Read read = next_read_();
    if (!read) {
      done_ = true;
      return;
    }
    auto task = std::make_shared<std::packaged_task<std::optional<LoadedBatch>()>>(
        [read = std::move(read), cancelled = cancelled_]() -> std::optional<LoadedBatch> {
          return *cancelled ? std::nullopt : read();
        });
    waiting_.push_back(task->get_future());
    pool_->submit([task = std::move(task)] { (*task)(); });
  }
}

}  // namespace accelerate::data::detail
