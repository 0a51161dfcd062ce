#pragma once

/// Batches whose type is erased. Workers, feeds and prepared loaders (src/data), which carry them about, are ordinary
/// code over `AnyBatch`; all that they ask of a type of batches is one `BatchOps`, which is made from the functions
/// over nested batches once per type.

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/data/rows.hpp"
#include "accelerate/utils/archive.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/nested.hpp"
#include "accelerate/utils/ops.hpp"

namespace accelerate::data::detail {

struct BatchDeleter {
  void (*destroy)(void* batch) noexcept = nullptr;
  void operator()(void* batch) const noexcept { destroy(batch); }
};

/// A batch of some type, owned; null: none. Moving it moves a pointer.
using AnyBatch = std::unique_ptr<void, BatchDeleter>;

template <class Batch> AnyBatch any_batch(Batch&& batch) {
  using T = std::remove_cvref_t<Batch>;
  return AnyBatch(new T(std::forward<Batch>(batch)),
                  BatchDeleter{[](void* erased) noexcept { delete static_cast<T*>(erased); }});
}
/// @param batch  not null, and made from a `Batch`
template <class Batch> Batch& batch_as(const AnyBatch& batch) { return *static_cast<Batch*>(batch.get()); }

/// The batch that one step has read.
struct LoadedBatch {
  AnyBatch batch;
  /// The value of LoaderStatus::remainder() when this is the last one; unset: as the sizes say.
  std::optional<int64_t> remainder;
};

/// The operations on batches of one type. All batches that are passed are of that type and not null. Any thread may
/// call them.
class ACCELERATE_API BatchOps {
 public:
  /// See rows_of.
  virtual int64_t rows(const AnyBatch& batch) const = 0;
  /// Of its tensors.
  virtual int64_t bytes(const AnyBatch& batch) const = 0;
  /// Rows [begin, end) of a batch of `rows` rows; tensors as views.
  virtual AnyBatch slice(const AnyBatch& batch, int64_t begin, int64_t end, int64_t rows) const = 0;
  /// One batch with the rows of all, of which there is at least one; of one alone a copy, with the same tensors.
  /// @throws ShapeError when they don't fit together.
  virtual AnyBatch concat(const std::vector<const AnyBatch*>& batches) const = 0;
  virtual void to_device(AnyBatch& batch, const at::Device& device, bool non_blocking) const = 0;
  virtual void pin_memory(AnyBatch& batch) const = 0;
  /// Whether batches can be written and read. If not, these two throw ConfigError.
  virtual bool archivable() const = 0;
  virtual void write(const AnyBatch& batch, ArchiveWriter& writer) const = 0;
  virtual AnyBatch read(ArchiveReader& reader) const = 0;

  AnyBatch concat(const std::vector<AnyBatch>& batches) const;
  /// `batch` with rows of `from` (from its start, again and again) appended until it has `rows` rows.
  AnyBatch complete(const AnyBatch& batch, const AnyBatch& from, int64_t rows) const;

 protected:
  ~BatchOps() = default;
};

[[noreturn]] ACCELERATE_API void throw_not_archivable();

template <class Batch> class BatchOpsOf final : public BatchOps {
 public:
  int64_t rows(const AnyBatch& batch) const override { return rows_of(of(batch)); }
  int64_t bytes(const AnyBatch& batch) const override {
    int64_t sum = 0;
    nested::for_each_tensor(of(batch), [&](const at::Tensor& t) {
      if (t.defined()) sum += static_cast<int64_t>(t.nbytes());
    });
    return sum;
  }
  AnyBatch slice(const AnyBatch& batch, int64_t begin, int64_t end, int64_t rows) const override {
    return any_batch(slice_rows(of(batch), begin, end, rows));
  }
  AnyBatch concat(const std::vector<const AnyBatch*>& batches) const override {
    std::vector<const Batch*> typed;
    for (const AnyBatch* batch : batches) typed.push_back(&of(*batch));
    return any_batch(concat_rows(std::span<const Batch* const>(typed)));
  }
  void to_device(AnyBatch& batch, const at::Device& device, bool non_blocking) const override {
    nested::update_tensors(batch_as<Batch>(batch),
                           [&](const at::Tensor& t) { return ops::to_device(t, device, non_blocking); });
  }
  void pin_memory(AnyBatch& batch) const override {
    nested::update_tensors(batch_as<Batch>(batch), [](const at::Tensor& t) { return ops::pin_memory(t); });
  }
  bool archivable() const override { return accelerate::archivable<Batch>; }
  void write(const AnyBatch& batch, ArchiveWriter& writer) const override {
    if constexpr (accelerate::archivable<Batch>) writer.write(of(batch));
    else throw_not_archivable();
  }
  AnyBatch read(ArchiveReader& reader) const override {
    if constexpr (accelerate::archivable<Batch>) {
      Batch batch{};
      reader.read(batch);
      return any_batch(std::move(batch));
    } else {
      throw_not_archivable();
    }
  }

 private:
  static const Batch& of(const AnyBatch& batch) { return batch_as<Batch>(batch); }
};

template <class Batch> inline constexpr BatchOpsOf<Batch> batch_ops{};

}  // namespace accelerate::data::detail
