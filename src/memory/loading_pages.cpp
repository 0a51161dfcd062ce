#include "memory/loading_pages.hpp"

#include <cstddef>
#include <cstdint>

#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

namespace accelerate {

void give_loading_pages_back() {
  ::dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void*) {
        const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const auto& segment = object->dlpi_phdr[i];
          if (segment.p_type != PT_LOAD || (segment.p_flags & PF_W)) continue;
          const uintptr_t first = (object->dlpi_addr + segment.p_vaddr) & ~(page - 1);
          ::madvise(reinterpret_cast<void*>(first), object->dlpi_addr + segment.p_vaddr + segment.p_memsz - first,
                    MADV_DONTNEED);
        }
        return 0;
      },
      nullptr);
}

}  // namespace accelerate
