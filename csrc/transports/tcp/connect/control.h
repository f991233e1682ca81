// Control connections: one per peer. They carry what must not wait behind data (aborts, closes and
// requests to connect), and their silence reveals a dead peer. A control connection that is cut
// while the peer lives is made again (connect/connector.h); messages in flight are lost, so those
// that matter are sent again.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/notice.h"
#include "core/types.h"
#include "transports/tcp/connect/handshake.h"
#include "transports/tcp/net/socket.h"
#include "transports/tcp/tls/session.h"
#include "transports/transport.h"

namespace pycomm::tcp {

/// The control connections of a rank. All members may be called by any thread, except where noted.
class Control {
 public:
  /// `rank_state` is our own state, for peers that ask; with null we do not answer.
  explicit Control(const SharedRankState* rank_state = nullptr);
  ~Control();

  /// At set-up only. `address` is for error texts.
  void add(int rank, const Address& address, SecureSocket sock);
  /// At set-up only. Sets the action for connections to make: a control connection that is cut, or
  /// those that a peer asks for; called from any thread.
  void on_wanted(std::function<void(const WantedConnection&)> connect) {
    on_wanted_ = std::move(connect);
  }
  /// At set-up only. Sets the action for a peer's close, which answer_close() acknowledges; called
  /// from any thread.
  void on_close(std::function<void()> look) { on_close_ = std::move(look); }
  /// Asks a higher rank to connect with us.
  void ask_to_connect(const WantedConnection& wanted) noexcept;

  /// Replaces a connection that was cut.
  void renew(int rank, uint32_t generation, SecureSocket sock);
  /// Reports that the peer's listener is closed: the peer has died, unless it has sent its close.
  void refused(int rank);

  /// Returns a descriptor that becomes readable when there is something for poll(), and stays
  /// readable once a rank has aborted.
  int wait_fd() const { return epoll_.get(); }
  /// Processes the messages that have arrived. Cheap.
  void poll();
  /// True once a rank has aborted; check() then throws.
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  /// Polls. Throws Aborted if any rank has aborted, and PeerLost a moment after a peer has died (so
  /// that an operation that does not need the dead peer any more may end).
  void check();
  /// True if the peer has sent its close or has died.
  bool gone(int rank) const;

  /// Treats connections whose path is silent (tcp/net/tuning.h) as cut, where another path may
  /// serve.
  void leave_silent_paths();
  /// True while a connection is cut and not yet made again.
  bool cut_off() const;

  /// Tells all peers and ourselves of the failure. Only the first call counts. A rank that receives
  /// an abort passes it on, so that it reaches all ranks before the first of them leaves.
  void abort(const Notice& notice) noexcept;
  /// Asks all peers what they are doing. They answer when they next poll().
  void ask() noexcept;
  /// Polls. A peer that has not answered since the last ask() is silent.
  PeerStatus look(int rank);
  /// Sends our close to all peers that have not got it on the connection of now. Returns true if
  /// there are any; those that are cut off are told by a later call.
  bool send_close() noexcept;
  /// True once the peer has acknowledged our close.
  bool close_acknowledged(int rank) const;
  /// True if the peer has sent its close, and we have not acknowledged it.
  bool owes_answer(int rank) const;
  void answer_close(int rank) noexcept;
  /// Returns the number of bytes that the peer's host has not acknowledged.
  size_t unacknowledged(int rank) const;
  /// Returns the round-trip time to the farthest peer, measured when its connection was made.
  Milliseconds round_trip() const { return Milliseconds(round_trip_.load()); }
  /// Returns the least round-trip time to a peer so far; 0 if none is known.
  std::chrono::microseconds round_trip(int rank) const;
  /// True if a message waits for room on its connection; poll() sends it as soon as there is some.
  bool unsent() const;

  /// Throws the best explanation for a data connection of the peer that broke while something was
  /// queued: the peer's abort notice if it arrives within a moment.
  [[noreturn]] void throw_lost(int rank, const std::string& what);

  uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }

 private:
  enum class State : uint8_t { here, cut, left, died };
  struct Peer;
  struct Message;

  /// Returns by how much a packet may come later than its fellows, once it was lost.
  Milliseconds late_packet() const;
  Peer* find(int rank) const;
  Peer* first_death() const;
  void watch(Peer& peer);
  void take_in(Peer& peer);
  void lose(Peer& peer);
  void on_message(Peer& peer, const Message& message);
  void end_group(const Message& message) noexcept;
  void tell(Peer& peer, Message message) noexcept;
  void push(Peer& peer) noexcept;
  void wait_for_room(Peer& peer, bool wait) noexcept;
  void tell_all(const Message& message) noexcept;
  void wake_all() noexcept;
  [[noreturn]] void throw_aborted() const;
  [[noreturn]] void throw_died(const Peer& peer, const std::string& how) const;

  const SharedRankState* const rank_state_;
  Fd epoll_, wake_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::function<void(const WantedConnection&)> on_wanted_;
  std::function<void()> on_close_;
  std::atomic<bool> aborted_{false};
  uint8_t abort_notice_[Notice::kBytes] = {};  // encoded; written once, before aborted_
  std::atomic<uint64_t> sent_bytes_{0};
  std::atomic<Milliseconds::rep> round_trip_{0};
};

}  // namespace pycomm::tcp
