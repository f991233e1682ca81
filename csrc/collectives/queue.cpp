// Every operation takes a number; numbers are served in order, by the thread or by the caller that
// holds them.
#include "collectives/queue.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "core/fork_guard.h"

namespace pycomm {

class Queue::Impl : public std::enable_shared_from_this<Impl> {
 public:
  void submit(std::function<void()> op) {
    {
      std::lock_guard<std::mutex> lock(mutex_);  // before the number: the deque is in order
      waiting_.push_back({next_.fetch_add(1), std::move(op)});
      if (!thread_.joinable()) {
        thread_ = std::thread([self = shared_from_this()] { self->serve(); });
      }
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

  // Without the lock where nobody else is there. Who takes a number reads serving_ afterwards, and
  // who ends a turn reads next_ after it has moved serving_ on: one of the two sees the other.
  void begin_turn() {
    const uint64_t number = next_.fetch_add(1);
    if (serving_.load() == number) return;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return serving_.load() == number; });
  }

  void end_turn() {
    const uint64_t following = serving_.load(std::memory_order_relaxed) + 1;
    serving_.store(following);
    if (next_.load() == following) return;
    mutex_.lock();  // who has looked in vain sleeps by now
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
  bool closing_ = false;
};

Queue::Queue() : impl_(std::make_shared<Impl>()) {}
Queue::~Queue() { impl_->close(); }
void Queue::submit(std::function<void()> op) { impl_->submit(std::move(op)); }
bool Queue::inside() const { return impl_->inside(); }
bool Queue::idle() const { return impl_->idle(); }

Queue::Turn::Turn(Queue& queue) : impl_(queue.inside() ? nullptr : queue.impl_.get()) {
  if (impl_) impl_->begin_turn();
}
Queue::Turn::~Turn() {
  if (impl_) impl_->end_turn();
}

}  // namespace pycomm
