// Rendezvous of the TCP transport: the addresses and secrets that ranks publish in the store before
// they connect (connect/connector.h).
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "transports/process.h"
#include "transports/rendezvous.h"
#include "transports/tcp/net/interface.h"
#include "transports/tcp/net/socket.h"

namespace pycomm::tcp {

/// Topics of the values that ranks publish in the store, in this order: "host cpus process", and
/// the card. The card for groups that span hosts is announced with the first value; groups of one
/// host exchange another, since they listen on the loopback interface.
constexpr char kHostTopic[] = "tcp-host", kCardTopic[] = "tcp-card",
               kFarCardTopic[] = "tcp-far-card";

/// The sockets on which a rank listens for its peers, and what they must know to connect.
struct TcpListeners {
  std::vector<Interface> interfaces;
  std::vector<Fd> sockets;         ///< in the order of interfaces
  std::vector<Address> addresses;  ///< of the sockets, as others reach them
  std::string secret;              ///< peers must prove it to us
  std::string card;                ///< what we publish: "address,address secret"
};

/// Listens on the interfaces that the options name, or on those that fit a group on one host or on
/// several. Throws Error if there are none, or if encryption is wanted and not to be had.
TcpListeners listen(const GroupOptions& options, bool one_host);

/// The most sockets that a lane has with a peer.
constexpr int kMostSockets = 16;

/// Another rank, as it has published itself.
struct Peer {
  int rank = 0;
  std::vector<Address> addresses;  ///< its listeners: one for each of its interfaces
  std::string secret;              ///< we must prove it to this peer
  bool near = false;               ///< it is on our host
  Process process{""};
};

struct PeerDirectory {
  GroupOptions options;
  bool encrypts = false;
  std::string session;  ///< of the rendezvous
  TcpListeners own;
  bool crowded = false;     ///< this rank and the peers of its host outnumber their CPUs
  bool far_bbr = false;     ///< connections with far peers have bbr
  std::vector<Peer> peers;  ///< ascending

  /// Returns the number of paths to each peer: our i-th interface and the peer's i-th.
  size_t paths() const { return own.interfaces.size(); }
  /// Returns the number of sockets of a lane with a peer at this round trip: at least one for each
  /// path. Of two ranks the one that connects decides.
  int sockets_at(std::chrono::milliseconds round_trip) const;
};

/// What a rank says of itself before it is connected, and learns of its peers.
class AddressExchange {
 public:
  explicit AddressExchange(const GroupOptions& options) { directory_.options = options; }

  /// Announces what run() publishes about this rank's host. `may_span_hosts`: false if all ranks
  /// are known to be on one host.
  void announce(const Rendezvous& rendezvous, bool may_span_hosts);
  /// Chooses the interfaces, listens there, and exchanges addresses with `peers` through the store.
  /// Throws Timeout with the missing ranks.
  PeerDirectory run(const Rendezvous& rendezvous, const std::vector<int>& peers);

 private:
  bool look_at_hosts(const Rendezvous& rendezvous, const std::vector<std::string>& hosts);
  std::vector<std::string> exchange_cards(const Rendezvous& rendezvous,
                                          const std::vector<std::string>& hosts, bool one_host);
  void take_cards(const std::vector<std::string>& cards);
  void check_paths(const std::string& who, const Peer& peer) const;

  std::string us_;
  PeerDirectory directory_;
  std::optional<TcpListeners> announced_;  ///< for a group that spans hosts; their card is sent
};

}  // namespace pycomm::tcp
