#include "weft/device/symbols.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string_view>

#include <c10/util/Exception.h>

namespace weft::device {
namespace {

struct Replacement {
  std::string_view name;
  void* function;
  int count;
};

/// What the dynamic section of a library says of its relocations.
struct Tables {
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela) * plt = nullptr;
  const ElfW(Rela) * data = nullptr;
  size_t plt_bytes = 0, data_bytes = 0;
};

Tables read_tables(const dl_phdr_info& library) {
  Tables found;
  for (int i = 0; i < library.dlpi_phnum; ++i) {
    if (library.dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const auto* entry = reinterpret_cast<const ElfW(Dyn)*>(library.dlpi_addr + library.dlpi_phdr[i].p_vaddr);
    for (; entry->d_tag != DT_NULL; ++entry) {
      const auto address = entry->d_un.d_ptr;  // absolute: the loader has relocated it
      switch (entry->d_tag) {
        case DT_SYMTAB:
          found.symbols = reinterpret_cast<const ElfW(Sym)*>(address);
          break;
        case DT_STRTAB:
          found.names = reinterpret_cast<const char*>(address);
          break;
        case DT_JMPREL:
          found.plt = reinterpret_cast<const ElfW(Rela)*>(address);
          break;
        case DT_RELA:
          found.data = reinterpret_cast<const ElfW(Rela)*>(address);
          break;
        case DT_PLTRELSZ:
          found.plt_bytes = entry->d_un.d_val;
          break;
        case DT_RELASZ:
          found.data_bytes = entry->d_un.d_val;
          break;
        default:
          break;
      }
    }
  }
  return found;
}

/// Writes one entry of a table that the loader may have made read-only.
void write_entry(void** entry, void* function) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* start = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(entry) & ~(page - 1));
  TORCH_CHECK(mprotect(start, page, PROT_READ | PROT_WRITE) == 0,
              "simulated device: mprotect failed: ", std::strerror(errno),
              ". This system does not let a process change the references of its libraries.");
  *entry = function;
}

int replace_in(const dl_phdr_info& library, const Tables& tables, const ElfW(Rela) * table, size_t bytes,
               const Replacement& wanted) {
  int count = 0;
  for (size_t i = 0; table && i < bytes / sizeof(*table); ++i) {
    const auto symbol = ELF64_R_SYM(table[i].r_info);
    if (symbol == 0 || wanted.name != tables.names + tables.symbols[symbol].st_name) continue;
    write_entry(reinterpret_cast<void**>(library.dlpi_addr + table[i].r_offset), wanted.function);
    ++count;
  }
  return count;
}

int visit(dl_phdr_info* library, size_t, void* data) {
  const std::string_view path = library->dlpi_name ? library->dlpi_name : "";
  const auto file = path.substr(path.rfind('/') + 1);
  if (!file.starts_with("libtorch") && !file.starts_with("libc10")) return 0;
  auto& wanted = *static_cast<Replacement*>(data);
  const auto tables = read_tables(*library);
  if (!tables.symbols || !tables.names) return 0;
  wanted.count += replace_in(*library, tables, tables.plt, tables.plt_bytes, wanted);
  wanted.count += replace_in(*library, tables, tables.data, tables.data_bytes, wanted);
  return 0;
}

}  // namespace

int replace_symbol(const char* mangled_name, void* function) {
  Replacement wanted{mangled_name, function, 0};
  dl_iterate_phdr(visit, &wanted);
  return wanted.count;
}

}  // namespace weft::device
