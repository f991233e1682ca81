// Failure detector of a shared region's ranks: deaths (peer_process.h), closes and aborts.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "transports/shm/peer_process.h"
#include "transports/shm/region.h"

namespace pycomm {

class FailureDetector {
 public:
  /// `members[i]` is the group's number of the region's rank i; `self` is our i. All ranks that
  /// have the memory have signed.
  FailureDetector(const SharedRegion& region, std::vector<int> members, int self);

  /// Writes into the rank slot what names this process on this host.
  static void sign(RankSlot& rank_slot);

  /// Throws PeerLost if a peer has died and Aborted if a rank has aborted. Asks the kernel at most
  /// once a millisecond. Any thread.
  void check();
  /// Does the same as check(), but asks the kernel at once.
  void check_now();
  /// True from the moment in which a rank begins to write its notice: it may be stopped before it
  /// is done.
  bool aborted() const {
    return region_.header().abort.load(std::memory_order_acquire) != Header::kNone;
  }
  bool left(int rank) const {
    return region_.rank_slot(rank).left.load(std::memory_order_acquire) != 0;
  }
  /// Asks the kernel whether the rank has died.
  bool died(int rank) const;
  /// True if the rank's process is stopped until it is continued (SIGSTOP, a debugger).
  bool stopped(int rank) const;
  /// Throws that the rank has left; but if there was a death or an abort before, throws that.
  [[noreturn]] void throw_left(int rank);

  /// Publishes an abort. Peers that see anything that this rank does afterwards see the abort as
  /// well.
  void abort(const Notice& notice) noexcept;
  /// Publishes our close; peers that wait for us see it at once.
  void leave() noexcept;

  /// Returns the group's number of a rank of the region.
  int member(int rank) const { return members_[rank]; }

 private:
  void check_deaths();
  void throw_if_dead(size_t i, bool dead) const;
  [[noreturn]] void throw_aborted() const;
  void wake_all() const noexcept;

  SharedRegion region_;
  std::vector<int> members_;
  std::vector<int> watched_;
  std::vector<std::unique_ptr<PeerProcess>> processes_;  ///< of `watched_`
  int self_;
  std::atomic<int64_t> next_check_{0};       ///< steady clock, nanoseconds
  std::atomic<int64_t> next_proc_check_{0};  ///< the same, for the checks that read /proc
  std::atomic<uint32_t> proc_checks_{0};
};

}  // namespace pycomm
