// Connection of a member to another process's endpoint. One thread at a time.
#pragma once
#include <functional>
#include <string>

#include "core/deadline.h"
#include "core/error.h"
#include "transports/tcp/endpoint/handle.h"
#include "transports/tcp/endpoint/message.h"
#include "transports/tcp/net/secure_socket.h"

namespace pycomm::tcp {

/// Nobody listens at the address: the process is gone, or a firewall refuses in its name.
class Refused : public Error {
 public:
  using Error::Error;
};

/// Who answers at the address has not proven that it is the process of the handle.
class Unproven : public Error {
 public:
  using Error::Error;
};

class EndpointConnection {
 public:
  /// Connects and proves the secret: the handle's own, or else that of the key `given`, which all
  /// ranks have. Whoever refuses it or hangs up has proven nothing, and may be somebody on the
  /// path: it is asked again until the deadline. `interrupt` is called while it waits, and may
  /// throw. Throws Refused, Unproven, Timeout, and Error if there is no way to the address.
  EndpointConnection(const Handle& to, const std::string& given, const Deadline& deadline,
                     std::function<void()> interrupt);

  /// Throw Error when the connection is gone, and Timeout.
  void send(const std::string& message, const Deadline& deadline);
  std::string receive(const Deadline& deadline);
  /// How long the connection and the greeting took, by round trips.
  std::chrono::microseconds round_trip() const { return round_trip_; }

 private:
  void wait(int fd, short events, const Deadline& deadline) const;
  Fd call(const Handle& to, const Deadline& deadline);
  /// Returns why there is no connection; "": there is one.
  std::string greet(Fd fd, const Handle& to, const std::string& secret, const Deadline& deadline);

  const std::string where_;
  const std::function<void()> interrupt_;
  SecureSocket socket_;
  std::string arrived_;
  std::chrono::microseconds round_trip_{0};
};

/// Whether the process of a handle has ended, as far as its machine can tell at once: its port is
/// refused. `secret`: that was given to all ranks, or empty.
PYCOMM_API bool is_gone(const Handle& handle, const std::string& secret,
                        std::function<void()> interrupt);

}  // namespace pycomm::tcp
