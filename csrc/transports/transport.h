// Transport interfaces: ways to move bytes between ranks. All transports have the same few nouns:
//   Transport  all connections of one kind (shm, tcp, local) that a group has
//   Channel    an ordered, reliable byte stream to and from one peer
//   Window     memory that all ranks address directly (window.h; shm and local only)
//
// Nothing here blocks except `idle`: operations are posted, and the thread that waits for them
// moves the bytes (progress). One thread at a time drives a lane; the lanes do not disturb each
// other.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/deadline.h"
#include "core/env.h"
#include "core/error.h"
#include "core/notice.h"
#include "core/op.h"
#include "core/op_timing.h"
#include "core/rank_state.h"
#include "core/types.h"
#include "transports/store.h"

namespace pycomm {

class FdServer;
class HostProof;
struct KeptHeaps;
class SharedHeap;
class Window;
struct TcpListeners;

/// Independent streams between the same two ranks, so that a posted receive never blocks a
/// collective.
enum class Lane : uint8_t { collective, point_to_point };
constexpr int kLanes = 2;

class Channel {
 public:
  virtual ~Channel() = default;

  /// Queues bytes and returns a ticket (1, 2, 3, ...). `data` must stay valid until sent() reaches
  /// it.
  virtual uint64_t send(const OpTag& tag, Span<const uint8_t> data) = 0;
  /// Queues a receive of the next message in order. It must have exactly this size and an equal
  /// tag hash, else progress() throws WireMismatch that describes both tags and names the peer.
  virtual uint64_t recv(const OpTag& tag, Span<uint8_t> data) = 0;

  virtual uint64_t sent() const = 0;      ///< highest ticket whose bytes may be reused
  virtual uint64_t received() const = 0;  ///< highest ticket whose bytes have all arrived

  /// Moves what can be moved now. Returns true if anything moved. Throws PeerLost if the peer is
  /// gone while something is still queued, and Aborted with the peer's notice if the peer has
  /// aborted.
  virtual bool progress() = 0;
  /// Returns what has gone out to the peer over a network, if there is one. To be called by the
  /// lane's thread.
  virtual LinkUse use() const { return {}; }
};

/// Published values by topic, so that one exchange serves several (transports/rendezvous.h).
struct RendezvousExchange {
  std::map<std::string, std::string> published;              ///< ours, for the next exchange
  std::map<std::string, std::vector<std::string>> received;  ///< all ranks', of earlier exchanges
  std::shared_ptr<const HostProof> host_proof;  ///< proves to TCP peers that we share a host
  std::shared_ptr<FdServer> server;             ///< passes on a shared region, if we create it
  std::shared_ptr<TcpListeners> listeners;  ///< for a group that spans hosts; their card is sent
  std::string first_topic;                  ///< of the first exchange of the whole group
  /// Hash of the nonces that all ranks have published in the first exchange; empty until then, and
  /// without a secret. Proofs of later values and of connections cover it, so nothing that an
  /// earlier group of this name has said is of use.
  std::string session;
};

/// A rank's view of the bootstrap: the store, the group and the rank's place in it.
struct Rendezvous {
  std::shared_ptr<Store> store;
  std::string group;  ///< unique name of the group; prefix of all its keys in the store
  int rank = 0;
  int size = 1;
  Deadline deadline = Deadline::after(Milliseconds(300000));
  /// The interrupt check, which every wait for other ranks calls: after poll_interval() at most, or
  /// a few round trips to the store. Throws if the wait is in vain: a rank has died or given up, or
  /// this rank is to stop.
  std::function<void()> interrupt_check = [] {};
  /// The heaps of a former group, which this one keeps if all ranks that share memory had them.
  std::shared_ptr<const KeptHeaps> kept_heaps;
  /// The longest pause between two polls of the store. No request ends by this time limit: it may
  /// well be shorter than the store's answer takes.
  Milliseconds poll_interval() const { return Milliseconds(40 + size / 4); }
  std::shared_ptr<RendezvousExchange> exchange = std::make_shared<RendezvousExchange>();
  /// Of the secret that was given to all ranks (transports/seal.h); empty: none was.
  std::string key;
};

/// Returns 0 .. size - 1.
PYCOMM_API std::vector<int> all_ranks(const Rendezvous& rendezvous);

/// The known status of a rank, for error texts.
struct PeerStatus {
  /// Silent: the rank does not answer, and its last known state is old. Stopped: its process is
  /// stopped by a signal or a debugger.
  enum class Liveness : uint8_t { here, silent, stopped, left, died };
  Liveness liveness = Liveness::silent;
  RankState rank_state;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;

