#include "trackers/event_file.hpp"

#include <unistd.h>

#include <atomic>

#include "trackers/crc.hpp"
#include "trackers/protobuf.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

namespace pb = protobuf;

/// The format stores checksums rotated and offset, so that a checksum of data that holds checksums stays meaningful.
uint32_t masked_crc(const std::string& bytes) {
  const uint32_t crc = crc_of<0x82F63B78u>(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
}

/// TensorBoard reads files in the order of their names.
std::string event_file_name(double time, const std::string& suffix) {
  static std::atomic<int64_t> files = 0;
  char host[256] = "localhost";
  ::gethostname(host, sizeof(host) - 1);
  return fmt::format("events.out.tfevents.{:010d}.{}.{}.{}{}", static_cast<int64_t>(time), host, ::getpid(), files++,
                     suffix);
}

std::filesystem::path made(const std::filesystem::path& folder) {
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  if (failure)
    raise<CheckpointError>("tensorboard: the folder '{}' can't be created: {}; check project_dir and logging_dir",
                           folder.string(), failure.message());
  return folder;
}

}  // namespace

EventFile::EventFile(const std::filesystem::path& folder, double time, const Options& options)
    : path_(made(folder) / event_file_name(time, options.filename_suffix)), out_(path_, std::ios::binary) {
  if (!out_)
    raise<CheckpointError>("tensorboard: '{}' can't be written; check project_dir, logging_dir and the rights",
                           path_.string());
  event(pb::bytes(3, "brain.Event:2"), 0, time);  // every file begins with the version of the format
  if (options.purge_step) {
    constexpr int64_t kStart = 1;
    event(pb::bytes(7, pb::whole(1, kStart)), *options.purge_step, time);
  }
  flush();
}

void EventFile::add(const std::string& summary, int64_t step, double time) { event(pb::bytes(5, summary), step, time); }

void EventFile::event(const std::string& fields, int64_t step, double time) {
  const std::string event = pb::real(1, time) + pb::whole(2, step) + fields;
  const std::string length = pb::raw(static_cast<uint64_t>(event.size()));
  out_ << length << pb::raw(masked_crc(length)) << event << pb::raw(masked_crc(event));
  check();
}

void EventFile::flush() {
  out_.flush();
  check();
}

void EventFile::check() const {
  if (!out_)
    raise<ResourceError>(
        "tensorboard: writing '{}' failed; check that the folder may be written to and the disk is not full",
        path_.string());
}

}  // namespace accelerate
