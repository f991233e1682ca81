// Peer process: tells whether the process of another rank of this host lives.
//
// The kernel tells by a pidfd: it is ready from the end of the process on, however that came about,
// and belongs to us alone, so nothing that the other process closes or hands to its children makes
// it look dead. Where there is none (kernels before 5.3, a seccomp filter, no descriptors left, or
// other code has closed ours) the process is looked up by its number: ranks share memory if they
// see each other's processes by the same numbers (shm.cpp).
//
// A pidfd reveals two ends late or never, which are polled for now and then: a process that writes
// a core dump does not run any more, and one that has called exec() is not our rank.
#pragma once
#include <memory>

#include "transports/process.h"
#include "transports/shm/region.h"

namespace pycomm {

/// A descriptor of a process. Other groups of ours may have the same.
class PidFd {
 public:
  /// Takes the descriptor; -1: none.
  explicit PidFd(int fd);
  ~PidFd();
  PidFd(const PidFd&) = delete;

  int get() const { return fd_; }
  /// False once the descriptor has been closed or its number is another file's now.
  bool ours() const;

 private:
  const int fd_;
  long process_;  ///< the kernel's number
};

class PeerProcess {
 public:
  /// Watches the rank that has signed `rank_slot`.
  explicit PeerProcess(const RankSlot& rank_slot);

  /// Returns a descriptor to poll() for input; -1 if there is none.
  int fd() const { return lost_.load(std::memory_order_relaxed) || !handle_ ? -1 : handle_->get(); }
  /// Takes the events that poll() has returned for fd(). Returns true if the process has ended.
  bool ended(int events);
  /// Asks the kernel, at the cost of a system call. An end is remembered from then on.
  bool ended();
  /// Looks for all kinds of ends, at the cost of reading /proc.
  bool check_proc();
  /// Returns what has happened to it, as a part of a sentence.
  const char* how() const { return how_.load(std::memory_order_relaxed); }

 private:
  bool dead(const char* how);

  const RankSlot& rank_slot_;
  const bool reads_;  ///< the kernel reads the memory of processes of its kind for others
  const Process process_;
  std::shared_ptr<PidFd> handle_;
  std::atomic<bool> lost_{false};
  std::atomic<bool> ended_{false};
  std::atomic<const char*> how_{"its process is gone"};
};

}  // namespace pycomm
