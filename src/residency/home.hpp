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

enum class Place { memory, host, file, shards };

/// Where the bytes of one flat storage are while nobody computes with them. The residency calls it from one thread at a
/// time, in the order of touches. `flat` is 1-D, contiguous, of the unit's compute dtype and device, and without the
/// residency's dispatch key.
class Home {
 public:
  virtual ~Home() = default;

  /// Starts to fill `flat`; null when it is filled already. `flat` stays alive until the transfer has been waited for.
  virtual std::unique_ptr<Transfer> fetch(const at::Tensor& flat) = 0;

  /// Takes the values back: somebody wrote into `flat`. Blocks.
  virtual void store(const at::Tensor& flat) = 0;

  /// `flat` is about to go, and will be wanted again before its values change: a home may keep what makes the next
  /// fetch() cheaper, until then or until forget().
  virtual void keep_for_backward(const at::Tensor& flat) { static_cast<void>(flat); }
  virtual void forget() {}

  /// A home whose bytes can be computed with where they lie (a mapping, plain memory) gives them here once, and neither
  /// fetches nor stores.
  virtual std::optional<at::Tensor> mapped() { return std::nullopt; }

  /// For people: what kind of place it is. `memory`: that of the unit's device.
  virtual Place place() const { return Place::memory; }

  /// How many processes a mapped home's bytes are shared by: each counts its share.
  virtual int64_t sharers() const { return 1; }

  /// Whether fetch() is a collective, so that all ranks must touch units in one order.
  virtual bool collective() const { return false; }

  /// Of a home of one weight in few bits: it. Valid as long as the home.
  virtual EncodedWeight* encoded() const { return nullptr; }
};

}  // namespace accelerate::residency
