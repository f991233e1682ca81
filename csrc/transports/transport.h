// A way to move bytes between ranks. All transports have the same few nouns:
//   Transport  everything that one group has of one kind (shm, tcp, local)
//   Channel    an ordered, reliable byte stream to and from one peer
//   Window     memory that all ranks address directly (window.h; shm and local only)
//
// Nothing here blocks except `idle`: operations are posted, and the thread that waits for them
// moves the bytes (progress). One thread at a time drives a lane; the lanes do not disturb each
// other.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/deadline.h"
#include "core/error.h"
#include "core/op.h"
#include "core/spent.h"
#include "core/standing.h"
#include "core/types.h"
#include "transports/store.h"

namespace pycomm {

class SharedHeap;
class Window;

/// Independent streams between the same two ranks, so that a posted receive never stands in the
/// way of a collective.
enum class Lane : uint8_t { collective, point_to_point };
constexpr int kLanes = 2;

class Channel {
 public:
  virtual ~Channel() = default;

  /// Queues bytes and returns a ticket (1, 2, 3, ...). `data` must stay until sent() reaches it.
  virtual uint64_t send(const OpTag& tag, Span<const uint8_t> data) = 0;
  /// Queues a receive of the next message in order. It must have exactly this size and an equal
  /// tag hash, else progress() throws WireMismatch that describes both tags and names the peer.
  virtual uint64_t recv(const OpTag& tag, Span<uint8_t> data) = 0;

  virtual uint64_t sent() const = 0;      ///< highest ticket whose bytes may be reused
  virtual uint64_t received() const = 0;  ///< highest ticket whose bytes are all there

  /// Moves what can be moved now. True if anything moved. Throws PeerLost if the peer is gone while
  /// something is still queued, and Error with the peer's reason if the peer has aborted.
  virtual bool progress() = 0;
  /// What has gone out to the peer, where there is a network. By the lane's thread.
  virtual LinkUse use() const { return {}; }
};

/// What every rank brings to the meeting.
struct Rendezvous {
  std::shared_ptr<Store> store;
  std::string group;  ///< unique name of the group; prefix of all its keys in the store
  int rank = 0;
  int size = 1;
  Deadline deadline = Deadline::after(Milliseconds(300000));
  /// To be called now and then by whoever waits for others; between two calls lies `patience` at
  /// most. Throws if we wait in vain: somebody has died or given up, or this rank is to stop.
  std::function<void()> look_out = [] {};
  Milliseconds patience() const { return Milliseconds(40 + size / 4); }  ///< mild to the store
};

/// 0 .. size - 1.
PYCOMM_API std::vector<int> all_ranks(const Rendezvous& meeting);

/// What we know of a rank, for the texts of errors.
struct Sighting {
  /// Silent: it does not answer; what is known of it is old. Stopped: its process is, by a signal
  /// or a debugger.
  enum class Presence : uint8_t { here, silent, stopped, left, died };
  Presence presence = Presence::silent;
  Standing standing;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;

  /// True if this transport connects us with `rank` (never with ourselves).
  virtual bool reaches(int rank) const = 0;
  /// The channel to a rank that it reaches; made at first use, owned by the transport.
  virtual Channel& channel(int rank, Lane lane) = 0;
  /// Memory of the ranks of this host that it was made for, or null if one of them has no part in
  /// it. Window::size() and member() say who they are.
  virtual Window* window() { return nullptr; }
  /// Memory of ours that all ranks of the window address in place, or null.
  virtual std::shared_ptr<SharedHeap> heap() { return nullptr; }

  /// Sleeps until a channel of the lane may have something to do, or for `limit`.
  virtual void idle(Lane lane, std::chrono::microseconds limit) = 0;
  /// Throws PeerLost or Error if a peer has died or any rank has aborted. Cheap enough for every
  /// few microseconds of waiting.
  virtual void check() = 0;
  /// Asks the ranks that it reaches what they are doing; look() knows it a moment later.
  virtual void ask() {}
  /// A rank that it reaches, as far as we know now. Any thread.
  virtual Sighting look(int rank) = 0;
  /// Where this transport's peers see what we do; null if they must ask.
  virtual SharedStanding* standing() { return nullptr; }
  /// Tells all peers why this group is over: their waits throw Error with this reason and our rank.
  /// Any thread, any time, never blocks.
  virtual void abort(const std::string& reason) noexcept = 0;
  /// Bytes that this rank has handed to the transport since the start: payload, and headers where
  /// there are any. Any thread.
  virtual uint64_t sent_bytes() const = 0;
  /// One line for people: "tcp to 1,2,3 by eth0 (10.0.0.5), 2 sockets each".
  virtual std::string describe() const = 0;
};

/// Which payloads TCP sends with a checksum; headers always have one. Encrypted payloads are
/// authenticated anyway: leaving_host checks none of them.
enum class PayloadCheck : uint8_t { leaving_host, all, none };
/// Of "auto", "payload" and "header", as env().checksum has them; throws Error for other words.
PYCOMM_API PayloadCheck payload_check(const std::string& word);

struct TcpOptions {
  int sockets = 2;
  std::string interface;
  double link_bytes_per_second = 0;
  std::string secret;
  bool tls = false;  ///< TLS 1.3 on every connection; equal on all ranks
  PayloadCheck checks = PayloadCheck::leaving_host;
  const SharedStanding* standing = nullptr;  ///< ours, for peers that ask
};

/// Ranks as threads of one process. All of `ranks` are reached.
PYCOMM_API std::unique_ptr<Transport> make_local(const Rendezvous& meeting,
                                                 const std::vector<int>& ranks);
/// Those of `ranks` that are on this host, found by trying, never by LOCAL_WORLD_SIZE. Null if
/// there is no other.
PYCOMM_API std::unique_ptr<Transport> make_shm(const Rendezvous& meeting,
                                               const std::vector<int>& ranks);
/// The given ranks by TCP; all of them must be given us as well.
PYCOMM_API std::unique_ptr<Transport> make_tcp(const Rendezvous& meeting,
                                               const std::vector<int>& ranks,
                                               const TcpOptions& options);

}  // namespace pycomm
