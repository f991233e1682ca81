// Who of a segment's ranks is still there: deaths, graceful leaves, aborts.
//
// A process that lives holds a POSIX record lock on the memfd, one byte per rank. The kernel drops
// it when the process dies, however it dies, and forked children (DataLoader workers) do not
// inherit it. Ranks that share a process cannot be told apart that way and are not watched.
#pragma once
#include <string>
#include <vector>

#include "transports/segment.h"

namespace pycomm {

class Watch {
 public:
  /// `members[i]` is the group's number of the segment's rank i; `self` is our i. `lock_fd` is -1
  /// where there are no locks. Whoever has the memory has signed.
  Watch(const Segment& segment, std::vector<int> members, int self, int lock_fd);

  /// Takes our lock. Before the meeting ends, so that nobody takes us for dead.
  static void lock(int fd, int self);
  /// Names this process on this host, to find ranks that share one.
  static void sign(Board& board);

  /// Throws PeerLost if a peer has died and Error if a rank has aborted. Asks the kernel once a
  /// millisecond at most. Any thread.
  void check();
  /// The same, at once.
  void check_now();
  bool aborted() const {
    return segment_.header().abort.load(std::memory_order_acquire) == Header::kAborted;
  }
  bool left(int rank) const {
    return segment_.board(rank).left.load(std::memory_order_acquire) != 0;
  }
  /// Asks the kernel.
  bool died(int rank) const;
  /// Its process does not run until somebody lets it (SIGSTOP, a debugger). False if not known:
  /// containers do not see each other's processes.
  bool stopped(int rank) const;
  /// The rank has left; but if there was a death or an abort before, that is what is thrown.
  [[noreturn]] void throw_left(int rank);

  void abort(const std::string& reason) noexcept;
  /// Says that we are gone; peers that wait for us learn it at once.
  void leave() noexcept;

  /// The group's number of a rank of the segment.
  int member(int rank) const { return members_[rank]; }

 private:
  void check_deaths() const;
  void wake_all() const noexcept;

  Segment segment_;
  std::vector<int> members_;
  std::vector<int> watched_;
  int self_;
  int lock_fd_;
  std::atomic<int64_t> next_check_{0};  ///< steady clock, nanoseconds
};

}  // namespace pycomm
