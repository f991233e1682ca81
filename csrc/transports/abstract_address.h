// Abstract Unix socket addresses: sockets that have no file.
#pragma once
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

namespace pycomm {

/// An abstract address. The path begins with a zero byte and is as long as the length says. Only
/// processes of the same network namespace can connect to it.
struct AbstractAddress {
  sockaddr_un un = {};
  socklen_t length;

  explicit AbstractAddress(const std::string& name) {
    un.sun_family = AF_UNIX;
    const size_t bytes = std::min(name.size(), sizeof un.sun_path - 1);
    std::memcpy(un.sun_path + 1, name.data(), bytes);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&un); }
};

}  // namespace pycomm
