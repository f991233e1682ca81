// Progress of requests: the thread that waits moves the bytes, else the thread of the group.
#include "collectives/point_to_point/request.h"

namespace pycomm {
namespace {

// Time in which a caller can start to wait before our thread takes over: a wake-up would only slow
// down a pair of blocking calls.
constexpr Milliseconds kGrace{1};
// Time that our thread sleeps on the mesh: a new request cannot be posted meanwhile. It is longer
// once nothing has moved for a while, to save processor time.
constexpr std::chrono::microseconds kIdle{200};
constexpr std::chrono::microseconds kLongIdle{2000};
constexpr int kIdlesBeforeLong = 100;

}  // namespace

// Sleeps without the lock, then admits the threads that want to post.
void PointToPoint::sleep_unlocked(Lock& lock, const std::function<void()>& how) {
  sleeping_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    how();
  } catch (...) {  // such as no memory: no thread may wait for the end of this sleep forever
    error = std::current_exception();
  }
  lock.lock();
  sleeping_ = false;
  changed_.notify_all();
  if (error) std::rethrow_exception(error);
  changed_.wait(lock, [this] { return entering_ == 0; });
}

void PointToPoint::wait(Request& request, Milliseconds limit) {
  UnlockingGuard guard(*this);
  waiting_++;
  try {
    drive(guard.lock(), request, limit);
    waiting_--;
  } catch (...) {
    waiting_--;
    if (!closed_) end_in(request);
    changed_.notify_all();  // the thread that closes waits for us
    throw;                  // the group has failed
  }
  if (closed_) return changed_.notify_all();
  wake_server();
}

// Moves bytes, or waits for the thread that does, until the request is done.
void PointToPoint::drive(Lock& lock, const Request& request, Milliseconds limit) {
  const Deadline deadline = Deadline::after(limit);
  bool shown = false;
  for (int quiet = 0; !request.finished; quiet++) {
    check_open(request);
    failure_.rethrow();
    if (deadline.expired()) {
      throw Timeout(request.describe() + " did not end within the timeout of " +
                    std::to_string(limit.count()) + " ms; check that the other end " +
                    (request.is_send ? "receives" : "sends") + " with the same tag");
    }
    if (sleeping_) {
      changed_.wait_for(lock, std::min(deadline.left(), Milliseconds(10)));
    } else if (step()) {
      quiet = 0;
    } else if (!request.finished) {
      if (!shown) mesh_.rank_state().wait_for(request.describing_tag());
      shown = true;
      if (mesh_.should_check(quiet)) look_for_failures();
      sleep_unlocked(lock, [&] { mesh_.pause(kLane, quiet, deadline); });
    }
  }
  if (request.error) std::rethrow_exception(request.error);
  if (shown) mesh_.rank_state().wait_over();
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
        const bool moved = step();
        if (!moved) look_for_failures();
        if (!unneeded_.empty()) {
          release_unneeded(lock);
          lock.lock();
        }
        if (moved) {
          quiet = 0;
          continue;
        }
        const auto limit = quiet < kIdlesBeforeLong ? kIdle : kLongIdle;
        sleep_unlocked(lock, [&] { mesh_.idle(kLane, limit); });
      }
    } catch (...) {
      over_();
      changed_.notify_all();  // those that wait throw it
    }
  }
}

}  // namespace pycomm
