#include "residency/homes/file.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <system_error>
#include <utility>

#include "accelerate/formats/safetensors.hpp"
#include "formats/safetensors_dtypes.hpp"
#include "input/read_file.hpp"
#include "memory/cached_pages.hpp"
#include "memory/held_bytes.hpp"
#include "residency/disk/direct_io.hpp"
#include "residency/homes/host.hpp"
#include "residency/spill_file.hpp"

namespace accelerate::residency {
namespace {

namespace fs = std::filesystem;

/// Undefined for those that LibTorch lacks.
at::ScalarType dtype_of(const SafetensorsInfo& info) {
  const auto* dtype = formats::find_dtype(info.dtype);
  return dtype && dtype->torch && dtype->packed <= 1 ? *dtype->torch : at::ScalarType::Undefined;
}

constexpr int64_t kWindow = 1 << 22;  ///< bytes that the cache is asked about at a time
/// As large as a disk likes them. What is on its way from it is small beside a unit.
constexpr DiskRequests kRequests{.bytes = 1 << 20, .depth = 4};

/// One file, open for reading by several threads.
class OpenFile {
 public:
  OpenFile(const fs::path& path, bool direct) : path_(path) {
    const auto opened = open_regular(path);
    if (opened.file < 0)
      raise<CheckpointError>("file home: '{}': {}. Check the path and the rights.", path.string(), opened.problem);
    file_ = opened.file;
    if (direct) {
      direct_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT | O_NONBLOCK);  // EINVAL where the file system has
                                                                                     // no such thing
      cached_.emplace(file_, path);
      struct stat status {};
      if (::fstat(file_, &status) == 0) blocks_ = status.st_size / DiskRequests::kBlock;
    }
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() {
    ::close(file_);
    if (direct_ >= 0) ::close(direct_);
  }

  /// @param name  of the tensor, for errors.
  void read(int64_t offset, char* data, int64_t count, const std::string& name) const {
    if (direct_ >= 0 && direct_works_.load(std::memory_order_relaxed) && read_direct(offset, data, count, name)) return;
    read_through_cache(offset, data, count, name);
  }

 private:
  void read_through_cache(int64_t offset, char* data, int64_t count, const std::string& name) const {
    while (count > 0) {
      const auto got = ::pread(file_, data, static_cast<size_t>(count), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) fail(name, offset, count, got < 0 ? errno : 0);
      data += got, offset += got, count -= got;
    }
  }

  /// Past the cache, but for what is in it. @return false: this file system can't after all.
  bool read_direct(int64_t offset, char* data, int64_t count, const std::string& name) const {
    while (count > 0) {
      const auto window = [&](int64_t from) { return std::min(kWindow, count - from); };
      const bool held = cached_->hold(offset, window(0));
      int64_t here = window(0);
      while (here < count && cached_->hold(offset + here, window(here)) == held) here += window(here);
      if (held) read_through_cache(offset, data, here, name);
      else if (!read_past_cache(offset, data, here, name)) return false;
      data += here, offset += here, count -= here;
    }
    return true;
  }

  /// By requests of whole blocks, because tensors begin where they like; the file's last block need not be whole.
  bool read_past_cache(int64_t offset, char* data, int64_t count, const std::string& name) const {
    constexpr int64_t kBlock = DiskRequests::kBlock;
    const int64_t begin = offset / kBlock * kBlock;
    const int64_t end = std::min((offset + count + kBlock - 1) / kBlock, blocks_) * kBlock;
    const int64_t direct = std::clamp<int64_t>(end - offset, 0, count);
    try {
      if (direct > 0)
        DirectIo::read_by_requests(
            direct_, begin, end - begin, kRequests, [&](int64_t at, const char* bytes, int64_t size) {
              const int64_t from = std::max(at, offset), to = std::min(at + size, offset + count);
              std::memcpy(data + (from - offset), bytes + (from - at), static_cast<size_t>(to - from));
            });
    } catch (const std::system_error& error) {
      if (error.code().value() == EINVAL) {
        direct_works_ = false;
        return false;
      }
      read_through_cache(offset, data, direct, name);  // which says what it is
    }
    read_through_cache(offset + direct, data + direct, count - direct, name);
    return true;
  }

  [[noreturn]] void fail(const std::string& name, int64_t offset, int64_t left, int error) const {
    const std::string where = "file home: reading '" + name + "' from '" + path_.string() + "': ";
    if (error)
      raise<CheckpointError>("{}{} at byte {}. Check the disk, or the connection to it.", where,
                             std::generic_category().message(error), offset);
    raise<CheckpointError>(
        "{}the file ends at byte {}, where {} more were expected; it has been shortened since it was opened. "
        "Put the checkpoint back, and don't change it while a model is computed from it.",
        where, offset, left);
  }

