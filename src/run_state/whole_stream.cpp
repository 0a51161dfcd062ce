#include "run_state/whole_stream.hpp"

#include <algorithm>
#include <exception>
#include <unordered_map>

#include "accelerate/comm.hpp"
#include "comm/agreement.hpp"
#include "formats/torch_archive.hpp"
#include "observe/trace.hpp"
#include "snapshot/put_off.hpp"
#include "utils/atomic_file.hpp"
#include "utils/error_text.hpp"
#include "utils/raise.hpp"

namespace accelerate::run_state {

WholeStream::WholeStream(std::vector<Stage> stages, const Options& options)
    : stages_(std::move(stages)), options_(options) {}

at::Tensor WholeStream::get(const at::Tensor& parameter, const std::string& kind) {
  const std::pair key(static_cast<const at::TensorImpl*>(parameter.unsafeGetTensorImpl()), kind);
  while (!whole_.contains(key)) {
    if (next_ == stages_.size()) throw InternalError("saving sharded state: a tensor is asked for out of order");
    advance();
  }
  return whole_.at(key);
}

void WholeStream::finish() {
  while (next_ < stages_.size()) advance();
  whole_.clear();
}

void WholeStream::advance() {
  const Stage& stage = stages_[next_++];
  whole_.clear();
  // One gathering for each engine and kind, in an order that all ranks have.
  std::vector<std::pair<const parallel::Engine*, std::string>> gatherings;
  for (const auto& item : stage)
    if (const std::pair one(item.engine, item.kind);
        std::find(gatherings.begin(), gatherings.end(), one) == gatherings.end())
      gatherings.push_back(one);
  for (const auto& [engine, kind] : gatherings) {
    std::unordered_map<const at::TensorImpl*, at::Tensor> pieces;
    for (const auto& item : stage)
      if (item.engine == engine && item.kind == kind) pieces[item.parameter.unsafeGetTensorImpl()] = item.piece;
    engine->gather_each(
        [&](const at::Tensor& parameter, const at::Tensor&) {
          const auto found = pieces.find(parameter.unsafeGetTensorImpl());
          return found == pieces.end() ? at::Tensor() : found->second;
        },
        [&, &kind = kind](const parallel::Engine::Whole& tensor) {
          if (!tensor.value.defined()) return;
          const at::Device device = options_.on_host ? at::Device(at::kCPU) : tensor.parameter.device();
          whole_[{tensor.parameter.unsafeGetTensorImpl(), kind}] =
              options_.copies ? tensor.value.to(device, /*non_blocking=*/false, /*copy=*/true) : tensor.value;
        },
        options_.everywhere);
  }
}

WholeStream::Wanted wanted(const parallel::Held& holding, const std::string& kind, const at::Tensor& piece) {
  return {holding.engine, holding.part, holding.tensor, kind, piece.detach()};
}

std::vector<WholeStream::Stage> part_by_part(std::vector<WholeStream::Wanted> wanted) {
  std::vector<WholeStream::Stage> stages;
  for (auto& item : wanted) {
    if (stages.empty() || stages.back().front().engine != item.engine || stages.back().front().part != item.part)
      stages.emplace_back();
    stages.back().push_back(std::move(item));
  }
  return stages;
}

void write_in_step(WholeStream& stream, bool writes, const std::function<void()>& write) {
  comm::on_all_ranks_or_throw<CheckpointError>([&] {
    std::exception_ptr failure;
    if (writes) {
      try {
        write();
      } catch (const CommError&) {
        throw;
      } catch (...) {
        failure = std::current_exception();
      }
    }
    stream.finish();
    if (failure) std::rethrow_exception(failure);
  });
}

void write_archive(const std::filesystem::path& file, formats::TorchPickle&& pickle, const char* user) {
  if (auto* const later = snapshot::PutOff::here()) {
    if (auto* const ledger = later->ledger()) pickle.hold(*ledger);
    const auto held = std::make_shared<formats::TorchPickle>(std::move(pickle));
    return later->files().writes.push_back([file, held, user] { write_archive(file, std::move(*held), user); });
  }
  trace::Span span(trace::SpanKind::checkpoint_write, file.filename().string());
  int64_t written = 0;
  AtomicFile out(user, file);
  formats::write_torch_archive(std::move(pickle), [&](std::string_view bytes) {
    out.write(bytes);
    written += static_cast<int64_t>(bytes.size());
  });
  out.finish();
  span.set_bytes(written);
}

}  // namespace accelerate::run_state
