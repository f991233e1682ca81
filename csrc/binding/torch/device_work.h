// Device work: streams wait for it, as for NCCL's. A part of _c10d.
#pragma once
#include "binding/torch/device.h"
#include "binding/torch/work.h"

namespace pycomm::torch_binding {

/// The delivery of results to a device, on a stream of the group.
class Delivery {
 public:
  explicit Delivery(c10::Stream stream)
      : stream_(stream),
        done_(std::make_shared<c10::Event>(stream.device_type())),
        future_(future_of_tensors({stream.device()})) {}
  ~Delivery() {
    const DisposalGuard on(device());
    done_.reset();
    future_.reset();
  }
  Delivery(const Delivery&) = delete;

  /// Returns an event that is recorded on the stream when the delivery is queued.
  const std::shared_ptr<c10::Event>& done() const { return done_; }
  /// True also if nothing was queued.
  bool is_done() const {
    const c10::DeviceGuard on(device());
    return done_->query();
  }
  void block_current_stream() const {
    const c10::DeviceGuard on(device());
    done_->block(c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device()));
  }
  c10::Device device() const { return stream_.device(); }

  /// Returns a future whose callbacks run on streams that wait for our queued work.
  const intrusive_ptr<Future>& future() const { return future_; }
  /// Reports that the delivery is queued, or never will be.
  void promise(const Tensors& outputs, std::exception_ptr error) {
    std::optional<c10::StreamGuard> on;
    if (!error) {
      try {
        on.emplace(stream_);
        // Torch records one, too, when it has made the future complete: if the driver refuses that,
        // it wakes nobody who waits.
        c10::Event(stream_.device_type()).record(stream_);
      } catch (...) {
        error = as_python(std::current_exception());
      }
    }
    if (error) return future_->setError(error);
    std::vector<Future::WeakStorage> storages;
    for (const at::Tensor& t : outputs) storages.emplace_back(t.storage().getWeakStorageImpl());
    future_->markCompleted(outputs, std::move(storages));
  }

 private:
  const c10::Stream stream_;
  std::shared_ptr<c10::Event> done_;
  intrusive_ptr<Future> future_;
};

/// A collective. The base class covers the host's part of it: it is complete when that is done, or
/// has failed.
class DeviceWork final : public Work {
 public:
  /// `held`: the delivery is queued when the operation is issued, behind a hold. Then wait() blocks
  /// only streams, and the future is complete from the start, whatever the operation's error.
  DeviceWork(int rank, const Call& call, uint64_t seq, Tensors outputs, c10::Stream stream,
             bool held)
      : Work(rank, call, seq, std::move(outputs)), held_(held), delivery_(stream) {
    set_value(c10::IValue(), c10::NoneType::get());
    if (!held_) ended()->addCallback([this](Future&) { promise(); });
  }

  const std::shared_ptr<c10::Event>& delivered() const { return delivery_.done(); }
  /// True if the host's part is done, so that the delivery is queued if it ever will be.
  bool is_queued() { return held_ || Work::isCompleted(); }
  void wait_until_queued() { wait_for(*ended()); }
  void promise() { delivery_.promise(result(), held_ ? nullptr : exception()); }

  intrusive_ptr<Future> getFuture() override { return delivery_.future(); }
  bool isCompleted() override {
    return is_lost_ || (Work::isCompleted() && (delivery_.is_done() || !Work::isSuccess()));
  }
  bool isSuccess() const override { return !is_lost_ && Work::isSuccess() && !device_error(); }
  std::exception_ptr exception() const override {
    if (is_lost_) return as_python(lost_);
    const auto error = Work::exception();
    return error ? error : device_error();
  }
  /// Sets the error of an operation for which streams wait, before they go on: whoever then has
  /// what they have left finds it. By the thread that runs the operation, once.
  void set_lost(std::exception_ptr error) {
    lost_ = std::move(error);
    is_lost_ = true;
  }

  /// Sets a function that throws if work on the device has failed. Any thread calls it.
  void set_check(std::function<void()> check) { check_ = std::move(check); }

  /// Sets the flag of a compressed operation, which the device makes nonzero if a value is Inf or
  /// NaN.
  void set_found_inf(at::Tensor flag) { found_inf_ = std::move(flag); }
  /// Blocks until the flag is known.
  bool finite() override {
    try {
      wait();
      const bool finite = found_inf_.defined() && found_inf_.item<float>() == 0.0f;
      if (check_) check_();
      return finite;
    } catch (...) {  // it failed, and its output is no result
      return false;
    }
  }

