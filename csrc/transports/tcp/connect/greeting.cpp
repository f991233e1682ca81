// Greeting: moves the bytes of the handshakes.
#include "transports/tcp/connect/greeting.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

namespace pycomm::tcp {

Greeting::Progress Greeting::advance(int fd, int& error) {
  while (!tls_) {
    while (handshake_.to_send().size > 0) {
      const auto out = handshake_.to_send();
      const ssize_t n = ::send(fd, out.data, out.size, MSG_NOSIGNAL);
      if (n < 0) {
        error = errno;
        return error == EAGAIN || error == EINTR ? Progress::waits : Progress::closed;
      }
      handshake_.sent(static_cast<size_t>(n));
    }
    if (handshake_.state() == Handshake::State::refused) return Progress::refused;
    if (handshake_.state() == Handshake::State::done) {
      // A call back carries nothing more.
      if (hello().tls == 0 || hello().lane == kCallBack) return Progress::done;
      tls_ = std::make_unique<TlsSession>(fd, !handshake_.listens(), handshake_.key(),
                                          hello().lane != kControl);
      break;
    }
    const auto in = handshake_.wanted();
    const ssize_t n = ::recv(fd, in.data, in.size, 0);
    if (n <= 0) {
      error = n < 0 ? errno : 0;
      return error == EAGAIN || error == EINTR ? Progress::waits : Progress::closed;
    }
    handshake_.received(static_cast<size_t>(n));
  }
  switch (tls_->shake_hands()) {
    case TlsSession::Progress::waits:
      return Progress::waits;
    case TlsSession::Progress::done:
      return Progress::done;
    default:  // a third party, or the network: another connection may succeed
      error = EPROTO;
      return Progress::closed;
  }
}

short Greeting::events() const {
  const bool sending = tls_ ? tls_->sending() : handshake_.to_send().size > 0;
  return sending ? POLLOUT : POLLIN;
}

std::string Greeting::problem() const { return tls_ ? tls_->problem() : handshake_.problem(); }

}  // namespace pycomm::tcp
