// Queue: the in-order thread of a group. Async operations run on it, in the order of issue, which
// is the same on all ranks. A synchronous caller runs on its own thread when nothing is queued,
// since a hand-over costs a wake-up.
#pragma once
#include <functional>
#include <memory>

#include "core/deadline.h"
#include "core/types.h"

namespace pycomm {

class PYCOMM_API Queue {
 public:
  Queue();
  /// Finishes what is queued. (Abort the communicator first to make that quick.) If it runs on the
  /// queue's own thread, where an operation may hold the last reference to its group, what is
  /// queued is finished later.
  ~Queue();

  /// Runs `op` on the thread after everything before it. `op` must not throw.
  void submit(std::function<void()> op);
  /// Runs `op` on the calling thread after everything queued before it, and returns when it is
  /// done; exceptions pass through. Throws Interrupted if the wait before it is.
  template <typename F>
  void run(F&& op) {
    const Turn turn(*this);
    op();
  }

  /// True on the queue's thread: an operation issued there is part of the running one and must run
  /// at once, since its issuer may wait for it.
  bool inside() const;
  /// True on the thread of any queue.
  static bool inside_any();

  /// True if an operation that is run now would not wait, unless another thread is faster.
  bool idle() const;

 private:
  class Impl;

  /// Turn of an operation. It begins when everything queued before is done; later operations wait
  /// for its end.
  class PYCOMM_API Turn {
   public:
    explicit Turn(Queue& queue);
    ~Turn();
    Turn(const Turn&) = delete;

   private:
    Impl* impl_;  ///< null on the queue's thread, whose turn it is anyway
  };

  std::shared_ptr<Impl> impl_;  ///< shared with the thread
};

}  // namespace pycomm
