// Work of the "pycomm" process group: the handle that torch gets for an operation. A part of _c10d.
#pragma once
#include <ATen/record_function.h>

#include <atomic>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "binding/torch/call.h"
#include "collectives/communicator.h"
#include "core/fork_guard.h"
#include "core/warning.h"

namespace pycomm::torch_binding {

using WorkPtr = intrusive_ptr<c10d::Work>;
using Future = c10::ivalue::Future;

class Engine;  // torch/engine.h

/// Returns how an operation ended, in torch's terms.
inline c10d::ErrorType error_type(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Timeout&) {
    return c10d::ErrorType::TIMEOUT;
  } catch (const PeerLost&) {
    return c10d::ErrorType::REMOTE_ERROR;
  } catch (...) {
    return c10d::ErrorType::COMM_ERROR;
  }
}

inline intrusive_ptr<Future> future_of_tensors(std::vector<c10::Device> devices = {}) {
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                     std::move(devices));
}

/// Waits until a future is complete, and throws Interrupted: torch's own wait lets no signal in.
inline void wait_for(Future& future) {
  struct Ended {
    std::mutex mutex;
    std::condition_variable changed;
    bool is = false;
  };
  const auto ended = std::make_shared<Ended>();
  future.addCallback([ended](Future&) {
    const std::lock_guard<std::mutex> lock(ended->mutex);
    ended->is = true;
    ended->changed.notify_all();
  });
  std::unique_lock<std::mutex> lock(ended->mutex);
  InterruptPoll::wait(ended->changed, lock, Deadline::after(kForever), [&] { return ended->is; });
}

/// One issued operation. Its future completes, and the future's callbacks run, in the order of
/// issue.
class Work : public c10d::Work {
 public:
  /// `name` is torch's name for the operation in profiles, and ours in errors.
  Work(int rank, const Call& call, uint64_t seq, Tensors outputs)
      // The title makes torch look for profilers again, which costs as much as a small operation.
      : c10d::Work(rank, call.type, at::hasCallbacks() ? call.title : nullptr),
        name_(call.name),
        seq_(seq),
        outputs_(std::move(outputs)) {}

  /// Sets the value of the future where it is not the list of output tensors. Before complete().
  void set_value(c10::IValue value, const c10::TypePtr& type) {
    value_ = std::move(value);
    future_ = c10::make_intrusive<Future>(type);
    finish_with_future();
  }
  /// Makes the future of an operation that is still to run. Before complete().
  void make_future() {
    if (future_) return;
    value_ = outputs_;
    future_ = future_of_tensors();
    finish_with_future();
  }
  /// Sets the engine that runs it, if that is not its caller. Before complete().
  void set_engine(std::weak_ptr<Engine> engine) { engine_ = std::move(engine); }
  /// Returns null if the engine is gone.
  std::shared_ptr<Engine> engine() const { return engine_.lock(); }

  void complete() {
    if (!future_) return finish();
    future_->markCompleted(value_);
  }
  void fail(const std::exception_ptr& error) {
    if (!future_) return finish(as_python(error));
    future_->setError(as_python(error));
  }

  /// Calls complete() or fail(). Exceptions of callbacks stop here: torch keeps those of Python
  /// callbacks in their futures, and others must not end the thread that runs all operations.
  void end(const std::exception_ptr& error) noexcept {
    try {
      error ? fail(error) : complete();
    } catch (const std::exception& e) {
      warn_once(describe() + ": a callback of its future has failed: " + e.what());
    }
  }

  intrusive_ptr<Future> getFuture() override { return ended(); }
  // The future decides: a thread that waited for it must find the work complete too.
  bool isCompleted() override { return future_ ? future_->completed() : c10d::Work::isCompleted(); }
  bool isSuccess() const override {
    return future_ ? future_->completed() && !future_->hasError() : c10d::Work::isSuccess();
  }
  std::exception_ptr exception() const override {
    if (!future_) return c10d::Work::exception();
    return future_->hasError() ? future_->exception_ptr() : nullptr;
  }
  std::vector<at::Tensor> result() override { return outputs_; }

