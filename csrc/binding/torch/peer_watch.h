// Peer watch: a thread that looks now and then whether the other ranks live while kernels may wait
// for them. Kernels see memory alone: for one that waits, a dead rank is a slow one. A part of
// _c10d.
#pragma once
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "collectives/queue.h"
#include "core/deadline.h"
#include "core/fork_guard.h"

namespace pycomm::torch_binding {

class PeerWatch {
 public:
  /// Calls `look`, which must not throw, every 100 ms from now on.
  explicit PeerWatch(std::function<void()> look) {
    thread_.submit([state = state_, look = std::move(look)] {
      std::unique_lock<std::mutex> lock(state->mutex);
      while (!state->changed.wait_for(lock, Milliseconds(100), [&] { return state->ended; })) {
        lock.unlock();
        look();
        lock.lock();
      }
    });
  }
  PeerWatch(const PeerWatch&) = delete;
  /// Ends the thread.
  ~PeerWatch() {
    if (fork_.in_child()) return;  // the thread is the parent's
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->ended = true;
    state_->changed.notify_all();
  }

 private:
  /// Also the thread's: in a forked child, which has no such thread, it is never destroyed.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
  };
  const ForkGuard fork_{};
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  Queue thread_;  ///< destroyed after our destructor has let it end
};

}  // namespace pycomm::torch_binding
