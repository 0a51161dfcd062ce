#pragma once

namespace support {

/// The fake GPU's memory at an address is open to the host as long as this lives. Other memory, or null: nothing.
class OpenToHost {
 public:
  explicit OpenToHost(const void* memory);
  OpenToHost(const OpenToHost&) = delete;
  OpenToHost& operator=(const OpenToHost&) = delete;
  ~OpenToHost();

 private:
  const void* memory_;
};

}  // namespace support
