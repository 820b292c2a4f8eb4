#pragma once
#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>

#include "weft/comm/descriptor.h"

namespace weft::comm {

/// Who is at the other end of a socket, by the kernel's word.
struct Caller {
  pid_t pid = 0;
  uid_t uid = 0;
};

/// What one receive brings: a message of the expected length with exactly one descriptor, or nothing.
struct Delivery {
  bool came = false;  // something came, or the other end closed
  std::string wrong;  // empty if it was as expected
  Descriptor file;
};

// Sockets of whole messages between processes of one host, with names outside the file system, so that nothing is left
// when a process dies. None of these blocks. An empty result or false stands for an error, told by errno.
Descriptor listen_at(const std::string& name, int backlog);
Descriptor connect_to(const std::string& name);
Descriptor accept_one(const Descriptor& listener);
std::optional<Caller> caller_of(const Descriptor& socket);

/// One message of `bytes` bytes and a descriptor.
bool send_file(const Descriptor& socket, const void* message, size_t bytes, const Descriptor& file);
Delivery receive_file(const Descriptor& socket, void* message, size_t bytes);

}  // namespace weft::comm
