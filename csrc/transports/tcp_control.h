// One connection per peer for what must not wait behind data: aborts, partings, requests to
// connect, and the silence of a peer that has died. One that is cut while the peer lives is made
// again (tcp_connector.h); what was on its way is lost, so what matters is said again.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/types.h"
#include "transports/tcp_handshake.h"
#include "transports/tcp_socket.h"
#include "transports/tcp_wire.h"
#include "transports/transport.h"

namespace pycomm::tcp {

/// Any thread may call anything.
class Control {
 public:
  /// `standing` is ours, for peers that ask; null: we do not answer.
  explicit Control(int rank, const SharedStanding* standing = nullptr);
  ~Control();

  /// At set-up only. `address` is for error texts.
  void add(int rank, const Address& address, Wire wire);
  /// At set-up only. What to do when a peer asks us to connect a lane; called from any thread.
  void on_ask(std::function<void(int rank, int lane)> connect) { on_ask_ = std::move(connect); }
  /// At set-up only. What to do when a connection is cut: one of control, or one of which a peer
  /// tells us; called from any thread.
  void on_cut(std::function<void(const Broken&)> reopen) { on_cut_ = std::move(reopen); }
  /// Asks a higher rank to connect a lane with us.
  void ask_to_connect(int rank, int lane) noexcept;
  /// Asks a higher rank to make a connection of a lane again.
  void ask_to_connect(const Broken& broken) noexcept;

  /// The connection that replaces one that was cut.
  void renew(int rank, uint32_t generation, Wire wire);
  /// The peer's listener is closed: it has died, unless it has said goodbye.
  void refused(int rank);

  /// Becomes readable when there is something for poll(), and stays so once somebody has aborted.
  int wait_fd() const { return epoll_.get(); }
  /// Takes in what peers have said. Cheap.
  void poll();
  /// True once somebody has aborted; check() then throws.
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  /// Polls. Throws Error if any rank has aborted, and PeerLost a moment after a peer has died (so
  /// that an operation that does not need the dead peer any more may end).
  void check();
  /// True if the peer has said goodbye or has died.
  bool gone(int rank) const;

  /// True while a connection is cut and not yet made again.
  bool cut_off() const;

  /// Tells all peers and ourselves. Only the first call counts. Who hears of an abort passes it on,
  /// so that it reaches all before the first of them leaves.
  void abort(const std::string& reason) noexcept;
  /// Asks all peers what they are doing. They answer when they next poll().
  void ask() noexcept;
  /// Polls. A peer that has not answered since the last ask() is silent.
  Sighting look(int rank);
  /// Tells all peers that we leave in good order; those that are cut off, when they are back.
  void say_goodbye() noexcept;
  /// True once the peer has heard our goodbye.
  bool farewell(int rank) const;
  /// Bytes that the peer's host has not acknowledged.
  size_t unacknowledged(int rank) const;

  /// A data connection of the peer broke while something was queued: throws the best explanation,
  /// the peer's last words if they come within a moment.
  [[noreturn]] void throw_lost(int rank, const std::string& what);

  uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }

 private:
  enum class State : uint8_t { here, cut, left, died };
  struct Peer;
  struct Notice;

  Peer* find(int rank) const;
  Peer* first_death() const;
  void watch(Peer& peer);
  void take_in(Peer& peer);
  void on_notice(Peer& peer, const Notice& notice);
  void end_group(const Notice& notice) noexcept;
  void tell(Peer& peer, Notice notice) noexcept;
  void tell_all(const Notice& notice) noexcept;
  void wake_all() noexcept;
  [[noreturn]] void throw_aborted() const;
  [[noreturn]] void throw_died(const Peer& peer, const std::string& how) const;

  const int rank_;
  const SharedStanding* const standing_;
  Fd epoll_, wake_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::function<void(int, int)> on_ask_;
  std::function<void(const Broken&)> on_cut_;
  bool leaving_ = false;
  std::atomic<bool> aborted_{false};
  std::string abort_text_;  // written once, before aborted_
  std::atomic<uint64_t> sent_bytes_{0};
};

}  // namespace pycomm::tcp