  fs::path path_;
  int file_ = -1, direct_ = -1;
  int64_t blocks_ = 0;  ///< that are whole
  std::optional<CachedPages> cached_;
  mutable std::atomic<bool> direct_works_{true};
};

/// Where one member's bytes are, or a shard of them.
struct Extent {
  std::shared_ptr<OpenFile> file;
  std::string name;
  int64_t begin, bytes;   ///< in the file
  at::ScalarType dtype;   ///< there
  int64_t offset, numel;  ///< in the flat storage, elements
  std::function<void(const at::Tensor&)> decode;
};
using Extents = std::vector<Extent>;

/// Shares of about equal size, in order, for several readers. Extents that are copied as they are may be cut anywhere.
std::vector<Extents> shared_out(const Extents& extents, at::ScalarType to, int64_t readers) {
  int64_t bytes = 0;
  for (const Extent& extent : extents) bytes += extent.bytes;
  const int64_t share =
      std::max(kWindow, (bytes / readers + DiskRequests::kBlock) / DiskRequests::kBlock * DiskRequests::kBlock);
  std::vector<Extents> shares(1);
  int64_t room = share;
  for (Extent rest : extents) {
    const bool whole = rest.decode || rest.dtype != to;
    while (rest.bytes > 0) {
      if (room <= 0) shares.emplace_back(), room = share;
      Extent piece = rest;
      if (!whole && rest.bytes > room) {
        const auto size = static_cast<int64_t>(c10::elementSize(rest.dtype));
        piece.numel = (room + size - 1) / size;
        piece.bytes = piece.numel * size;
      }
      rest.begin += piece.bytes, rest.bytes -= piece.bytes, rest.offset += piece.numel, rest.numel -= piece.numel;
      room -= piece.bytes;
      shares.back().push_back(std::move(piece));
    }
  }
  return shares;
}

class AllOf final : public Transfer {
 public:
  explicit AllOf(std::vector<std::unique_ptr<Transfer>> transfers) : transfers_(std::move(transfers)) {}
  void wait() override {
    for (auto& transfer : transfers_) transfer->wait();
  }

 private:
  std::vector<std::unique_ptr<Transfer>> transfers_;
};

/// Bytes that readers send on to a device as they get them. The compute stream waits for the copies; the host waits for
/// the disk alone.
class OnDevice final : public Transfer {
 public:
  OnDevice(std::unique_ptr<Transfer> reading, std::vector<std::shared_ptr<c10::Event>> copied, at::Device device)
      : reading_(std::move(reading)), copied_(std::move(copied)), device_(device) {}
  void wait() override {
    reading_->wait();
    const auto stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    for (auto& event : copied_) event->block(stream);
  }

 private:
  std::unique_ptr<Transfer> reading_;
  std::vector<std::shared_ptr<c10::Event>> copied_;
  at::Device device_;
};

/// Room in the scratch file, given back in the end.
struct Changed {
  Changed(std::shared_ptr<SpillFile> spill, int64_t count)
      : file(std::move(spill)), bytes(count), offset(file->reserve(count)) {}
  Changed(const Changed&) = delete;
  Changed& operator=(const Changed&) = delete;
  ~Changed() { file->release(offset, bytes); }
  std::shared_ptr<SpillFile> file;
  int64_t bytes, offset;
};

}  // namespace

struct FileTensors::Files {
  std::map<std::string, TensorInFile> by_tensor;
  std::map<fs::path, std::shared_ptr<OpenFile>> open;
  std::vector<std::shared_ptr<Worker>> workers;
  FileOptions options;
  std::shared_ptr<SpillFile> scratch;  ///< made when something is stored for the first time

  std::shared_ptr<OpenFile> opened(const fs::path& path) {
    auto& file = open[path];
    if (!file) file = std::make_shared<OpenFile>(path, options.direct);
    return file;
  }
  const std::shared_ptr<SpillFile>& spill() {
    if (!scratch)
      scratch = std::make_shared<SpillFile>(
          options.scratch.empty() ? fs::temp_directory_path() : options.scratch,
          SpillFile::Wording{
              .user = "file home",
              .contents = "the changed parameters",
              .advice = "use another scratch folder, or a larger budget so that fewer units have to leave"});
    return scratch;
  }
};

namespace {

class ReadHome final : public Home {
 public:
  ReadHome(const Extents& extents, at::ScalarType dtype, std::vector<std::shared_ptr<Worker>> workers,
           std::function<std::shared_ptr<SpillFile>()> spill)
      : workers_(std::move(workers)), spill_(std::move(spill)) {
    for (const Extent& extent : extents) held_.add(extent.bytes);
    for (auto& share : shared_out(extents, dtype, static_cast<int64_t>(workers_.size())))
      shares_.push_back(std::make_shared<const Extents>(std::move(share)));
  }

