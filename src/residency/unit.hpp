#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "residency/home.hpp"
#include "residency/member.hpp"

namespace accelerate::residency {

class Residency;

/// The place of each tensor of a part in its flat storage.
struct Layout {
  std::vector<int64_t> offsets;  ///< elements; every one aligned
  int64_t numel = 0;             ///< of the flat storage, padded
};

/// Starts are aligned as fresh tensors are, because kernels may round differently on other alignments: to 64 bytes of a
/// 4-byte type on the host, to 256 bytes of a 2-byte type on an accelerator `device` (cuBLASLt looks at so many). The
/// end is padded so that `shards` equal shards are aligned too. @param block  starts and shards are whole ones, too
Layout lay_out(const std::vector<at::Tensor>& tensors, int64_t shards = 1, const at::Device& device = at::kCPU,
               int64_t block = 1);

/// The ingredients of a part, before it is one.
struct PartSpec {
  NamedTensors members;
  Layout layout;
  at::ScalarType dtype = at::kFloat;  ///< compute dtype of the flat storage
  at::Device device = at::kCPU;
  std::unique_ptr<Home> home;
  /// The error for code that asks for absent bytes, by the member's name; null: that of parameters.
  std::string (*absent)(const std::string& name) = nullptr;
  bool slice_is_last = false;  ///< of the members: no parameter, but home->own()
};

/// One flat storage of one dtype, with the members that lie in it.
struct Part {
  std::string (*absent)(const std::string& name) = nullptr;
  std::vector<std::unique_ptr<Member>> members;
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  std::unique_ptr<Home> home;
  at::Tensor mapped;  ///< defined: the bytes are always there
  at::Tensor flat;    ///< defined while fetching and resident
  std::unique_ptr<Transfer> transfer;
  int64_t version = 0;  ///< the home's, when the flat storage was filled
  at::Tensor before;    ///< while raw writes are to be lost: what a private copy holds

  int64_t bytes() const { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }
  /// The bytes that this process has to hold for it while it is present.
  int64_t resident_bytes() const { return bytes() / home->sharers(); }
};

enum class State { absent, fetching, resident };

/// The tensors that move as one: a transformer block, say. Its parts differ in dtype or in whether they are trained.
/// Members that change belong to its Residency, whose mutex guards them (the check can't follow that from one object
/// into another).
class Unit {
 public:
  Unit(Residency& owner, int32_t index, std::string name, bool keep)
      : owner_(owner), index_(index), name_(std::move(name)), keep_(keep) {}

  Residency& owner() const { return owner_; }
  int32_t index() const { return index_; }
  const std::string& name() const { return name_; }
  /// Stays while others come and go, until all are released: the root, whose parameters are used at the start and the
  /// end.
  bool keep() const { return keep_; }
  /// Its bytes never go.
  bool fixed() const { return fixed_; }
  /// Whether this process has a copy of bytes that others compute with, because it has written to them.
  bool is_private() const { return private_; }
  /// Operators work on its bytes as on plain tensors, see RawAccess::Writes::alone. Asked on the thread that trains.
  bool is_alone() const { return alone_ > 0; }
  void note_alone(int64_t more) { alone_ += more; }
  const std::vector<Part>& parts() const { return parts_; }
  State state() const { return state_; }
  int64_t bytes() const;

 private:
  friend class Residency;
  Residency& owner_;
  int32_t index_;
  std::string name_;
  bool keep_;
  bool fixed_ = false;  ///< its bytes are always there
  bool private_ = false;
  int64_t open_ = 0;                         ///< scopes in which its bytes are there for anybody
  int64_t alone_ = 0;                        ///< scopes that ask for this
  int64_t discards_ = 0;                     ///< those in which what is written is lost at their end
  std::atomic<bool> pieces_written_{false};  ///< by ranks, each its own: nobody has seen the others' yet
  bool has_image_ = false;                   ///< of masters in another dtype, whose bytes are always there
  bool writes_through_ = false;              ///< what operators write reaches its homes at once
  std::vector<Part> parts_;
  State state_ = State::absent;
  int64_t pins_ = 0;
  bool dirty_ = false;
  int64_t last_use_ = 0;
};

}  // namespace accelerate::residency
