// Queue: every operation takes a number; numbers are served in order, by the thread or by the
// caller that holds them.
#include "collectives/queue.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "core/fork_guard.h"
#include "core/interrupt.h"

namespace pycomm {

class Queue::Impl : public std::enable_shared_from_this<Impl> {
 public:
  /// The queue that this thread serves.
  static thread_local Impl* served_here;

  void submit(std::function<void()> op) {
    fork_.refuse("queue", "an operation");
    {
      std::lock_guard<std::mutex> lock(mutex_);  // taken before the number: the deque is in order
      if (!thread_.joinable()) {                 // first: there may be no more threads
        thread_ = std::thread([self = shared_from_this()] { self->serve(); });
      }
      waiting_.push_back({next_.fetch_add(1), std::move(op)});
    }
    changed_.notify_all();
  }

  bool inside() const { return std::this_thread::get_id() == server_.load(); }

  void close() {
    if (fork_.in_child()) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    if (!thread_.joinable()) return;
    if (inside()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  // Takes no lock if no other thread is there. A thread that takes a number reads serving_
  // afterwards, and a thread that ends a turn reads next_ after it has advanced serving_: one of
  // the two sees the other.
  void begin_turn() {
    fork_.refuse("queue", "an operation");
    const uint64_t number = next_.fetch_add(1);
    if (serving_.load() == number) return;
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_ours = [&] { return serving_.load() == number; };
    try {
      InterruptPoll::wait(changed_, lock, Deadline::after(kForever), is_ours);
    } catch (...) {
      lock.lock();
      if (!is_ours()) {
        given_up_.insert(number);
        throw;
      }
      lock.unlock();
      end_turn();
      throw;
    }
  }

  void end_turn() {
    if (fork_.in_child()) return;  // the turn belongs to the parent
    const uint64_t following = serving_.load(std::memory_order_relaxed) + 1;
    serving_.store(following);
    if (next_.load() == following) return;
    mutex_.lock();  // a thread that has looked in vain sleeps by now
    while (given_up_.erase(serving_.load()) > 0) ++serving_;
    mutex_.unlock();
    changed_.notify_all();
  }

  // The operation that waits gives its turn to the next one and takes over the turn of the last one
  // when it continues: a caller on another thread in between has its turn meanwhile.
  bool run_until(const std::function<bool()>& done, Deadline deadline) {
    while (!done()) {
      std::unique_lock<std::mutex> lock(mutex_);
      if (waiting_.empty() || deadline.expired()) return false;
      lock.unlock();
      end_own_turn();
      lock.lock();
      changed_.wait(lock, [this] { return is_front_due(); });
      run_front(lock);
    }
    return true;
  }

  bool idle() const { return next_.load() == serving_.load(); }

 private:
  struct Entry {
    uint64_t number;
    std::function<void()> op;
  };

  void serve() {
    server_ = std::this_thread::get_id();
    served_here = this;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return waiting_.empty() ? closing_ : is_front_due(); });
      if (waiting_.empty()) return;
      run_front(lock);
      end_own_turn();
      lock.lock();
    }
  }

  bool is_front_due() const {
    return !waiting_.empty() && waiting_.front().number == serving_.load();
  }

  // Runs the front operation; returns with `lock` unlocked.
  void run_front(std::unique_lock<std::mutex>& lock) {
    std::function<void()> op = std::move(waiting_.front().op);
    running_ = waiting_.front().number;
    waiting_.pop_front();
    lock.unlock();
    op();
    op = nullptr;  // what it holds may end the group, which is part of its turn
  }

  // Ends the turn of the operation that ran last; run_until() may have ended it before.
  void end_own_turn() {
    if (serving_.load() == running_) end_turn();
  }

  const ForkGuard fork_{};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> waiting_;
  std::thread thread_;
  std::atomic<std::thread::id> server_{};
  std::atomic<uint64_t> next_{0};     // number of the next operation
  std::atomic<uint64_t> serving_{0};  // number of the one whose turn it is
  std::set<uint64_t> given_up_;       // numbers whose callers were interrupted while they waited
  uint64_t running_ = 0;              // number of the last one that the thread has begun
  bool closing_ = false;
};

thread_local Queue::Impl* Queue::Impl::served_here = nullptr;

namespace {

/// For each queue whose thread waits in an operation of its own for one of another queue: that one.
struct Waits {
  std::mutex mutex;
  std::map<const void*, const void*> awaited;
};

Waits& waits() {
  static Waits* const all = new Waits;  // threads may wait until the process ends
  return *all;
}

/// Sets what a queue's thread waits for, null for nothing, and returns what it was.
const void* set_awaited(const void* queue, const void* other) {
  const std::lock_guard<std::mutex> lock(waits().mutex);
  auto& awaited = waits().awaited;
  const void* const before = std::exchange(awaited[queue], other);
  if (!other) awaited.erase(queue);
  return before;
}

/// True if the queue's thread waits for itself in the end, possibly through further queues.
bool waits_in_a_circle(const void* queue) {
  const std::lock_guard<std::mutex> lock(waits().mutex);
  const auto& awaited = waits().awaited;
  auto next = awaited.find(queue);
  for (size_t steps = 0; next != awaited.end() && steps <= awaited.size(); steps++) {
    if (next->second == queue) return true;
    next = awaited.find(next->second);
  }
  return false;
}

}  // namespace

Queue::Queue() : impl_(std::make_shared<Impl>()) {}
Queue::~Queue() { impl_->close(); }
void Queue::submit(std::function<void()> op) { impl_->submit(std::move(op)); }
bool Queue::inside() const { return impl_->inside(); }
bool Queue::idle() const { return impl_->idle(); }
bool Queue::run_until(const std::function<bool()>& done, Deadline deadline) {
  return impl_->run_until(done, deadline);
}
void Queue::wait_from_another(const std::function<bool()>& done, Deadline deadline) const {
  Impl* const here = Impl::served_here;
  // What an operation around this one waits for stays its own.
  const void* const before = set_awaited(here, impl_.get());
  const std::shared_ptr<void> restored(nullptr, [&](void*) { set_awaited(here, before); });
  for (auto pause = std::chrono::microseconds(20); !done() && !deadline.expired();
       pause = std::min<std::chrono::microseconds>(2 * pause, Milliseconds(5))) {
    if (waits_in_a_circle(here)) here->run_until(done, deadline);
    std::this_thread::sleep_for(pause);
  }
}
bool Queue::inside_any() { return Impl::served_here != nullptr; }

Queue::Turn::Turn(Queue& queue) : impl_(queue.inside() ? nullptr : queue.impl_.get()) {
  if (impl_) impl_->begin_turn();
}
Queue::Turn::~Turn() {
  if (impl_) impl_->end_turn();
}

}  // namespace pycomm
