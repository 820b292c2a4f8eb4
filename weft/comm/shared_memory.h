#pragma once
#include <cstddef>
#include <memory>
#include <string>

#include "weft/comm/unique_fd.h"

namespace weft::comm {

/// Memory that other processes can map: a memfd. It has no name in a file system, so nothing remains when its users
/// die. It is fully allocated at creation, so that no access raises SIGBUS, and sealed against resizing.
class SharedMemory {
 public:
  /// Allocates zeroed memory. Raises OutOfMemoryError if not enough is available.
  static std::shared_ptr<SharedMemory> make(size_t bytes);
  /// Maps memory received from a peer. Raises DistError unless it has the given size, is sealed and fully allocated.
  /// `owner` names the peer in errors.
  static std::shared_ptr<SharedMemory> map(UniqueFd file, size_t bytes, const std::string& owner);

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  /// File descriptor to send to a peer.
  const UniqueFd& file() const { return file_; }
  /// Call it once every peer has the descriptor. The mapping stays valid.
  void close_file() { file_ = UniqueFd(); }

 private:
  SharedMemory(UniqueFd file, size_t bytes) : file_(std::move(file)), bytes_(bytes) {}
  bool map_file();

  UniqueFd file_;
  std::byte* data_ = nullptr;
  size_t bytes_;
};

}  // namespace weft::comm
