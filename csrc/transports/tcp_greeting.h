// The first words on a connection: the handshake (tcp_handshake.h), then, where the group encrypts,
// that of TLS. From the handshake on such a connection neither says nor takes a plain byte.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "transports/tcp_handshake.h"
#include "transports/tcp_wire.h"

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

  /// As far as it goes now. `error` gets the reason of `closed`, 0 for an orderly end.
  Progress advance(int fd, int& error);
  /// What to poll() for while it waits.
  short events() const;
  const Hello& hello() const { return handshake_.hello(); }
  std::string problem() const;
  /// The connection, when done.
  Wire wire(Fd fd) { return Wire(std::move(fd), std::move(tls_)); }

 private:
  Handshake handshake_;
  std::unique_ptr<TlsSession> tls_;
};

}  // namespace pycomm::tcp
