#pragma once
#include <cstddef>
#include <memory>
#include <string>

#include "weft/comm/unique_fd.h"

namespace weft::comm {

/// Memory that other processes can map. It has no name in any file system, so nothing is left when its users die; it is
/// there in full from the start, so that no access can fail; and nobody can change its size.
class SharedMemory {
 public:
  /// Zeroed memory for others to map. Raises OutOfMemoryError if there is not enough.
  static std::shared_ptr<SharedMemory> make(size_t bytes);
  /// Maps what a peer, called `owner` in errors, has sent. Raises DistError unless it is of the given size and sealed.
  static std::shared_ptr<SharedMemory> map(UniqueFd file, size_t bytes, const std::string& owner);

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  /// To be sent to a peer.
  const UniqueFd& file() const { return file_; }
  /// Once every peer has it. The memory stays.
  void close_file() { file_ = UniqueFd(); }

 private:
  SharedMemory(UniqueFd file, size_t bytes) : file_(std::move(file)), bytes_(bytes) {}
  bool map_file();

  UniqueFd file_;
  std::byte* data_ = nullptr;
  size_t bytes_;
};

}  // namespace weft::comm
