#pragma once
#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>

#include "weft/comm/unique_fd.h"

namespace weft::comm {

/// Who is at the other end of a socket, by the kernel's word.
struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};

/// What one receive brings: a message of the expected length with exactly one descriptor, or nothing.
struct ReceivedFd {
  bool arrived = false;  // something came, or the other end closed
  std::string error;     // empty if it was as expected
  UniqueFd file;
};

// Sockets of whole messages between processes of one host, with names outside the file system, so that nothing is left
// when a process dies. None of these blocks. An empty result or false stands for an error, told by errno.
UniqueFd listen_at(const std::string& name, int backlog);
UniqueFd connect_to(const std::string& name);
UniqueFd accept_one(const UniqueFd& listener);
std::optional<PeerCredentials> peer_credentials(const UniqueFd& socket);

/// One message of `bytes` bytes and a descriptor.
bool send_fd(const UniqueFd& socket, const void* message, size_t bytes, const UniqueFd& file);
ReceivedFd receive_fd(const UniqueFd& socket, void* message, size_t bytes);

}  // namespace weft::comm
