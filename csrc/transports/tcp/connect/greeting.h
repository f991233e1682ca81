// Greeting: the first messages on a connection, which are the handshake (connect/handshake.h) and
// then, if the group encrypts, that of TLS. After the handshake such a connection neither sends nor
// accepts a plain byte.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "transports/tcp/connect/handshake.h"
#include "transports/tcp/net/secure_socket.h"

namespace pycomm::tcp {

class Greeting {
 public:
  enum class Progress : uint8_t {
    waits,
    closed,   ///< by the other side or by the network
    refused,  ///< by one of the two; problem() says why
    done,
  };

  explicit Greeting(Handshake handshake) : handshake_(std::move(handshake)) {}

  /// Advances as far as it can now. `error` gets the reason of `closed`, 0 for an orderly end.
  Progress advance(int fd, int& error);
  /// Returns the events to poll() for in state `waits`.
  short events() const;
  const Hello& hello() const { return handshake_.hello(); }
  std::string problem() const;
  /// Returns the connection, once done.
  SecureSocket sock(Fd fd) { return SecureSocket(std::move(fd), std::move(tls_)); }

 private:
  Handshake handshake_;
  std::unique_ptr<TlsSession> tls_;
};

}  // namespace pycomm::tcp
