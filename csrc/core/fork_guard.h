// ForkGuard: detects that an object of a group is a copy in a forked child (a data loader's worker,
// say). Its threads do not exist there, its peers take the child for its parent, and nothing that
// the child does to it may reach them.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "core/types.h"

namespace pycomm {

class PYCOMM_API ForkGuard {
 public:
  ForkGuard() : process_(current()) {}

  /// True in a child of the process that made this. It costs a memory access, since the kernel
  /// wipes the mark in children; where the kernel cannot, it costs a system call.
  bool in_child() const {
    const std::atomic<uint64_t>* mark = mark_.load(std::memory_order_acquire);
    return (mark ? mark->load(std::memory_order_relaxed) : current()) != process_;
  }
  /// Throws Error in a child: `who` ("rank 1") cannot call `what` there.
  void refuse(const std::string& who, const char* what) const {
    if (in_child()) throw_in_child(who, what);
  }

 private:
  /// Number of this process, which none of its ancestors has.
  static uint64_t current();
  [[noreturn]] static void throw_in_child(const std::string& who, const char* what);

  static std::atomic<std::atomic<uint64_t>*> mark_;  ///< zero in a child until it makes a guard
  const uint64_t process_;
};

}  // namespace pycomm
