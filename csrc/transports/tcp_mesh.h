// The set-up of the TCP transport: ranks meet in the store, connect to each other and authenticate.
#pragma once
#include <array>
#include <vector>

#include "transports/tcp_interface.h"
#include "transports/tcp_socket.h"
#include "transports/transport.h"

namespace pycomm::tcp {

/// All connections with one peer.
struct Link {
  int rank = 0;
  Address address;  ///< the peer's end, for error texts
  std::array<std::vector<Fd>, kLanes> lanes;
  Fd control;
};

struct Mesh {
  Interface interface;
  bool crowded = false;            ///< this rank and the peers of its host outnumber their CPUs
  std::string congestion_control;  ///< "bbr" and the like
  std::vector<Link> links;         ///< one per peer, ascending
};

/// Connects with all `peers`; of two ranks the higher connects to the lower. Returns when all
/// connections of this rank are authenticated. Throws Timeout with the ranks that did not come,
/// PeerLost if one died meanwhile, and Error if one refuses us.
///
/// Until then strangers may knock: each waiting connection has its own small state and deadline, so
/// none holds up another.
Mesh connect_mesh(const Rendezvous& meeting, const std::vector<int>& peers,
                  const TcpOptions& options);

}  // namespace pycomm::tcp
