// Sockets and addresses of the TCP transport.
#include "transports/tcp/net/socket.h"

#include <arpa/inet.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace pycomm::tcp {

Address::Address(const sockaddr* address, socklen_t size) : size_(size) {
  std::memcpy(&storage_, address, size);
}

bool Address::parse(const std::string& text, Address& out) {
  std::string ip = text;
  std::string port;
  if (!text.empty() && text[0] == '[') {
    const size_t end = text.find(']');
    if (end == std::string::npos) return false;
    ip = text.substr(1, end - 1);
    const std::string rest = text.substr(end + 1);
    if (!rest.empty() && rest[0] != ':') return false;
    port = rest.empty() ? "" : rest.substr(1);
  } else if (text.find(':') == text.rfind(':') && text.find(':') != std::string::npos) {
    ip = text.substr(0, text.find(':'));
    port = text.substr(text.find(':') + 1);
  }
  if (port.size() > 5 || port.find_first_not_of("0123456789") != std::string::npos) return false;
  const int number = port.empty() ? 0 : std::stoi(port);
  if (number > 65535) return false;

  sockaddr_in v4 = {};
  v4.sin_family = AF_INET;
  sockaddr_in6 v6 = {};
  v6.sin6_family = AF_INET6;
  if (::inet_pton(AF_INET, ip.c_str(), &v4.sin_addr) == 1) {
    out = Address(reinterpret_cast<const sockaddr*>(&v4), sizeof v4);
  } else if (::inet_pton(AF_INET6, ip.c_str(), &v6.sin6_addr) == 1) {
    out = Address(reinterpret_cast<const sockaddr*>(&v6), sizeof v6);
  } else {
    return false;
  }
  out = out.with_port(static_cast<uint16_t>(number));
  return true;
}

std::vector<Address> Address::parse_list(const std::string& text) {
  std::vector<Address> addresses;
  for (const std::string& one : split_list(text)) {
    addresses.emplace_back();
    if (!parse(one, addresses.back())) return {};
  }
  return addresses;
}

std::string list_text(const std::vector<Address>& addresses) {
  std::string text;
  for (const Address& address : addresses) text += (text.empty() ? "" : ",") + address.text();
  return text;
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

template <typename Ask>
Address Address::end_of(int fd, const Ask& ask) {
  Address address;
  address.size_ = sizeof address.storage_;
  const auto data = reinterpret_cast<sockaddr*>(&address.storage_);
  return ask(fd, data, &address.size_) == 0 ? address : Address();
}
Address Address::local(int fd) { return end_of(fd, ::getsockname); }
Address Address::remote(int fd) { return end_of(fd, ::getpeername); }

uint16_t Address::port() const {
  return ntohs(family() == AF_INET ? v4().sin_port : v6().sin6_port);
}

Address Address::with_port(uint16_t port) const {
  Address result = *this;
  if (family() == AF_INET) {
    reinterpret_cast<sockaddr_in&>(result.storage_).sin_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in6&>(result.storage_).sin6_port = htons(port);
  }
  return result;
}

bool Address::is_loopback() const {
  if (family() == AF_INET) return ntohl(v4().sin_addr.s_addr) >> 24 == 127;
  return IN6_IS_ADDR_LOOPBACK(&v6().sin6_addr);
}

bool Address::is_link_local() const {
  return family() == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&v6().sin6_addr);
}

std::string Address::ip() const {
  char text[INET6_ADDRSTRLEN] = "?";
  if (family() == AF_INET) {
    ::inet_ntop(AF_INET, &v4().sin_addr, text, sizeof text);
  } else if (family() == AF_INET6) {
    ::inet_ntop(AF_INET6, &v6().sin6_addr, text, sizeof text);
  }
  return text;
}

std::string Address::text() const {
  const std::string host = family() == AF_INET6 ? "[" + ip() + "]" : ip();
  return host + ":" + std::to_string(port());
}

namespace {

Fd make_socket(int family) {
  return Fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// Small messages must not wait for the acknowledgement of earlier ones.
void set_no_delay(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

}  // namespace

Fd listen_on(const Address& address, const PortRange& ports) {
  for (int port = ports.first; port <= ports.last; port++) {
    Fd fd = make_socket(address.family());
    if (!fd) throw_errno("tcp: cannot make a socket");
    // Connections of an earlier group that the kernel still remembers do not hold a port; a socket
    // that listens there does.
    const int on = 1;
    if (port != 0) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    const Address full = address.with_port(static_cast<uint16_t>(port));
    if (::bind(fd.get(), full.data(), full.size()) == 0 && ::listen(fd.get(), SOMAXCONN) == 0)
      return fd;
    if (port != 0 && errno == EADDRINUSE) continue;
    const std::string where = port == 0 ? address.ip() : full.text();
    throw Error("tcp: cannot listen on " + where + ": " + error_text(errno) +
                (errno == EACCES ? "; set PYCOMM_PORTS to ports that this user may have"
                                 : "; set PYCOMM_INTERFACE to another interface"));
  }
  throw Error("tcp: no port of PYCOMM_PORTS=" + std::to_string(ports.first) + "-" +
              std::to_string(ports.last) + " is free on " + address.ip() +
              "; each group takes one for each rank and interface: give a wider range, or end what "
              "listens there");
}

Fd accept_from(int listener) {
  Fd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (fd) set_no_delay(fd.get());
  return fd;
}

bool has_caller(int listener) {
  pollfd state = {listener, POLLIN, 0};
  return ::poll(&state, 1, 0) > 0;
}

Fd connect_to(const Address& to, const Address* from, int& error) {
  Fd fd = make_socket(to.family());
  error = fd ? 0 : errno;
  if (!fd) return fd;
  set_no_delay(fd.get());
  if (from != nullptr && from->family() == to.family()) {
    // The port is picked at connect(), when the other end is known, so that ports do not run out.
    const int on = 1;
    ::setsockopt(fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
    const Address any_port = from->with_port(0);
    if (::bind(fd.get(), any_port.data(), any_port.size()) != 0) error = errno;
  }
  if (error == 0 && ::connect(fd.get(), to.data(), to.size()) != 0 && errno != EINPROGRESS &&
      errno != EINTR) {
    error = errno;
  }
  return fd;
}

void set_wake_bytes(int fd, size_t bytes) {
  const int value = static_cast<int>(bytes);
  ::setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value);
}

int pending_error(int fd) {
  int error = 0;
  socklen_t size = sizeof error;
  return ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

size_t unacknowledged(int fd) {
  pollfd state = {fd, 0, 0};
  int bytes = 0;
  if (fd < 0 || ::poll(&state, 1, 0) != 0 || ::ioctl(fd, SIOCOUTQ, &bytes) != 0) return 0;
  return static_cast<size_t>(bytes);
}

}  // namespace pycomm::tcp
