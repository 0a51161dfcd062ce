#include "launch/monitor/monitor.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <nlohmann/json.hpp>

#include "input/plain_text.hpp"
#include "launch/job/job.hpp"
#include "launch/job/outcome.hpp"
#include "launch/system/process.hpp"

namespace accelerate::launcher {
namespace {

constexpr double kSecondsOnTerminal = 1, kSecondsInLines = 10;
constexpr size_t kMostLines = 34;  // of a table that is printed: two of heading and 32 ranks

Monitor::Clock::duration seconds(double value) {
  return std::chrono::duration_cast<Monitor::Clock::duration>(std::chrono::duration<double>(value));
}

uint64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

std::unique_ptr<Monitor> Monitor::create(const Job& job) {
  const bool page = job.settings.integer("monitor_port").has_value();
  return job.settings.on("monitor") || page ? std::unique_ptr<Monitor>(new Monitor(job)) : nullptr;
}

Monitor::Monitor(const Job& job) : table_(job.settings.on("monitor")) {
  const Settings& s = job.settings;
  if (!s["monitor_seconds"].is_null()) seconds_ = s["monitor_seconds"].get<double>();
  if (!s["monitor_peak_flops"].is_null()) peak_flops_ = s["monitor_peak_flops"].get<double>();
  if (const auto port = s.integer("monitor_port")) page_ = std::make_unique<WebPage>(s.text("monitor_host"), *port);
  snapshot_.program = std::filesystem::path(job.command.front()).filename();
  snapshot_.url = url();
  snapshot_.interval = seconds_.value_or(kSecondsOnTerminal);
  snapshot_.max_restarts = job.max_restarts;
  snapshot_.waiting = job.needs_agent();
}

void Monitor::begin(const Job& job, Sink& sink, const Warden& warden) {
  snapshot_.waiting = false;
  snapshot_.attempt = job.round ? job.round->restarts : job.attempt;
  snapshot_.machine_rank = job.machine_rank;
  snapshot_.num_machines = job.num_machines;
  snapshot_.world_size = job.world_size;
  snapshot_.ranks.clear();
  ranks_are_ours_ = job.starts_ranks();
  names_.clear(), gpu_names_.clear(), steps_.clear();
  for (int64_t i = 0; i < job.local_world_size; ++i) {
    names_.push_back(job.starter == Job::Starter::hostfile    ? job.remote[static_cast<size_t>(i)].name
                     : job.starter == Job::Starter::mpirun    ? "mpirun"
                     : job.starter == Job::Starter::srun      ? "srun"
                     : job.starter == Job::Starter::pod       ? "gcloud"
                     : job.starter == Job::Starter::deepspeed ? "deepspeed"
                                                              : std::to_string(job.rank(i)));
    if (ranks_are_ours_) steps_.emplace_back(folder_.path() / std::to_string(i));
  }
  if (!job.settings.computes_on_cpu() && ranks_are_ours_) {
    const std::string ids = job.settings.text("gpu_ids");
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    gpu_names_ = gpu_names(!ids.empty() && ids != "all" ? ids : visible ? visible : "", job.local_world_size);
  }
  processes_ = {};
  printed_ = 0;
  sink_ = &sink;
  if (divides(sink.fd())) {
    view_.emplace(sink, warden);
    if (Keyboard::possible(sink.fd())) keyboard_.emplace();
  }
  next_ = Clock::now() + std::chrono::milliseconds(100);  // the first look soon after the start
  next_print_ = Clock::now() + seconds(seconds_.value_or(kSecondsInLines));
}

std::string Monitor::step_file(int64_t local_rank) const {
  return ranks_are_ours_ ? (folder_.path() / std::to_string(local_rank)).string() : "";
}

void Monitor::update(Clock::time_point now, const std::vector<Status>& ranks) {
  std::vector<pid_t> alive;
  for (const auto& rank : ranks) alive.push_back(ranks_are_ours_ && !rank.record->end ? rank.record->pid : -1);
  const auto uses = processes_.look(alive, now);
  const auto gpus = gpus_.look(gpu_names_);
  snapshot_.seconds = std::chrono::duration<double>(now - began_).count();
  snapshot_.ranks.clear();
  for (size_t i = 0; i < ranks.size(); ++i) {
    const RankRecord& record = *ranks[i].record;
    RankView view{.name = names_[i], .local_rank = record.local_rank, .pid = record.pid};
    view.last_line = plain_text(ranks[i].last_line);
    if (record.pid > 0)
      view.seconds = std::chrono::duration<double>((record.end ? record.end->at : now) - record.started).count();
    if (ranks_are_ours_) {
      steps_[i].look();
      view.steps = steps_[i].steps();
      view.tokens = steps_[i].tokens();
      view.logged = steps_[i].logged();
      if (!record.end) {
        const uint64_t now_ns = monotonic_ns();
        view.steps_per_second = steps_[i].per_second(now_ns);
        view.tokens_per_second = steps_[i].tokens_per_second(now_ns);
        view.flops_per_second = steps_[i].flops_per_second(now_ns);
        view.comm_share = steps_[i].comm_share();
        view.data_share = steps_[i].data_share();
      }
    }
    if (uses[i]) view.cpu_percent = uses[i]->cpu_percent, view.resident_bytes = uses[i]->resident_bytes;
    if (i < gpus.size() && !record.end) view.gpu = gpus[i];
    view.peak_flops = peak_flops_ ? peak_flops_ : view.gpu ? peak_flops_of(*view.gpu) : std::nullopt;
    if (!record.end)
      view.state = ranks[i].asked ? "stopping" : view.last_line.empty() && !view.steps ? "starting" : "running";
    else view.state = record.end->good() ? "done" : record.end->asked ? "stopped" : "failed";
    if (record.end && !record.end->good())
      view.end =
          record.end->signal ? signal_name(record.end->signal) : fmt::format("exit code {}", record.end->exit_code);
    snapshot_.ranks.push_back(std::move(view));
  }
  if (page_) history_.add(snapshot_);
}

void Monitor::look(Clock::time_point now, const std::vector<Status>& ranks) {
  update(now, ranks);
  if (view_) redraw();
  else if (table_ && now >= next_print_) print(), next_print_ = now + seconds(seconds_.value_or(kSecondsInLines));
  next_ = now + seconds(seconds_.value_or(page_ || view_ ? kSecondsOnTerminal : kSecondsInLines));
}

void Monitor::redraw() {
  if (!view_) return;
  if (keyboard_) keyboard_->take();
  const auto room = view_->room();
  static const bool colours = !std::getenv("NO_COLOR");
  view_->draw(to_lines(snapshot_, room.columns, room.lines, colours));
}

void Monitor::print() {
  if (sink_->written() < printed_) return;  // the reader is slow
  std::string text;
  for (auto& line : to_lines(snapshot_, 160, kMostLines, false)) {
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  sink_->write(this, text);
  printed_ = sink_->queued();
}

void Monitor::end(const std::vector<Status>& ranks) {
  update(Clock::now(), ranks);
  leave();
  drop();
}

void Monitor::add_to(std::vector<pollfd>& fds) {
  polls_keyboard_ = keyboard_ && keyboard_->listens();
  if (polls_keyboard_) fds.push_back({STDIN_FILENO, POLLIN, 0});
  if (page_) page_->add_to(fds);
}

bool Monitor::serve(std::span<const pollfd> polled) {
  bool asked = false;
  if (polls_keyboard_) {
    if (polled.front().revents) asked = keyboard_->read().find('h') != std::string::npos;
    polled = polled.subspan(1);
  }
  if (page_)
    page_->serve(polled, {.state = [this] { return to_json(snapshot_).dump(); },
                          .history = [this] { return history_.json().dump(); }});
  return asked;
}

void Monitor::serve_until(int fd) {
  snapshot_.waiting = true;
  std::vector<pollfd> fds;
  do {
    fds.assign(1, {fd, POLLIN, 0});
    add_to(fds);
    snapshot_.seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    ::poll(fds.data(), fds.size(), 1000);
    if (page_) serve(std::span(fds).subspan(1));
  } while (!fds[0].revents);
}

}  // namespace accelerate::launcher
