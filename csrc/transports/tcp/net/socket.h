// Addresses of the TCP transport, and the few calls that prepare its sockets. All sockets are
// non-blocking.
#pragma once
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "core/env.h"
#include "core/types.h"
#include "transports/fd.h"

namespace pycomm::tcp {

/// An IPv4 or IPv6 address with a port.
class PYCOMM_API Address {
 public:
  Address() = default;
  Address(const sockaddr* address, socklen_t size);
  /// Parses "10.0.0.5", "10.0.0.5:4711", "fd00::2" or "[fd00::2]:4711". Returns false for anything
  /// else.
  static bool parse(const std::string& text, Address& out);
  /// Parses "address,address"; empty if one of them is none.
  static std::vector<Address> parse_list(const std::string& text);
  /// Return the address of our end and of the other end of a socket; size() is 0 if there is none.
  static Address local(int fd);
  static Address remote(int fd);

  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const { return size_; }
  int family() const { return storage_.ss_family; }
  uint16_t port() const;
  Address with_port(uint16_t port) const;
  bool is_loopback() const;
  /// True for fe80::/10, which needs a scope that differs on each host and so cannot be published.
  bool is_link_local() const;
  std::string ip() const;
  /// Returns "10.0.0.5:4711" or "[fd00::2]:4711"; parse() reads it back.
  std::string text() const;

 private:
  template <typename Ask>
  static Address end_of(int fd, const Ask& ask);
  const sockaddr_in& v4() const { return reinterpret_cast<const sockaddr_in&>(storage_); }
  const sockaddr_in6& v6() const { return reinterpret_cast<const sockaddr_in6&>(storage_); }

  sockaddr_storage storage_ = {};
  socklen_t size_ = 0;
};

/// Returns what parse_list() reads back.
std::string list_text(const std::vector<Address>& addresses);
/// Returns the parts of "a,b,c".
std::vector<std::string> split_list(const std::string& text);

/// Returns a listening socket on the first free port of the range, or on one that the kernel picks.
/// Throws Error.
Fd listen_on(const Address& address, const PortRange& ports = {});
/// Returns the next waiting connection, ready for use; empty if there is none.
Fd accept_from(int listener);
/// True if a connection waits to be accepted.
bool has_caller(int listener);
/// Begins a connection. It is made (or has failed, see pending_error) when the socket becomes
/// writable. `from` is the local address to leave by, or null for the route's. `error` gets an
/// immediate error, else 0. Empty if there can be no socket.
Fd connect_to(const Address& to, const Address* from, int& error);
/// Sets from how many bytes on a socket counts as readable.
void set_wake_bytes(int fd, size_t bytes);
/// Returns the pending error of a socket, 0 if none.
int pending_error(int fd);
/// Returns the number of sent bytes that the other end has not acknowledged; 0 once the connection
/// is broken.
size_t unacknowledged(int fd);

}  // namespace pycomm::tcp