  std::unique_ptr<Transfer> fetch(const at::Tensor& flat) override {
    if (flat.is_meta()) return nullptr;  // a dry run
    if (flat.is_cpu()) return read_into(flat, [](const Extents&) {});
    const c10::impl::VirtualGuardImpl device(flat.device().type());
    if (!stream_) stream_ = device.getStreamFromGlobalPool(flat.device(), /*isHighPriority=*/true);
    // The compute stream's work on these bytes (an earlier unit lived in them) comes first.
    c10::Event free(flat.device().type());
    free.record(device.getStream(flat.device()));
    free.block(*stream_);
    const at::Tensor host = at::empty(flat.sizes(), flat.options().device(at::kCPU).pinned_memory(true));
    std::vector<std::shared_ptr<c10::Event>> copied;
    for (size_t i = 0; i < std::max<size_t>(shares_.size(), 1); ++i)
      copied.push_back(std::make_shared<c10::Event>(flat.device().type()));
    auto reading = read_into(host, [host, flat, copied, stream = *stream_,
                                    next = std::make_shared<std::atomic<size_t>>(0)](const Extents& share) {
      const c10::StreamGuard on(stream);
      if (share.empty()) at::Tensor(flat).copy_(host, /*non_blocking=*/true);
      for (const Extent& extent : share)
        flat.narrow(0, extent.offset, extent.numel)
            .copy_(host.narrow(0, extent.offset, extent.numel), /*non_blocking=*/true);
      copied[next->fetch_add(1)]->record(stream);
    });
    flat.record_stream(*stream_);
    if (changed_) copied.resize(1);
    return std::make_unique<OnDevice>(std::move(reading), std::move(copied), flat.device());
  }

  void store(const at::Tensor& flat) override {
    const at::Tensor host = flat.cpu();
    const auto bytes = static_cast<int64_t>(host.nbytes());
    // A new place each time: what fails leaves the old values as they were.
    auto changed = std::make_shared<Changed>(spill_(), bytes);
    changed->file->write(changed->offset, host.const_data_ptr(), bytes);
    changed_ = std::move(changed);
  }
  BytesPlace place() const override { return BytesPlace::file; }

 private:
  /// The readers fill `host`, and call `then` for each share (an empty one stands for everything).
  std::unique_ptr<Transfer> read_into(const at::Tensor& host, const std::function<void(const Extents&)>& then) const {
    std::vector<std::unique_ptr<Transfer>> readings;
    if (changed_) {
      readings.push_back(workers_.front()->run([host, then, changed = changed_] {
        changed->file->read(changed->offset, host.mutable_data_ptr(), changed->bytes);
        then({});
      }));
    } else {
      for (size_t i = 0; i < shares_.size(); ++i)
        readings.push_back(workers_[i % workers_.size()]->run([host, then, share = shares_[i]] {
          for (const Extent& extent : *share) read(extent, host.narrow(0, extent.offset, extent.numel));
          then(*share);
        }));
    }
    if (readings.size() == 1) return std::move(readings.front());
    return std::make_unique<AllOf>(std::move(readings));
  }

  static void read(const Extent& extent, const at::Tensor& to) {
    if (extent.decode) return extent.decode(to);
    if (extent.dtype == to.scalar_type())
      return extent.file->read(extent.begin, static_cast<char*>(to.mutable_data_ptr()), extent.bytes, extent.name);
    const at::Tensor raw = at::empty({extent.numel}, to.options().dtype(extent.dtype));
    extent.file->read(extent.begin, static_cast<char*>(raw.mutable_data_ptr()), extent.bytes, extent.name);
    to.copy_(raw);
  }

