#include "observe/symbols.hpp"

#include <c10/util/Type.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "utils/fd.hpp"
#include "utils/raise.hpp"

namespace accelerate {

/// A file of which this process runs code, mapped: its table of symbols (.symtab), as far as it has one.
struct Symbols::Table {
  explicit Table(const std::string& file) {
    const Fd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status {};
    if (!fd || ::fstat(fd.get(), &status) != 0 || status.st_size < static_cast<off_t>(sizeof(ElfW(Ehdr)))) return;
    size = static_cast<size_t>(status.st_size);
    void* const mapped = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
    if (mapped == MAP_FAILED) return;
    bytes = static_cast<const char*>(mapped);
    read();
  }
  ~Table() {
    if (bytes) ::munmap(const_cast<char*>(bytes), size);
  }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  /// Nothing when it reaches beyond the file.
  template <class T> std::span<const T> part(size_t offset, size_t count) const {
    if (offset % alignof(T) != 0 || offset > size || count > (size - offset) / sizeof(T)) return {};
    return {reinterpret_cast<const T*>(bytes + offset), count};
  }

  void read() {
    const auto head = part<ElfW(Ehdr)>(0, 1);
    if (head.empty() || std::memcmp(head[0].e_ident, ELFMAG, SELFMAG) != 0) return;
    const auto sections = part<ElfW(Shdr)>(head[0].e_shoff, head[0].e_shnum);
    for (const auto& section : sections) {
      if (section.sh_type != SHT_SYMTAB || section.sh_link >= sections.size()) continue;
      const auto& strings = sections[section.sh_link];
      names = part<char>(strings.sh_offset, strings.sh_size);
      if (names.empty() || names.back() != '\0') return;
      for (const auto& symbol : part<ElfW(Sym)>(section.sh_offset, section.sh_size / sizeof(ElfW(Sym))))
        if ((symbol.st_info & 0xf) == STT_FUNC && symbol.st_size > 0 && symbol.st_name < names.size())
          functions.push_back(&symbol);
    }
    std::sort(functions.begin(), functions.end(), [](auto* a, auto* b) { return a->st_value < b->st_value; });
  }

  /// The function's name, and how far behind its begin.
  std::optional<std::pair<const char*, size_t>> find(size_t address) const {
    auto next = std::upper_bound(functions.begin(), functions.end(), address,
                                 [](size_t value, auto* symbol) { return value < symbol->st_value; });
    if (next == functions.begin()) return std::nullopt;
    const auto& symbol = **--next;
    if (address - symbol.st_value >= symbol.st_size) return std::nullopt;
    return std::pair(names.data() + symbol.st_name, address - symbol.st_value);
  }

  const char* bytes = nullptr;
  size_t size = 0;
  std::span<const char> names;
  std::vector<const ElfW(Sym)*> functions;
};

Symbols::Symbols() = default;
Symbols::~Symbols() = default;

std::optional<Symbols::Function> Symbols::find(const void* address, bool returns_to) {
  const auto place = reinterpret_cast<size_t>(address) - (returns_to ? 1 : 0);
  auto* const point = reinterpret_cast<void*>(place);  // NOLINT(performance-no-int-to-ptr): an address of code
  dl_find_object object{};
  if (::_dl_find_object(point, &object) != 0) return std::nullopt;
  // The program's own name may be one relative to a folder that is not the current one any more.
  const bool program = object.dlfo_link_map->l_name[0] == '\0';
  const std::string file = program ? "/proc/self/exe" : object.dlfo_link_map->l_name;
  std::error_code ignored;
  const auto path = program ? std::filesystem::read_symlink(file, ignored) : std::filesystem::path(file);
  Function function{.symbol = {}, .offset = 0, .file = path.filename().string(), .address = {}};
  function.address = place - static_cast<size_t>(object.dlfo_link_map->l_addr);
  auto& table = tables_[file];
  if (!table) table = std::make_unique<Table>(file);
  Dl_info info{};
  if (const auto found = table->find(function.address)) {
    function.symbol = found->first;
    function.offset = found->second;
  } else if (::dladdr(point, &info) != 0 && info.dli_sname) {  // looks at all names of the file: a millisecond
    function.symbol = info.dli_sname;
    function.offset = place - reinterpret_cast<size_t>(info.dli_saddr);
  }
  return function;
}

std::string Symbols::describe(const void* address, bool returns_to) {
  constexpr size_t kLongest = 200;  // LibTorch's templates have names of thousands of letters
  const auto function = find(address, returns_to);
  if (!function) return fmt::format("{}", address);
  std::string text;
  if (!function->symbol.empty())
    text = fmt::format("{}+{:#x}", c10::demangle(function->symbol.c_str()), function->offset);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return fmt::format("{}{}{} ({:#x})", text, text.empty() ? "" : " in ", function->file, function->address);
}

}  // namespace accelerate