  /// A timeout ends this wait, not the operation.
  bool wait(Milliseconds timeout = kNoTimeout) override {
    if (fork_.in_child())
      raise(describe() +
            " was issued by the parent of this forked child, and "
            "only the parent can wait for it");
    if (Queue::inside_any()) timeout = limit_in_callback(timeout);
    return ending_group_if_interrupted([&] { return wait_until_complete(timeout); });
  }
  // For CPU tensors the caller is the stream.
  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }
  /// Ends the whole group, as NCCL does: ranks cannot agree on leaving out one operation.
  void abort() override;

  uint64_t getSequencenumber() const override { return seq_; }

  /// Its number in the trace.
  void set_noted(uint64_t noted) { noted_ = noted; }
  uint64_t noted() const { return noted_; }

  /// Called when only weak references are left: they would keep the tensors.
  void release_resources() override {
    outputs_.clear();
    value_ = c10::IValue();
    future_.reset();
  }

  void set_finite(bool finite) { finite_ = finite; }
  /// For a compressed operation: true if it has succeeded and no value of the result is Inf or NaN.
  virtual bool finite() { return isSuccess() && finite_; }

 protected:
  /// Returns a future that completes when this rank's part is done.
  virtual intrusive_ptr<Future> ended() {
    if (!future_) {  // made by a synchronous operation, which is done
      future_ = future_of_tensors();
      future_->markCompleted(outputs_);
    }
    return future_;
  }
  std::string describe() const {
    return "rank " + std::to_string(rank_) + ": " + name_ + " #" + std::to_string(seq_);
  }
  /// Runs a wait. If a signal ends it, the group ends as well: nobody waits for the operation any
  /// more, whose buffers are its caller's.
  template <typename F>
  bool ending_group_if_interrupted(const F& wait) {
    try {
      return wait();
    } catch (const Interrupted& interrupted) {
      end_group(interrupted);
    }
  }
  /// Does the part of wait() that only waits, for the thread that completes the work.
  bool wait_until_complete(Milliseconds timeout = kNoTimeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto done = [this] { return completed_; };
    const Deadline deadline = Deadline::after(timeout.count() > 0 ? timeout : kForever);
    if (!InterruptPoll::wait(cv_, lock, deadline, done)) {
      lock.unlock();
      raise<Timeout>(describe() + " timed out: it was not done after a wait of " +
                     std::to_string(timeout.count()) + " ms; it continues" + describe_ranks());
    }
    lock.unlock();
    InterpreterEnd::stay_if_begun();
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  std::weak_ptr<Engine> engine_;  ///< of operations that may outlast their call

 private:
  [[noreturn]] void end_group(const Interrupted& interrupted);
  /// Returns lines that say what all ranks are doing.
  std::string describe_ranks() const;
  // This is the first callback, so that callbacks that wait for this work find it done.
  void finish_with_future() {
    future_->addCallback([this](Future& done) {
      finish(done.hasError() ? done.exception_ptr() : std::exception_ptr());
    });
  }

  const ForkGuard fork_{};
  /// Returns how long a wait in a callback may last: callbacks of two groups may wait for each
  /// other. Throws Error if the thread that it is on would complete this work.
  Milliseconds limit_in_callback(Milliseconds timeout);
  const char* name_;
  uint64_t seq_;
  Tensors outputs_;
  uint64_t noted_ = 0;
  bool finite_ = false;
  c10::IValue value_;
  intrusive_ptr<Future> future_;
};

/// A posted send or receive. The thread that waits for it completes it.
class PeerWork : public Work {
 public:
  PeerWork(int rank, const Call& call, uint64_t seq, const at::Tensor& tensor, Flat flat,
           std::shared_ptr<Communicator::Request> request)
      : Work(rank, call, seq, {tensor}),
        copies_(call.type != OpType::SEND && flat.is_copy()),
        flat_(std::move(flat)),
        request_(std::move(request)) {
    make_future();
  }

  /// True if its buffer is not needed any more.
  bool done() const { return request_->done(); }
  /// True if what is received has to be copied into the tensor.
  bool copies() const { return copies_; }
  /// Returns the device of its tensor; nothing for the CPU.
  virtual std::optional<c10::Device> device() const { return {}; }
  bool isCompleted() override {
    // The first thread that sees that the request is done completes the work. Others must not wait
    // for it here: they may hold the interpreter that it needs.
    if (done()) settle();
    return Work::isCompleted();
  }
  bool wait(Milliseconds timeout = kNoTimeout) override;
  int sourceRank() const override { return request_->source(); }

  /// Waits for the request and completes the work, unless another thread does that already.
  void settle();

 protected:
  intrusive_ptr<Future> ended() override;
  /// Copies received data into the tensor.
  virtual void finish() { flat_->finish(); }

 private:
  const bool copies_;
  std::optional<Flat> flat_;  ///< until it is settled
  std::shared_ptr<Communicator::Request> request_;
  std::atomic<bool> settled_{false};  ///< true also while a thread is about to
};

/// Several operations that are waited for as one.
class CoalescedWork final : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<WorkPtr> works)
      : c10d::Work(rank, OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const WorkPtr& work : works_)
      if (auto error = work->exception()) return error;
    return nullptr;
  }
  std::vector<at::Tensor> result() override {
    Tensors all;
    for (const WorkPtr& work : works_)
      for (at::Tensor& t : work->result()) all.push_back(std::move(t));
    return all;
  }
  bool wait(Milliseconds timeout = kNoTimeout) override {
    const Deadline deadline = Deadline::after(timeout);
    for (const WorkPtr& work : works_)
      work->wait(timeout.count() > 0 ? std::max(deadline.left(), Milliseconds(1)) : kNoTimeout);
    return true;
  }
  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }
  void abort() override {
    for (const WorkPtr& work : works_) work->abort();
  }
  uint64_t getSequencenumber() const override { return works_.back()->getSequencenumber(); }
  intrusive_ptr<Future> getFuture() override {
    raise("rank " + std::to_string(rank_) +
          ": operations that were issued as one have no future: call wait()");
  }

 private:
  std::vector<WorkPtr> works_;  ///< at least one, in the order of issue
};

}  // namespace pycomm::torch_binding
