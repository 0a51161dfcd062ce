#include "residency/homes/file.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <system_error>
#include <utility>

#include "accelerate/error.hpp"
#include "formats/safetensors_dtypes.hpp"
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

constexpr int64_t kBlock = 4096;         ///< direct reads begin and end on multiples of it, in the file and in memory
constexpr int64_t kWindow = 1 << 20;     ///< bytes of one direct read: large for a disk, small for a cache

/// Aligned memory of the reading thread.
char* window() {
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  thread_local const std::unique_ptr<void, Free> memory(std::aligned_alloc(kBlock, kWindow));
  if (!memory) throw std::bad_alloc();
  return static_cast<char*>(memory.get());
}

/// One file, open for reading by several threads.
class OpenFile {
 public:
  OpenFile(const fs::path& path, bool direct) : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (file_ < 0) throw CheckpointError("file home: can't open '" + path.string() + "': " + std::generic_category().message(errno) + ". Check the path and the rights.");
    if (direct) direct_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);  // EINVAL where the file system has no such thing
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
    while (count > 0) {
      const auto got = ::pread(file_, data, static_cast<size_t>(count), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) fail(name, offset, count, got < 0 ? errno : 0);
      data += got, offset += got, count -= got;
    }
  }

 private:
  /// Through the window, because tensors begin where they like. @return false: this file system can't after all.
  bool read_direct(int64_t offset, char* data, int64_t count, const std::string& name) const {
    char* const memory = window();
    while (count > 0) {
      const int64_t begin = offset / kBlock * kBlock, skip = offset - begin;
      const int64_t length = std::min(kWindow, (skip + count + kBlock - 1) / kBlock * kBlock);
      const auto got = ::pread(direct_, memory, static_cast<size_t>(length), begin);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EINVAL) {
        direct_works_ = false;
        return false;
      }
      if (got <= skip) fail(name, offset, count, got < 0 ? errno : 0);
      const int64_t useful = std::min(got - skip, count);
      std::memcpy(data, memory + skip, static_cast<size_t>(useful));
      data += useful, offset += useful, count -= useful;
    }
    return true;
  }

  [[noreturn]] void fail(const std::string& name, int64_t offset, int64_t left, int error) const {
    const std::string where = "file home: reading '" + name + "' from '" + path_.string() + "': ";
    if (error) throw CheckpointError(where + std::generic_category().message(error) + " at byte " + std::to_string(offset) + ". Check the disk, or the connection to it.");
    throw CheckpointError(where + "the file ends at byte " + std::to_string(offset) + ", where " + std::to_string(left) +
                          " more were expected; it has been shortened since it was opened. Put the checkpoint back, and don't change it while a model is computed from it.");
  }

  fs::path path_;
  int file_ = -1, direct_ = -1;
  mutable std::atomic<bool> direct_works_{true};
};

/// Where one member's bytes are.
struct Extent {
  std::shared_ptr<OpenFile> file;
  std::string name;
  int64_t begin, bytes;   ///< in the file
  at::ScalarType dtype;   ///< there
  int64_t offset, numel;  ///< in the flat storage, elements
};

/// The disk has the bytes; `wait` brings them to the device.
class ToDevice final : public Transfer {
 public:
  ToDevice(std::unique_ptr<Transfer> reading, at::Tensor host, at::Tensor flat) : reading_(std::move(reading)), host_(std::move(host)), flat_(std::move(flat)) {}
  void wait() override {
    reading_->wait();
    flat_.copy_(host_);
  }

 private:
  std::unique_ptr<Transfer> reading_;
  at::Tensor host_, flat_;
};

/// Room in the scratch file, given back in the end.
struct Changed {
  Changed(std::shared_ptr<SpillFile> spill, int64_t count) : file(std::move(spill)), bytes(count), offset(file->reserve(count)) {}
  Changed(const Changed&) = delete;
  Changed& operator=(const Changed&) = delete;
  ~Changed() { file->release(offset, bytes); }
  std::shared_ptr<SpillFile> file;
  int64_t bytes, offset;
};

}  // namespace