  /// True if this transport connects us with `rank` (never with ourselves).
  virtual bool reaches(int rank) const = 0;
  /// Returns the channel to a rank that this transport reaches. It is made at first use and owned
  /// by the transport.
  virtual Channel& channel(int rank, Lane lane) = 0;
  /// Returns the memory shared by the ranks of this host for which it was made, or null if one of
  /// them has no part in it. Window::size() and member() name them.
  virtual Window* window() { return nullptr; }
  /// Returns memory of ours that all ranks of the window address in place, or null.
  virtual std::shared_ptr<SharedHeap> heap() { return nullptr; }
  /// Returns the heaps of all ranks of the window, for a later group of theirs, or null.
  virtual std::shared_ptr<const KeptHeaps> kept_heaps() { return nullptr; }

  /// Sleeps until a channel of the lane may have something to do, or for `limit`.
  virtual void idle(Lane lane, std::chrono::microseconds limit) = 0;
  /// Throws PeerLost if a peer has died, and Aborted if any rank has aborted. Cheap enough to call
  /// every few microseconds of a wait.
  virtual void check() = 0;
  /// Asks the ranks that this transport reaches what they are doing; look() returns the answer a
  /// moment later.
  virtual void ask() {}
  /// Returns what is known now of a rank that this transport reaches. Any thread.
  virtual PeerStatus look(int rank) = 0;
  /// Returns where this transport's peers read our state; null if they must ask.
  virtual SharedRankState* rank_state() { return nullptr; }
  /// Returns the round-trip time to the farthest peer; 0 inside a host.
  virtual Milliseconds round_trip() const { return Milliseconds(0); }
  /// Returns the least round-trip time that was measured to a rank that this transport reaches; 0
  /// inside a host, or if none is known.
  virtual std::chrono::microseconds round_trip([[maybe_unused]] int rank) const {
    return std::chrono::microseconds(0);
  }
  /// Tells all peers why this group has failed: their waits throw Aborted with this notice. Any
  /// thread, any time, never blocks, needs no memory.
  virtual void abort(const Notice& notice) noexcept = 0;
  /// Returns the number of bytes that this rank has handed to the transport since the start:
  /// payload, and headers where there are any. Any thread.
  virtual uint64_t sent_bytes() const = 0;
  /// Returns one line for people: "tcp to 1,2,3 by eth0 (10.0.0.5), 2 sockets each".
  virtual std::string describe() const = 0;
};

/// True if these options mean that connections are encrypted: `tls` is on, or it is auto, a secret
/// is given, and OpenSSL is there. Throws Error if it has another value.
PYCOMM_API bool encrypts(const GroupOptions& options);

/// The options of a group, of which TCP reads its own, and what the group knows.
struct TcpOptions : GroupOptions {
  explicit TcpOptions(const GroupOptions& options)
      : GroupOptions(options), encrypts(pycomm::encrypts(options)) {}

  bool encrypts;  ///< every connection

  const SharedRankState* rank_state = nullptr;  ///< our state, for peers that ask
  bool may_span_hosts = true;                   ///< false: all ranks are known to be on one host
};

/// Makes the transport for ranks that are threads of one process. It reaches all of `ranks`.
PYCOMM_API std::unique_ptr<Transport> make_local(const Rendezvous& rendezvous,
                                                 const std::vector<int>& ranks);
/// Announce what make_shm() and make_tcp() publish about this rank's host, with the exchange that
/// begins a group, so that they need no exchange of their own.
void announce_shm(const Rendezvous& rendezvous);
void announce_tcp(const Rendezvous& rendezvous, const TcpOptions& options);
/// Makes the transport to those of `ranks` that are on this host, found by trying, never by
/// LOCAL_WORLD_SIZE. Null if there is no other.
PYCOMM_API std::unique_ptr<Transport> make_shm(const Rendezvous& rendezvous,
                                               const std::vector<int>& ranks);
/// Makes the TCP transport to the given ranks; each of them must be given our rank as well.
PYCOMM_API std::unique_ptr<Transport> make_tcp(const Rendezvous& rendezvous,
                                               const std::vector<int>& ranks,
                                               const TcpOptions& options);

}  // namespace pycomm
