// Poller of a lane, shared by its channels: the epoll that tells which sockets are ready, and the
// sleep until one is.
#pragma once
#include <atomic>
#include <chrono>
#include <mutex>

#include "transports/tcp/connect/control.h"
#include "transports/tcp/net/pacer.h"
#include "transports/tcp/net/socket.h"

namespace pycomm::tcp {

/// The readiness of a socket. It may be read or written until a call finds it empty or full; then
/// epoll tells when it may again (edge triggered). So a socket that has nothing costs no system
/// call.
struct Readiness {
  bool readable = true;
  bool writable = true;
  bool ends = false;  ///< the end of the stream, or an error, is waiting behind what can be read
};

/// The poller. One thread at a time uses it, as the lane; except for idle() and ring(), the caller
/// holds the mutex.
class Poller {
 public:
  Poller(uint16_t lane, int rank, Control& control, Pacer& pacer, bool spins);

  /// Returns the mutex that is held during a call of a channel of the lane. It is mostly free: only
  /// the connector's thread, which drives channels that no caller drives, competes for it.
  std::mutex& mutex() { return mutex_; }
  uint16_t lane() const { return lane_; }
  int rank() const { return rank_; }
  Control& control() { return control_; }
  Pacer& pacer() { return pacer_; }

  void watch(int fd, Readiness& readiness);
  /// Updates the readiness of all sockets of the lane.
  void poll();
  /// Counts the calls of poll(): a channel need not poll if another has since its last poll.
  uint64_t polls() const { return polls_; }
  /// Notes that a channel waits for tokens of the pacer.
  void starve() { starved_ = true; }
  /// Notes that a channel waits for this many bytes to come or to go.
  void expect(size_t bytes) { bulk_ = bulk_ || bytes > kBulk; }

  void idle(std::chrono::microseconds limit);
  /// Ends the current or the next sleep of the lane's thread. Any thread.
  void ring();

  void count_sent(size_t bytes) { sent_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }

 private:
  // While this many bytes are in flight there is time to sleep, and the kernel needs the core to
  // move them.
  static constexpr size_t kBulk = 64 << 10;

  bool take_events();
  bool poll_locked();

  const uint16_t lane_;
  const int rank_;
  Control& control_;
  Pacer& pacer_;
  const bool spins_;
  Fd epoll_, doorbell_;
  std::mutex mutex_;  // guards all below, except the count of bytes
  uint64_t polls_ = 0;
  bool fresh_ = false;  // some channel may not have seen the latest events
  bool starved_ = false;
  bool bulk_ = false;
  std::atomic<uint64_t> sent_bytes_{0};
};

}  // namespace pycomm::tcp
