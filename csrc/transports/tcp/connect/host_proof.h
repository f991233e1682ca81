// Host proof: shows that two processes share a host and its loopback interface.
#pragma once
#include <cstdint>
#include <string>

#include "transports/tcp/net/fd.h"

namespace pycomm {

/// A Unix socket with an abstract name that nobody can guess: only processes of the same running
/// kernel and network namespace can connect to it, and only as long as its process lives. The name
/// that a host reports proves neither: machines that were cloned from one snapshot report the same.
class HostProof {
 public:
  HostProof();
  /// Returns the socket's name; empty if this host has no such sockets.
  const std::string& name() const { return name_; }
  /// Tells whether a socket of this name is open on our host; unknown if we may not try (a policy
  /// of the system, no descriptors).
  enum class State : uint8_t { open, closed, unknown };
  static State probe(const std::string& name);
  /// True if a process of our user has it open on our host.
  static bool is_ours(const std::string& name);

 private:
  std::string name_;
  tcp::Fd listener_;  // not in forked children, which would keep it open
};

}  // namespace pycomm
