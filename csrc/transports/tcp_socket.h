// Addresses of the TCP transport, and the few calls that prepare its sockets. Everything is
// non-blocking.
#pragma once
#include <netinet/in.h>
#include <sys/socket.h>

#include <string>

#include "core/spent.h"
#include "core/types.h"
#include "transports/tcp_fd.h"

namespace pycomm::tcp {

/// An IPv4 or IPv6 address with a port.
class PYCOMM_API Address {
 public:
  Address() = default;
  Address(const sockaddr* address, socklen_t size);
  /// From "10.0.0.5", "10.0.0.5:4711", "fd00::2" or "[fd00::2]:4711". False if it is none of these.
  static bool parse(const std::string& text, Address& out);
  /// Our end and the other end of a socket; size() is 0 if there is none.
  static Address local(int fd);
  static Address remote(int fd);

  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const { return size_; }
  int family() const { return storage_.ss_family; }
  uint16_t port() const;
  Address with_port(uint16_t port) const;
  bool is_loopback() const;
  /// fe80::/10 needs a scope that differs on each host, so such an address cannot be published.
  bool is_link_local() const;
  std::string ip() const;
  /// "10.0.0.5:4711" or "[fd00::2]:4711"; parse() reads it back.
  std::string text() const;

 private:
  const sockaddr_in& v4() const { return reinterpret_cast<const sockaddr_in&>(storage_); }
  const sockaddr_in6& v6() const { return reinterpret_cast<const sockaddr_in6&>(storage_); }

  sockaddr_storage storage_ = {};
  socklen_t size_ = 0;
};

/// "Connection refused" and the like.
std::string error_text(int error);

/// A listening socket on a port that the kernel picks. Throws Error.
Fd listen_on(const Address& address);
/// The next waiting connection, ready for use; empty if there is none.
Fd accept_from(int listener);
/// Begins a connection. It is made (or has failed, see pending_error) when the socket becomes
/// writable. `from` is the local address to leave by, or null for the route's. `error` gets what
/// went wrong at once, else 0. Throws Error if there can be no socket.
Fd connect_to(const Address& to, const Address* from, int& error);
/// To be called on both ends of a new connection. Inside one host there is no network to be fair
/// to, and controls that pace (bbr) halve the bandwidth there: such a connection gets the plain
/// "reno".
void choose_congestion_control(int fd);
/// To be called on both ends of a new connection. On a short way little is in flight, and what a
/// send buffer holds beyond that has left the processor's cache before it is read again: there it
/// stays small instead of growing to megabytes.
void choose_send_buffer(int fd);
/// "bbr" and the like.
std::string congestion_control(int fd);
/// From how many bytes on a socket counts as readable.
void set_wake_bytes(int fd, size_t bytes);
/// The error that a socket has come to, 0 if none.
int pending_error(int fd);
/// What the kernel counts of a connection; zeros once it is broken.
LinkUse link_use(int fd);
/// Sent bytes that the other end has not acknowledged; 0 once the connection is broken.
size_t unacknowledged(int fd);

}  // namespace pycomm::tcp
