#include "accelerate/utils/progress.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "utils/environment.hpp"

namespace accelerate {
namespace {

using Clock = std::chrono::steady_clock;

std::string clock_text(double seconds) {
  const auto total = static_cast<int64_t>(seconds);
  char text[32];
  if (total >= 3600)
    std::snprintf(text, sizeof(text), "%lld:%02lld:%02lld", static_cast<long long>(total / 3600),
                  static_cast<long long>(total / 60 % 60), static_cast<long long>(total % 60));
  else
    std::snprintf(text, sizeof(text), "%02lld:%02lld", static_cast<long long>(total / 60),
                  static_cast<long long>(total % 60));
  return text;
}

std::string rate_text(double rate, const std::string& unit) {
  char text[48];
  if (rate >= 1 || rate == 0) std::snprintf(text, sizeof(text), "%.2f%s/s", rate, unit.c_str());
  else std::snprintf(text, sizeof(text), "%.2fs/%s", 1 / rate, unit.c_str());
  return text;
}

int64_t terminal_width() {
  winsize size{};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return environment::integer({"ACCELERATE_LAUNCH_COLUMNS"}).value_or(80);
}

/// A terminal of our own, or the launcher's behind its pipe.
bool on_terminal() { return ::isatty(STDERR_FILENO) != 0 || environment::text("ACCELERATE_LAUNCH_COLUMNS"); }

}  // namespace

struct ProgressBar::Impl {
  ProgressBarOptions options;
  bool enabled = false, terminal = false, closed = false;
  int64_t count = 0;
  std::string postfix;
  Clock::time_point begin = Clock::now(), drawn{}, said = begin;
  int64_t tenths = 0;  // of the way, when a line was last written

  std::string line(int64_t width) const {
    const double elapsed = std::chrono::duration<double>(Clock::now() - begin).count();
    const double rate = elapsed > 0 ? static_cast<double>(count) / elapsed : 0;
    const std::string head = options.description.empty() ? "" : options.description + ": ";
    std::string tail = " " + std::to_string(count);
    if (options.total) tail += "/" + std::to_string(*options.total);
    tail += " [" + clock_text(elapsed);
    if (options.total)
      tail +=
          "<" + (rate > 0 ? clock_text(static_cast<double>(std::max<int64_t>(*options.total - count, 0)) / rate) : "?");
    tail += ", " + rate_text(rate, options.unit) + (postfix.empty() ? "" : ", " + postfix) + "]";
    if (!options.total) return head + tail.substr(1);
    const double part =
        *options.total > 0 ? std::min(1.0, static_cast<double>(count) / static_cast<double>(*options.total)) : 1.0;
    char percent[8];
    std::snprintf(percent, sizeof(percent), "%3d%%|", static_cast<int>(part * 100));
    const int64_t room = std::clamp<int64_t>(width - static_cast<int64_t>(head.size() + tail.size()) - 8, 4, 40);
    const auto full = static_cast<int64_t>(part * static_cast<double>(room));
    return head + percent + std::string(static_cast<size_t>(full), '#') +
           std::string(static_cast<size_t>(room - full), ' ') + "|" + tail;
  }

  void say();
  bool too_soon() const { return Clock::now() - begin < options.delay; }

  void draw(bool always) {
    if (!enabled || closed || !terminal || too_soon()) return;
    const auto now = Clock::now();
    if (!always && now - drawn < options.min_interval) return;
    drawn = now;
    std::fprintf(stderr, "\r%s\x1b[K", line(terminal_width()).c_str());
    std::fflush(stderr);
  }
};

/// For streams in which nothing can be drawn over: a log gets a line each tenth of the way, and when nothing was said
/// for long.
void ProgressBar::Impl::say() {
  constexpr auto kSilence = std::chrono::seconds(30);
  if (!enabled || closed || terminal || too_soon()) return;
  const int64_t total = options.total.value_or(0), now_at = total > 0 ? count * 10 / total : 0;
  const auto now = Clock::now();
  if (total > 0 && count >= total) return;  // close() writes the last one
  if ((now_at <= tenths && now - said < kSilence) || now - said < 10 * options.min_interval) return;
  said = now;
  tenths = now_at;
  std::fprintf(stderr, "%s\n", line(80).c_str());
}

ProgressBar::ProgressBar(ProgressBarOptions options) : impl_(std::make_unique<Impl>()) {
  impl_->options = std::move(options);
  impl_->terminal = on_terminal();
  impl_->enabled = impl_->options.enabled.value_or(environment::integer({"LOCAL_RANK"}).value_or(0) == 0);
  impl_->draw(true);
}

ProgressBar::ProgressBar(int64_t total, const std::string& description)
    : ProgressBar(ProgressBarOptions{.total = total, .description = description}) {}
ProgressBar::~ProgressBar() { close(); }

void ProgressBar::update(int64_t steps) {
  impl_->count += steps;
  impl_->draw(false);
  impl_->say();
}
void ProgressBar::set_description(const std::string& text) { impl_->options.description = text; }
void ProgressBar::set_postfix(const std::string& text) { impl_->postfix = text; }
int64_t ProgressBar::count() const { return impl_->count; }

void ProgressBar::close() {
  if (impl_->closed || !impl_->enabled) return;
  impl_->draw(true);
  if (!impl_->too_soon()) std::fprintf(stderr, "%s\n", impl_->terminal ? "" : impl_->line(80).c_str());
  impl_->closed = true;
}

}  // namespace accelerate
