// Secure socket: a connected socket, and its encryption if the group has one.
#pragma once
#include <sys/socket.h>
#include <sys/uio.h>

#include <memory>
#include <utility>

#include "transports/fd.h"
#include "transports/tcp/tls/session.h"

namespace pycomm::tcp {

class SecureSocket {
 public:
  SecureSocket() = default;
  SecureSocket(Fd fd, std::unique_ptr<TlsSession> tls) : fd_(std::move(fd)), tls_(std::move(tls)) {}

  int get() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  bool encrypted() const { return tls_ != nullptr; }
  void reset() {
    tls_.reset();
    fd_.reset();
  }

  /// Behave as sendmsg and recvmsg, without waiting. An encrypted socket must be given the bytes
  /// again that it did not count as sent, before further ones.
  ssize_t send(iovec* parts, size_t count) {
    if (tls_) return tls_->send(parts, count);
    const msghdr call = {nullptr, 0, parts, count, nullptr, 0, 0};
    return ::sendmsg(fd_.get(), &call, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  ssize_t send(const void* data, size_t bytes) {
    iovec part = {const_cast<void*>(data), bytes};
    return send(&part, 1);
  }
  ssize_t receive(iovec* parts, size_t count) {
    if (tls_) return tls_->receive(parts, count);
    msghdr call = {nullptr, 0, parts, count, nullptr, 0, 0};
    return ::recvmsg(fd_.get(), &call, MSG_DONTWAIT);
  }
  ssize_t receive(void* to, size_t bytes) {
    iovec part = {to, bytes};
    return receive(&part, 1);
  }

 private:
  Fd fd_;
  std::unique_ptr<TlsSession> tls_;
};

}  // namespace pycomm::tcp
