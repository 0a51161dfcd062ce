#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace accelerate {

/// Names of functions by address. Also those that are not exported, from the symbol tables of programs and libraries
/// that have not been stripped; those are read once for each.
class Symbols {
 public:
  struct Function {
    std::string symbol;  ///< its name as the linker knows it; empty: nobody says
    size_t offset = 0;   ///< of the address, behind its begin
    std::string file;    ///< the program or library, without folders
    size_t address = 0;  ///< in the file, as addr2line wants it
  };
  Symbols();
  ~Symbols();
  /// @param returns_to  the instruction behind a call: the call is meant. @return nothing: no file has it in memory
  std::optional<Function> find(const void* address, bool returns_to);
  /// "accelerate::comm::Group::barrier()+0x45 in libaccelerate.so (0x1234)", for people: addr2line wants the number in
  /// brackets. Without a name only where it is. @param returns_to  as above
  std::string describe(const void* address, bool returns_to);

 private:
  struct Table;
  std::map<std::string, std::unique_ptr<Table>> tables_;  ///< by file
};

}  // namespace accelerate
