#pragma once

#include <map>
#include <memory>
#include <string>

namespace accelerate {

/// Names of functions by address, for people. Also those that are not exported, from the symbol tables of programs and
/// libraries that have not been stripped; those are read once for each.
class Symbols {
 public:
  Symbols();
  ~Symbols();
  /// "accelerate::comm::Group::barrier()+0x45 in libaccelerate.so (0x1234)": the number in brackets is what addr2line
  /// wants. Without a name only where it is. @param returns_to  the instruction behind a call: the call is meant
  std::string describe(const void* address, bool returns_to);

 private:
  struct Table;
  std::map<std::string, std::unique_ptr<Table>> tables_;  ///< by file
};

}  // namespace accelerate
