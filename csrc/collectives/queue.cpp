// Every operation takes a number; numbers are served in order, by the thread or by the caller that
// holds them.
#include "collectives/queue.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace pycomm {

class Queue::Impl {
 public:
  ~Impl() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void submit(std::function<void()> op) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back({next_++, std::move(op)});
      if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
    }
    changed_.notify_all();
  }

  bool inside() const { return std::this_thread::get_id() == server_.load(); }

  void run(const std::function<void()>& op) {
    if (inside()) return op();
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t number = next_++;
    changed_.wait(lock, [&] { return serving_ == number; });
    lock.unlock();
    const Turn turn(*this);
    op();
  }

 private:
  // Ends the turn that is being served, also when the operation throws.
  struct Turn {
    explicit Turn(Impl& impl) : impl(impl) {}
    ~Turn() {
      bool others;
      {
        std::lock_guard<std::mutex> lock(impl.mutex_);
        others = ++impl.serving_ != impl.next_;
      }
      if (others) impl.changed_.notify_all();
    }
    Impl& impl;
  };

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
      const std::function<void()> op = std::move(waiting_.front().op);
      waiting_.pop_front();
      lock.unlock();
      {
        const Turn turn(*this);
        op();
      }
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> waiting_;
  std::thread thread_;
  std::atomic<std::thread::id> server_{};
  uint64_t next_ = 0;     // number of the next operation
  uint64_t serving_ = 0;  // number of the one whose turn it is
  bool closing_ = false;
};

Queue::Queue() : impl_(std::make_unique<Impl>()) {}
Queue::~Queue() = default;
void Queue::submit(std::function<void()> op) { impl_->submit(std::move(op)); }
void Queue::run(const std::function<void()>& op) { impl_->run(op); }
bool Queue::inside() const { return impl_->inside(); }

}  // namespace pycomm