struct FileTensors::Files {
  std::map<std::string, SafetensorsFile> by_tensor;
  std::map<fs::path, std::shared_ptr<OpenFile>> open;
  std::shared_ptr<Worker> worker;
  FileOptions options;
  std::shared_ptr<SpillFile> scratch;  ///< made when something is stored for the first time

  std::shared_ptr<OpenFile> opened(const fs::path& path) {
    auto& file = open[path];
    if (!file) file = std::make_shared<OpenFile>(path, options.direct);
    return file;
  }
  const std::shared_ptr<SpillFile>& spill() {
    if (!scratch)
      scratch = std::make_shared<SpillFile>(options.scratch.empty() ? fs::temp_directory_path() : options.scratch,
                                            SpillFile::Wording{.user = "file home", .contents = "the changed parameters", .advice = "use another scratch folder, or a larger budget so that fewer units have to leave"});
    return scratch;
  }
};

namespace {

class ReadHome final : public Home {
 public:
  ReadHome(std::vector<Extent> extents, std::shared_ptr<Worker> worker, std::function<std::shared_ptr<SpillFile>()> spill)
      : extents_(std::make_shared<const std::vector<Extent>>(std::move(extents))), worker_(std::move(worker)), spill_(std::move(spill)) {}

  std::unique_ptr<Transfer> fetch(const at::Tensor& flat) override {
    const at::Tensor host = flat.is_cpu() ? flat : at::empty(flat.sizes(), flat.options().device(at::kCPU));
    auto reading = worker_->run([host, extents = extents_, changed = changed_] {
      if (changed) changed->file->read(changed->offset, host.mutable_data_ptr(), changed->bytes);
      else for (const Extent& extent : *extents) read(extent, host.narrow(0, extent.offset, extent.numel));
    });
    if (flat.is_cpu()) return reading;
    return std::make_unique<ToDevice>(std::move(reading), host, flat);
  }

  void store(const at::Tensor& flat) override {
    const at::Tensor host = flat.cpu();
    const auto bytes = static_cast<int64_t>(host.nbytes());
    // A new place each time: what fails leaves the old values as they were.
    auto changed = std::make_shared<Changed>(spill_(), bytes);
    changed->file->write(changed->offset, host.const_data_ptr(), bytes);
    changed_ = std::move(changed);
  }

 private:
  static void read(const Extent& extent, at::Tensor to) {
    if (extent.dtype == to.scalar_type()) return extent.file->read(extent.begin, static_cast<char*>(to.mutable_data_ptr()), extent.bytes, extent.name);
    const at::Tensor raw = at::empty({extent.numel}, to.options().dtype(extent.dtype));
    extent.file->read(extent.begin, static_cast<char*>(raw.mutable_data_ptr()), extent.bytes, extent.name);
    to.copy_(raw);
  }

  std::shared_ptr<const std::vector<Extent>> extents_;
  std::shared_ptr<Worker> worker_;
  std::function<std::shared_ptr<SpillFile>()> spill_;
  std::shared_ptr<const Changed> changed_;  ///< null: as in the checkpoint
};

}  // namespace

FileTensors::FileTensors(const fs::path& path, std::shared_ptr<Worker> worker, const FileOptions& options) : files_(std::make_shared<Files>()) {
  files_->by_tensor = open_checkpoint_files(path);
  files_->worker = std::move(worker);
  files_->options = options;
}

bool FileTensors::contains(const std::string& name) const { return files_->by_tensor.contains(name); }

const SafetensorsFile& FileTensors::file_of(const std::string& name, const at::Tensor& member) const {
  const auto found = files_->by_tensor.find(name);
  if (found == files_->by_tensor.end()) throw CheckpointError("file home: the checkpoint has no tensor '" + name + "', which the model needs; it has " + std::to_string(files_->by_tensor.size()) + " others. Is it of another architecture?");
  const auto& shape = found->second.info(name).shape;
  if (!member.sizes().equals(shape))
    throw CheckpointError("file home: '" + name + "' in '" + found->second.path().string() + "' is of shape " + c10::str(c10::IntArrayRef(shape)) + ", expected " + c10::str(member.sizes()) + " as in the model. Is config.json of another model?");
  return found->second;
}

