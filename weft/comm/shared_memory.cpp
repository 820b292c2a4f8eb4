#include "weft/comm/shared_memory.h"

#include <c10/util/Exception.h>
#include <c10/util/error.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "weft/comm/free_memory.h"

namespace weft::comm {
namespace {

constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;

[[noreturn]] void throw_out_of_memory(size_t bytes, const std::string& reason) {
  C10_THROW_ERROR(OutOfMemoryError, c10::str("Cannot allocate ", bytes, " bytes of shared memory: ", reason, "."));
}

/// Allocates every page of the file, in huge pages where the system allows them for shared memory.
void allocate(int file, std::byte* data, size_t bytes) {
  ::madvise(data, bytes, MADV_HUGEPAGE);
  // Reports full memory as an error instead of SIGBUS. Old kernels return EINVAL; fallocate then allocates all pages.
  if (::madvise(data, bytes, MADV_POPULATE_WRITE) != 0 && errno != EINVAL)
    throw_out_of_memory(bytes, c10::utils::str_error(errno));
  int error = 0;
  do {
    error = ::fallocate(file, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error != 0) throw_out_of_memory(bytes, c10::utils::str_error(error));
}

}  // namespace

bool SharedMemory::map_file() {
  void* address = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (address == MAP_FAILED) return false;
  data_ = static_cast<std::byte*>(address);
  return true;
}

SharedMemory::~SharedMemory() {
  if (data_) ::munmap(data_, bytes_);
}

std::shared_ptr<SharedMemory> SharedMemory::make(size_t bytes) {
  TORCH_CHECK_VALUE(bytes > 0, "SharedMemory: expected more than 0 bytes, got 0.");
  // Beyond the limit the kernel does not return an error; its OOM killer ends a process.
  const size_t available = free_memory();
  if (bytes > available) throw_out_of_memory(bytes, c10::str("only ", available, " bytes are available"));
  UniqueFd file(::memfd_create("weft", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file || ::fchmod(file.get(), 0600) != 0 || ::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0)
    throw_out_of_memory(bytes, c10::utils::str_error(errno));
  std::shared_ptr<SharedMemory> memory(new SharedMemory(std::move(file), bytes));
  if (!memory->map_file()) throw_out_of_memory(bytes, c10::utils::str_error(errno));
  allocate(memory->file_.get(), memory->data_, bytes);
  if (::fcntl(memory->file_.get(), F_ADD_SEALS, kSeals) != 0) throw_out_of_memory(bytes, c10::utils::str_error(errno));
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::map(UniqueFd file, size_t bytes, const std::string& owner) {
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals)
    C10_THROW_ERROR(DistError,
                    c10::str("The file descriptor from ", owner, " is not a memfd sealed against resizing."));
  struct stat status = {};
  if (::fstat(file.get(), &status) != 0 || status.st_size < 0 || static_cast<size_t>(status.st_size) != bytes)
    C10_THROW_ERROR(DistError,
                    c10::str("The shared memory of ", owner, " has ", status.st_size, " bytes, expected ", bytes, "."));
  if (static_cast<size_t>(status.st_blocks) * 512 < bytes)
    C10_THROW_ERROR(DistError, c10::str("The shared memory of ", owner, " is not fully allocated."));
  std::shared_ptr<SharedMemory> memory(new SharedMemory(std::move(file), bytes));
  if (!memory->map_file())
    C10_THROW_ERROR(DistError, c10::str("Cannot map the shared memory of ", owner, " (", bytes,
                                        " bytes): ", c10::utils::str_error(errno), "."));
  ::madvise(memory->data_, bytes, MADV_POPULATE_WRITE);  // avoids later page faults; may fail
  memory->close_file();
  return memory;
}

}  // namespace weft::comm