  /// Makes the current stream wait. With a timeout the caller waits too, as for operations whose
  /// delivery is not queued yet.
  bool wait(Milliseconds timeout = kNoTimeout) override {
    const Deadline deadline = Deadline::after(timeout);
    const bool limited = timeout.count() > 0;
    if (limited || !held_) {
      Work::wait(timeout);
    } else if (const auto error = exception()) {
      delivery_.block_current_stream();  // whoever reads the results all the same finds none
      leave_with(error);
    }
    delivery_.block_current_stream();
    ending_group_if_interrupted([&] {
      for (Backoff backoff; limited && !delivery_.is_done(); backoff.wait())
        if (deadline.expired())
          raise<Timeout>(describe() + " timed out: its results were not on " +
                         delivery_.device().str() + " within " + std::to_string(timeout.count()) +
                         " ms");
      return true;
    });
    if (check_) with_python_errors(check_);
    return true;
  }

 private:
  std::exception_ptr device_error() const {
    if (!check_) return nullptr;
    try {
      check_();
    } catch (...) {
      return as_python(std::current_exception());
    }
    return nullptr;
  }

  const bool held_;
  std::exception_ptr lost_;
  std::atomic<bool> is_lost_{false};
  std::function<void()> check_;
  at::Tensor found_inf_;
  Delivery delivery_;
};

/// A send or receive. wait() blocks its caller until the message has gone or come: held streams
/// could wait for each other here, since peers may answer in any order.
class DevicePeerWork final : public PeerWork {
 public:
  DevicePeerWork(int rank, const Call& call, uint64_t seq, const at::Tensor& tensor, Flat host,
                 std::shared_ptr<Communicator::Request> request, c10::Stream stream)
      : PeerWork(rank, call, seq, tensor, host, std::move(request)),
        mirror_{tensor, host.tensor()},
        delivery_(stream) {
    Work::ended()->addCallback([this](Future&) { delivery_.promise(result(), exception()); });
  }

  intrusive_ptr<Future> getFuture() override {
    ended();
    return delivery_.future();
  }
  bool isCompleted() override { return PeerWork::isCompleted() && delivery_.is_done(); }
  std::optional<c10::Device> device() const override { return delivery_.device(); }
  bool wait(Milliseconds timeout = kNoTimeout) override {
    PeerWork::wait(timeout);
    delivery_.block_current_stream();
    return true;
  }

 private:
  void finish() override;

  const Mirror mirror_;
  Delivery delivery_;
};

/// A send whose message is still on its way out of a device.
class LateSend final : public Communicator::Request {
 public:
  void set(std::shared_ptr<Communicator::Request> request) {
    std::shared_ptr<void> kept;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      request_ = request;
      kept.swap(kept_);
      changed_.notify_all();
    }
    if (kept) request->keep(std::move(kept));
  }
  void fail(std::exception_ptr error) {
    std::shared_ptr<void> kept;  // destroyed without the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    kept.swap(kept_);
    error_ = std::move(error);
    changed_.notify_all();
  }
  bool done() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return error_ || (request_ && request_->done());
  }
  void wait(Milliseconds timeout) override {
    const Deadline deadline = Deadline::after(timeout);
    std::unique_lock<std::mutex> lock(mutex_);
    const auto known = [this] { return error_ || request_; };
    const Deadline limit = timeout.count() > 0 ? deadline : Deadline::after(kForever);
    if (!InterruptPoll::wait(changed_, lock, limit, known)) {
      throw Timeout("a send has not left its device after a wait of " +
                    std::to_string(timeout.count()) + " ms; it continues");
    }
    if (error_) std::rethrow_exception(error_);
    const auto request = request_;
    lock.unlock();
    request->wait(timeout.count() > 0 ? std::max(deadline.left(), Milliseconds(1)) : timeout);
  }
  int source() const override { return -1; }
  void keep(std::shared_ptr<void> thing) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (error_) return;
    if (!request_) return kept_.swap(thing);
    lock.unlock();
    request_->keep(std::move(thing));
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<void> kept_;
  std::condition_variable changed_;
  std::shared_ptr<Communicator::Request> request_;
  std::exception_ptr error_;
};

}  // namespace pycomm::torch_binding