int64_t FileTensors::bytes(const NamedTensors& members) const {
  int64_t sum = 0;
  for (const auto& [name, member] : members) {
    const auto& info = file_of(name, member).info(name);
    sum += info.end - info.begin;
  }
  return sum;
}

bool FileTensors::mappable(const NamedTensors& members, const at::Device& device) const {
  return device.is_cpu() && std::all_of(members.begin(), members.end(), [&](const auto& item) {
           return item.second.is_contiguous() && dtype_of(file_of(item.first, item.second).info(item.first)) == item.second.scalar_type();
         });
}

bool FileTensors::fits(int64_t bytes, std::optional<int64_t> budget_bytes) {
  if (budget_bytes) return bytes <= *budget_bytes;
  std::ifstream in("/proc/meminfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("MemAvailable:")) return bytes / 1024 <= std::stoll(line.substr(line.find(':') + 1));
  return false;
}

std::vector<PartSpec> FileTensors::mapped(const NamedTensors& members) const {
  if (!mappable(members, at::kCPU)) throw ConfigError("file home: found members that are not contiguous or of another dtype than in the checkpoint, expected the files' own to point into them; use read()");
  std::vector<PartSpec> parts;
  for (const auto& [name, member] : members) {
    const at::Tensor value = file_of(name, member).tensor(name);
    PartSpec part;
    part.members = {{name, member}};
    part.layout = {.offsets = {0}, .numel = value.numel()};
    part.dtype = value.scalar_type();
    part.home = memory_home(value.view({-1}));
    parts.push_back(std::move(part));
  }
  return parts;
}

std::vector<PartSpec> FileTensors::read(const NamedTensors& members, const at::Device& device) const {
  if (!files_->worker) throw ConfigError("file home: read parts need a worker, found none");
  std::map<std::pair<at::ScalarType, bool>, NamedTensors> kinds;
  for (const auto& [name, member] : members) {
    if (!member.is_contiguous()) throw ConfigError("file home: found '" + name + "' with strides " + c10::str(member.strides()) + ", expected a contiguous parameter, as files hold them; call contiguous() on it first");
    kinds[{member.scalar_type(), member.requires_grad()}].emplace_back(name, member);
  }
  std::vector<PartSpec> parts;
  for (auto& [kind, some] : kinds) {
    std::vector<at::Tensor> tensors;
    for (const auto& [name, member] : some) tensors.push_back(member);
    PartSpec part;
    part.layout = lay_out(tensors);
    std::vector<Extent> extents;
    for (size_t i = 0; i < some.size(); ++i) {
      const auto& [name, member] = some[i];
      const auto& file = file_of(name, member);
      const auto& info = file.info(name);
      if (dtype_of(info) == at::ScalarType::Undefined)
        throw CheckpointError("file home: '" + name + "' in '" + file.path().string() + "' has dtype " + info.dtype + ", expected one of LibTorch's with an element per number; convert the file");
      extents.push_back({.file = files_->opened(file.path()),
                         .name = name,
                         .begin = file.data_begin() + info.begin,
                         .bytes = info.end - info.begin,
                         .dtype = dtype_of(info),
                         .offset = part.layout.offsets[i],
                         .numel = member.numel()});
    }
    // In the order of the disk.
    std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return std::pair(a.file.get(), a.begin) < std::pair(b.file.get(), b.begin); });
    part.members = std::move(some);
    part.dtype = kind.first;
    part.device = device;
    part.home = std::make_unique<ReadHome>(std::move(extents), files_->worker, [files = files_] { return files->spill(); });
    parts.push_back(std::move(part));
  }
  return parts;
}

}  // namespace accelerate::residency
