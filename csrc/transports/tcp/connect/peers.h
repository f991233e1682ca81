// Rendezvous of the TCP transport: the addresses, secrets and host proofs that ranks publish in the
// store before they connect (connect/connector.h).
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "transports/process.h"
#include "transports/tcp/connect/host_proof.h"
#include "transports/tcp/net/interface.h"
#include "transports/tcp/net/socket.h"
#include "transports/transport.h"

namespace pycomm {

/// The sockets on which a rank listens for its peers, and what they must know to connect.
struct TcpListeners {
  std::vector<tcp::Interface> interfaces;
  std::vector<tcp::Fd> sockets;  ///< in the order of interfaces
  std::string secret;            ///< peers must prove it to us
  std::string card;              ///< what we publish: "address,address secret tls"
};

}  // namespace pycomm

namespace pycomm::tcp {

/// Topics of the values that ranks publish in the store, in this order. The card for groups that
/// span hosts is announced with the first value; groups of one host exchange another, since they
/// listen on the loopback interface.
constexpr char kHostTopic[] = "tcp-host", kCardTopic[] = "tcp-card",
               kFarCardTopic[] = "tcp-far-card";

/// Listens on the interfaces that the options name, or on those that fit a group on one host or on
/// several. Throws Error if there are none, or if encryption is wanted and not to be had.
TcpListeners listen(const TcpOptions& options, bool one_host);

/// Returns our value for kHostTopic: "host cpus proof process", where the last two prove that we
/// are there. The proof holds as long as it has an owner.
std::string host_value(const HostProof& proof);

/// The most sockets that a lane has with a peer.
constexpr int kMostSockets = 16;

/// Another rank, as it has published itself.
struct Peer {
  int rank = 0;
  std::vector<Address> addresses;  ///< its listeners: one for each of its interfaces
  std::string secret;              ///< we must prove it to this peer
  std::string host_proof;          ///< open on our host while the peer lives; empty if not known
  Process process{""};

  /// True if the peer is known to have died; false if that is only likely.
  bool has_died() const {
    return process.died() ||
           (!host_proof.empty() && HostProof::probe(host_proof) == HostProof::State::closed);
  }
};

struct PeerDirectory {
  GroupOptions options;
  bool encrypts = false;
  std::string session;  ///< of the rendezvous
  std::shared_ptr<const HostProof> host_proof;
  std::vector<Interface> interfaces;
  std::vector<Fd> listeners;  ///< in the order of interfaces
  std::string secret;         ///< peers must prove it to us
  bool crowded = false;       ///< this rank and the peers of its host outnumber their CPUs
  std::vector<Peer> peers;    ///< ascending

  /// Returns the number of paths to each peer: our i-th interface and the peer's i-th.
  size_t paths() const { return interfaces.size(); }
  /// Returns the number of sockets of a lane with a peer at this round trip: at least one for each
  /// path. Of two ranks the one that connects decides.
  int sockets_at(std::chrono::milliseconds round_trip) const;
};

/// Chooses the interfaces, listens there, and exchanges addresses with `peers` through the store.
/// Throws Timeout with the missing ranks.
PeerDirectory exchange_addresses(const Rendezvous& rendezvous, const std::vector<int>& peers,
                                 const TcpOptions& options);

}  // namespace pycomm::tcp
