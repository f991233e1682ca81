// Transport interfaces: ways to move bytes between ranks. All transports have the same few nouns:
//   Transport  all connections of one kind (shm, tcp, local) that a group has
//   Channel    an ordered, reliable byte stream to and from one peer
//
// shm/transport.h and tcp/transport.h make them. Ranks of one host have a Window as well, memory
// that all of them address directly (shm/window.h).
//
// Nothing here blocks except `idle`: operations are posted, and the thread that waits for them
// moves the bytes (progress). One thread at a time drives a lane; the lanes do not disturb each
// other.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/deadline.h"
#include "core/error.h"
#include "core/notice.h"
#include "core/op.h"
#include "core/op_timing.h"
#include "core/rank_state.h"
#include "core/types.h"

namespace pycomm {

/// Independent streams between the same two ranks, so that a posted receive never blocks a
/// collective.
enum class Lane : uint8_t { collective, point_to_point };
constexpr int kLanes = 2;

/// What one end of a channel expects or sends.
struct MessageEnd {
  int rank;
  uint64_t bytes;
  const OpTag& tag;
};
/// The error of two ends that expect different messages.
inline WireMismatch mismatch(const MessageEnd& wanted, const MessageEnd& sent) {
  const auto text = [](const MessageEnd& end, const char* verb) {
    return "rank " + std::to_string(end.rank) + verb + std::to_string(end.bytes) + " bytes of " +
           describe_fully(end.tag);
  };
  return WireMismatch(text(wanted, " expects ") + ", " + text(sent, " sends "));
}

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

}  // namespace pycomm
