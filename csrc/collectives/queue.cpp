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
      std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back({next_++, std::move(op)});
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

  void begin_turn() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t number = next_++;
    changed_.wait(lock, [&] { return serving_ == number; });
  }

  void end_turn() {
    bool others;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      others = ++serving_ != next_;
    }
    if (others) changed_.notify_all();
  }

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
        return waiting_.empty() ? closing_ : waiting_.front().number == serving_;
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

  const ForkGuard fork_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> waiting_;
  std::thread thread_;
  std::atomic<std::thread::id> server_{};
  uint64_t next_ = 0;     // number of the next operation
  uint64_t serving_ = 0;  // number of the one whose turn it is
  bool closing_ = false;
};

Queue::Queue() : impl_(std::make_shared<Impl>()) {}
Queue::~Queue() { impl_->close(); }
void Queue::submit(std::function<void()> op) { impl_->submit(std::move(op)); }
bool Queue::inside() const { return impl_->inside(); }

Queue::Turn::Turn(Queue& queue) : impl_(queue.inside() ? nullptr : queue.impl_.get()) {
  if (impl_) impl_->begin_turn();
}
Queue::Turn::~Turn() {
  if (impl_) impl_->end_turn();
}

}  // namespace pycomm
