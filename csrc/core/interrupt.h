// Interrupts: a thread that waits may have to stop, by Ctrl+C for example. The core knows no
// interpreter: a binding sets the function that asks.
#pragma once
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "core/deadline.h"
#include "core/types.h"

namespace pycomm {

/// The thread that waits is to stop. It is no Error: what goes on after errors of a group must not
/// go on after this.
class PYCOMM_API Interrupted : public std::exception {
 public:
  /// `cause` is for the caller of the wait; `what` says it to other ranks, such as
  /// "KeyboardInterrupt".
  Interrupted(std::exception_ptr cause, std::string what)
      : cause(std::move(cause)), what_(std::move(what)) {}
  const char* what() const noexcept override { return what_.c_str(); }

  std::exception_ptr cause;

 private:
  std::string what_;
};

/// Sets the function that waits call now and then, on any thread, without a lock of ours that other
/// threads need. It throws Interrupted to end the wait.
PYCOMM_API void set_interrupt_check(void (*check)());
/// Calls it.
PYCOMM_API void check_interrupt();

/// The interrupt checks of one wait: the first is made after a tenth of a second, so that short
/// waits cost nothing, and all of them take a fifth of the wait at most.
class PYCOMM_API InterruptPoll {
 public:
  void check() {
    if (Clock::now() >= next_) check_now();
  }

  /// Waits as condition_variable::wait_until() does, with checks in between, which are made without
  /// the lock. If one throws, the lock is released.
  template <typename Ready>
  static bool wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                   const Deadline& deadline, const Ready& ready) {
    InterruptPoll poll;
    while (!ready()) {
      if (deadline.expired()) return false;
      if (changed.wait_for(lock, std::min(kEach, deadline.left() + Milliseconds(1)), ready)) break;
      lock.unlock();
      poll.check();
      lock.lock();
    }
    return true;
  }

 private:
  using Clock = Deadline::Clock;
  static constexpr Milliseconds kEach{100};
  void check_now();

  Clock::time_point next_ = Clock::now() + kEach;
};

}  // namespace pycomm
