// The meeting of the TCP transport: what ranks tell each other through the store before they
// connect (tcp_connector.h).
#pragma once
#include <string>
#include <vector>

#include "transports/tcp_interface.h"
#include "transports/tcp_socket.h"
#include "transports/transport.h"

namespace pycomm::tcp {

/// Of the words that ranks set in the store, in this order.
constexpr char kHostTopic[] = "tcp-host", kCardTopic[] = "tcp-card";

/// Another rank, as it has introduced itself.
struct Peer {
  int rank = 0;
  std::vector<Address> addresses;  ///< where it listens: one for each of its interfaces
  std::string secret;              ///< that we must prove to it
};

struct Mesh {
  std::vector<Interface> interfaces;
  std::vector<Fd> listeners;  ///< as interfaces
  std::string secret;         ///< that peers must prove to us
  bool tls = false;           ///< connections are encrypted
  int sockets = 1;            ///< per peer and lane, at least one for each interface
  bool bound = false;         ///< the user has named the interfaces, so connections leave by them
  bool crowded = false;       ///< this rank and the peers of its host outnumber their CPUs
  std::vector<Peer> peers;    ///< ascending
};

/// Chooses the interfaces, listens there, and meets `peers` in the store. Throws Timeout with the
/// ranks that did not come.
Mesh meet(const Rendezvous& meeting, const std::vector<int>& peers, const TcpOptions& options);

}  // namespace pycomm::tcp
