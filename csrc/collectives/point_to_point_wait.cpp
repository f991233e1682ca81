// Who moves the bytes: the thread that waits, else the thread of the group.
#include "collectives/point_to_point_request.h"

namespace pycomm {
namespace {

// The time a caller has to wait itself before our thread takes over: a wake-up would only slow down
// a pair of blocking calls.
constexpr Milliseconds kGrace{1};
// How long our thread sleeps on the mesh: a new request cannot be posted meanwhile. Longer once
// nothing has moved for a while, to leave the processor alone.
constexpr std::chrono::microseconds kNap{200};
constexpr std::chrono::microseconds kLongNap{2000};
constexpr int kNapsBeforeLong = 100;

}  // namespace

// Sleeps without the lock, then lets those in who want to post.
void PointToPoint::rest(Lock& lock, const std::function<void()>& how) {
  resting_ = true;
  lock.unlock();
  how();
  lock.lock();
  resting_ = false;
  changed_.notify_all();
  changed_.wait(lock, [this] { return entering_ == 0; });
}

void PointToPoint::wait(Request& request, Milliseconds limit) {
  Lock lock(mutex_);
  waiting_++;
  try {
    drive(lock, request, limit);
    waiting_--;
  } catch (...) {
    waiting_--;
    if (closed_) throw;  // there is no group any more
    end_in(request);
  }
  wake_server();
}

// Moves bytes, or waits for the thread that does, until the request is done.
void PointToPoint::drive(Lock& lock, const Request& request, Milliseconds limit) {
  const Deadline deadline = Deadline::after(limit);
  bool shown = false;
  for (int quiet = 0; !request.finished; quiet++) {
    if (closed_) throw Error(request.describe() + " was not done when its group was closed");
    failure_.rethrow();
    if (deadline.expired()) {
      throw Timeout(request.describe() + " did not end within the timeout of " +
                    std::to_string(limit.count()) + " ms; check that the other end " +
                    (request.is_send ? "receives" : "sends") + " with the same tag");
    }
    if (resting_) {
      changed_.wait_for(lock, std::min(deadline.left(), Milliseconds(10)));
    } else if (step()) {
      quiet = 0;
    } else if (!request.finished) {
      if (!shown) mesh_.standing().wait_for(request.describing_tag());
      shown = true;
      if (mesh_.should_check(quiet)) look_for_failures();
      rest(lock, [&] { mesh_.pause(kLane, quiet, deadline); });
    }
  }
  if (request.error) std::rethrow_exception(request.error);
  if (shown) mesh_.standing().wait_over();
}

void PointToPoint::wake_server() {
  if (outstanding_ == 0 || waiting_ > 0 || serving_ || closed_) return;
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  server_.notify_one();
}

void PointToPoint::serve() {
  Lock lock(mutex_);
  const auto needed = [this] { return outstanding_ > 0 && waiting_ == 0 && !failure_.happened(); };
  while (!closed_) {
    serving_ = false;
    server_.wait(lock, [&] { return closed_ || needed(); });
    serving_ = true;
    server_.wait_for(lock, kGrace, [this] { return closed_; });
    try {
      for (int quiet = 0; !closed_ && needed(); quiet++) {
        if (step()) {
          quiet = 0;
          continue;
        }
        look_for_failures();
        const auto nap = quiet < kNapsBeforeLong ? kNap : kLongNap;
        rest(lock, [&] { mesh_.idle(kLane, nap); });
      }
    } catch (...) {
      over_();
      changed_.notify_all();  // those that wait throw it
    }
  }
}

}  // namespace pycomm