  std::vector<std::shared_ptr<const Extents>> shares_;
  std::vector<std::shared_ptr<Worker>> workers_;
  std::function<std::shared_ptr<SpillFile>()> spill_;
  std::optional<c10::Stream> stream_;       ///< of copies to a device
  std::shared_ptr<const Changed> changed_;  ///< null: as in the checkpoint
  HeldBytes held_{HeldFor::offloaded_file};
};

}  // namespace

FileTensors::FileTensors(std::map<std::string, TensorInFile> tensors, std::shared_ptr<Worker> worker,
                         const FileOptions& options)
    : files_(std::make_shared<Files>()) {
  files_->by_tensor = std::move(tensors);
  if (worker) {
    files_->workers.push_back(std::move(worker));
    while (static_cast<int64_t>(files_->workers.size()) < options.readers)
      files_->workers.push_back(std::make_shared<Worker>());
  }
  files_->options = options;
}

namespace {

std::map<std::string, TensorInFile> in_checkpoint(const fs::path& path) {
  std::map<std::string, TensorInFile> tensors;
  for (const auto& [name, file] : open_checkpoint_files(path)) {
    const auto& info = file.info(name);
    tensors[name] = {.file = file.path(),
                     .begin = file.data_begin() + info.begin,
                     .bytes = info.end - info.begin,
                     .dtype = dtype_of(info),
                     .shape = info.shape,
                     .map = [file = file, name = name] { return file.tensor(name); },
                     .decode = {}};
  }
  return tensors;
}

}  // namespace

FileTensors::FileTensors(const fs::path& path, std::shared_ptr<Worker> worker, const FileOptions& options)
    : FileTensors(in_checkpoint(path), std::move(worker), options) {}

bool FileTensors::contains(const std::string& name) const { return files_->by_tensor.contains(name); }

const TensorInFile& FileTensors::find(const std::string& name, const at::Tensor& member) const {
  const auto found = files_->by_tensor.find(name);
  if (found == files_->by_tensor.end())
    raise<CheckpointError>(
        "file home: the checkpoint has no tensor '{}', which the model needs; it has {} others. Is it of "
        "another architecture?",
        name, files_->by_tensor.size());
  const auto& shape = found->second.shape;
  if (!member.sizes().equals(shape))
    raise<CheckpointError>(
        "file home: '{}' in '{}' is of shape {}, expected {} as in the model. Is config.json of another model?", name,
        found->second.file.string(), c10::str(c10::IntArrayRef(shape)), c10::str(member.sizes()));
  return found->second;
}

int64_t FileTensors::bytes(const NamedTensors& members) const {
  int64_t sum = 0;
  for (const auto& [name, member] : members) sum += find(name, member).bytes;
  return sum;
}

bool FileTensors::mappable(const NamedTensors& members, const at::Device& device) const {
  return device.is_cpu() && std::all_of(members.begin(), members.end(), [&](const auto& item) {
           const auto& stored = find(item.first, item.second);
           return item.second.is_contiguous() && stored.map && stored.dtype == item.second.scalar_type();
         });
}

std::vector<PartSpec> FileTensors::mapped(const NamedTensors& members) const {
  if (!mappable(members, at::kCPU))
    throw ConfigError(
        "file home: found members that are not contiguous or of another dtype than in the checkpoint, expected the "
        "files' own to point into them; use read()");
  std::vector<PartSpec> parts;
  for (const auto& [name, member] : members) {
    const at::Tensor value = find(name, member).map();
    PartSpec part;
    part.members = {{name, member}};
    part.layout = {.offsets = {0}, .numel = value.numel()};
    part.dtype = value.scalar_type();
    part.home = memory_home(value.view({-1}), BytesPlace::file);
    parts.push_back(std::move(part));
  }
  return parts;
}

std::vector<PartSpec> FileTensors::read(const NamedTensors& members, const at::Device& device,
                                        std::optional<at::ScalarType> dtype) const {
  if (files_->workers.empty()) throw ConfigError("file home: read parts need a worker, found none");
  std::map<std::pair<at::ScalarType, bool>, NamedTensors> kinds;
  for (const auto& [name, member] : members) {
    if (!member.is_contiguous())
      raise<ConfigError>(
          "file home: found '{}' with strides {}, expected a contiguous parameter, as files hold them; call "
          "contiguous() on it first",
          name, c10::str(member.strides()));
    kinds[{dtype.value_or(member.scalar_type()), member.requires_grad()}].emplace_back(name, member);
  }
  std::vector<PartSpec> parts;
  for (auto& [kind, some] : kinds) {
    std::vector<at::Tensor> tensors;
    for (const auto& [name, member] : some) tensors.push_back(member);
    PartSpec part;
    part.layout = lay_out(tensors, 1, device);
    std::vector<Extent> extents;
    for (size_t i = 0; i < some.size(); ++i) {
      const auto& [name, member] = some[i];
      const auto& stored = find(name, member);
      if (stored.dtype == at::ScalarType::Undefined)
        raise<CheckpointError>(
            "file home: '{}' in '{}' has a dtype that has no LibTorch type with an element per number; convert "
            "the file",
            name, stored.file.string());
      extents.push_back({.file = stored.decode ? nullptr : files_->opened(stored.file),
                         .name = name,
                         .begin = stored.begin,
                         .bytes = stored.bytes,
                         .dtype = stored.dtype,
                         .offset = part.layout.offsets[i],
                         .numel = member.numel(),
                         .decode = stored.decode});
    }
    // In the order of the disk.
    std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
      return std::pair(a.file.get(), a.begin) < std::pair(b.file.get(), b.begin);
    });
    part.members = std::move(some);
    part.dtype = kind.first;
    part.device = device;
    part.home =
        std::make_unique<ReadHome>(extents, kind.first, files_->workers, [files = files_] { return files->spill(); });
    parts.push_back(std::move(part));
  }
  return parts;
}

}  // namespace accelerate::residency
