#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace accelerate::residency {

struct EncodedWeight;

/// Bytes on their way. Destroying one that was not waited for waits too, and drops the error.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Blocks until the bytes are there (on a GPU: until the compute stream will find them there). @throws what the
  /// transfer threw.
  virtual void wait() = 0;
};

enum class BytesPlace { memory, host, file, shards };

/// The place of one flat storage's bytes while nobody computes with them. The residency calls it from one thread at a
/// time, in the order of touches. `flat` is 1-D, contiguous, of the unit's compute dtype and device, and without the
/// residency's dispatch key.
class Home {
 public:
  virtual ~Home() = default;

  /// Starts to fill `flat`; null when it is filled already. `flat` stays alive until the transfer has been waited for.
  virtual std::unique_ptr<Transfer> fetch(const at::Tensor& flat) = 0;

  /// Takes the values back: somebody wrote into `flat`, an operator or code that goes around them. Blocks.
  virtual void store(const at::Tensor& flat) = 0;

  /// `flat` is about to go, and will be wanted again before its values change: a home may keep what makes the next
  /// fetch() cheaper, until then or until forget().
  virtual void keep_for_backward(const at::Tensor& flat) { static_cast<void>(flat); }
  virtual void forget() {}

  /// A home whose bytes can be computed with where they lie (a mapping, plain memory) gives them here once, and neither
  /// fetches nor stores.
  virtual std::optional<at::Tensor> mapped() { return std::nullopt; }

  /// For people: what kind of place it is. `memory`: that of the unit's device.
  virtual BytesPlace place() const { return BytesPlace::memory; }

  /// How many processes a mapped home's bytes are shared by: each counts its share.
  virtual int64_t sharers() const { return 1; }
  /// For bytes that are shared and may change: the elements whose values this process decides. None may change what the
  /// others compute with, so a writer gets a copy of its own, see Residency::share_again(). Empty: nothing of that.
  struct OwnSlice {
    int64_t begin = 0, length = 0;
  };
  virtual OwnSlice own() const { return {}; }

  /// Set for a home that keeps values of its own, in this dtype, beside the flat storage (a shard, masters): what an
  /// operator writes reaches them at once, in their precision. The flat storage is then never stored for an operator.
  virtual std::optional<at::ScalarType> keeps() const { return std::nullopt; }
  /// `values`, of that dtype, are elements of the flat storage from `begin` on: those that are kept here become exact.
  virtual void refine(int64_t begin, const at::Tensor& values) const {
    static_cast<void>(begin), static_cast<void>(values);
  }
  /// An operator has left these values.
  virtual void take(int64_t begin, const at::Tensor& values) { static_cast<void>(begin), static_cast<void>(values); }
  /// Another number when what is kept has changed, by whomever: a flat storage that was filled before is out of date.
  virtual int64_t version() const { return 0; }

  /// Whether fetch() is a collective, so that all ranks must touch units in one order.
  virtual bool collective() const { return false; }

  /// The weight of a home of one weight in few bits. Valid as long as the home.
  virtual EncodedWeight* encoded() const { return nullptr; }

  /// For a home that keeps values: whether what is fetched has lost more of them than its dtype loses.
  virtual bool lossy() const { return false; }
  /// For a home that keeps values: whether it takes them in fewer bits than it gives, so that what was written is not
  /// what the next fetch() brings.
  virtual bool rounds() const { return false; }
};

}  // namespace accelerate::residency
