// Queue: every operation takes a number; numbers are served in order, by the thread or by the
// caller that holds them.
#include "collectives/queue.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "core/fork_guard.h"
#include "core/interrupt.h"
#include "core/thread.h"

namespace pycomm {

class Queue::Impl : public std::enable_shared_from_this<Impl> {
 public:
  /// True on the thread of a queue.
  static thread_local bool serves;

  void submit(std::function<void()> op) {
    fork_.refuse("queue", "an operation");
    {
      std::lock_guard<std::mutex> lock(mutex_);  // taken before the number: the deque is in order
      if (!thread_.joinable()) {                 // first: there may be no more threads
        thread_ = start_thread("queue:", [self = shared_from_this()] { self->serve(); });
      }
      waiting_.push_back({0, std::move(op)});
      waiting_.back().number = next_.fetch_add(1);  // last: no number may be without an operation
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

  bool idle() const { return next_.load() == serving_.load(); }

 private:
  struct Entry {
    uint64_t number;
    std::function<void()> op;
  };

  void serve() {
    server_ = std::this_thread::get_id();
    serves = true;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] {
        return waiting_.empty() ? closing_ : waiting_.front().number == serving_.load();
      });
      if (waiting_.empty()) return;
      std::function<void()> op = std::move(waiting_.front().op);
      waiting_.pop_front();
      lock.unlock();
      op();
      op = nullptr;  // what it holds may end the group, which is part of its turn
      end_turn();
      lock.lock();
    }
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
  bool closing_ = false;
};

thread_local bool Queue::Impl::serves = false;

Queue::Queue() : impl_(std::make_shared<Impl>()) {}
Queue::~Queue() { impl_->close(); }
void Queue::submit(std::function<void()> op) { impl_->submit(std::move(op)); }
bool Queue::inside() const { return impl_->inside(); }
bool Queue::idle() const { return impl_->idle(); }
bool Queue::inside_any() { return Impl::serves; }

Queue::Turn::Turn(Queue& queue) : impl_(queue.inside() ? nullptr : queue.impl_.get()) {
  if (impl_) impl_->begin_turn();
}
Queue::Turn::~Turn() {
  if (impl_) impl_->end_turn();
}

}  // namespace pycomm
