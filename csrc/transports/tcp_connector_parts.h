// Connections of the connector that do not stand yet. A part of tcp_connector.cpp, tcp_dial.cpp and
// tcp_accept.cpp.
#pragma once
#include <optional>

#include "transports/tcp_connector.h"
#include "transports/tcp_greeting.h"

namespace pycomm::tcp {

/// A connection that we make, again and again until it stands.
struct Connector::Outgoing {
  Link* link;
  Hello hello;
  Fd fd;
  std::optional<Greeting> greeting;       // none while the connection is being made
  Clock::time_point wake = Clock::now();  // when to try again, or to give this attempt up
  Milliseconds pause{20};                 // before the next attempt
  size_t way = 0;                         // which of our interfaces to which of the peer's
  bool ready = false;
  bool over = false;
};

/// A connection that somebody made to us.
struct Connector::Stranger {
  Fd fd;
  Greeting greeting;
  Clock::time_point wake;  // when to give it up
  bool ready = false;
};

}  // namespace pycomm::tcp
