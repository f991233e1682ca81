// Work of the "pycomm" process group: operations in order, point-to-point requests, and the layout
// of a compressed bucket. A part of c10d.cpp.
#pragma once
#include <array>
#include <atomic>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "binding/c10d_support.h"
#include "collectives/communicator.h"
#include "collectives/queue.h"

namespace pycomm::torch_binding {

/// What users pass as `pg_options`.
struct BackendOptions final : c10d::Backend::Options {
  explicit BackendOptions(Milliseconds timeout) : c10d::Backend::Options("pycomm", timeout) {}

  CommunicatorOptions communicator;  ///< its group and timeout are the base class's
};

/// One issued operation. Its future completes, and the future's callbacks run, in the order of
/// issue.
class Work : public c10d::Work {
 public:
  Work(int rank, c10d::OpType type, const char* title, uint64_t seq, Tensors outputs)
      : c10d::Work(rank, type, title), seq_(seq), outputs_(std::move(outputs)) {}

  /// What the future will hold, where that is not the list of output tensors. Before complete().
  void set_value(c10::IValue value, const c10::TypePtr& type) {
    value_ = std::move(value);
    future_ = c10::make_intrusive<c10::ivalue::Future>(type);
  }
  /// The future of an operation that is still to run. Before complete().
  void make_future() {
    if (!future_) set_value(outputs_, c10::ListType::create(c10::TensorType::get()));
  }

  void complete(const std::exception_ptr& error = nullptr) {
    completed_at_ = Clock::now();
    if (!future_) return finish(error);
    // The first callback, so that callbacks that wait for this work find it done.
    future_->addCallback([this, error](c10::ivalue::Future&) { finish(error); });
    if (error) {
      future_->setError(error);
    } else {
      future_->markCompleted(value_);
    }
  }

  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!future_) {
      make_future();
      future_->markCompleted(value_);
    }
    return future_;
  }
  // As the future has it: who waited for that must find the work complete too.
  bool isCompleted() override { return future_ ? future_->completed() : c10d::Work::isCompleted(); }
  bool isSuccess() const override {
    return future_ ? future_->completed() && !future_->hasError() : c10d::Work::isSuccess();
  }
  std::exception_ptr exception() const override {
    if (!future_) return c10d::Work::exception();
    return future_->hasError() ? future_->exception_ptr() : nullptr;
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return seq_; }
  float getDuration() const override {
    return std::chrono::duration<float, std::milli>(completed_at_ - issued_at_).count();
  }

  void set_finite(bool finite) { finite_ = finite; }
  /// Of a compressed operation: it has come through, and no value of the result is Inf or NaN.
  bool finite() const { return isSuccess() && finite_; }

 private:
  using Clock = std::chrono::steady_clock;
  uint64_t seq_;
  Tensors outputs_;
  bool finite_ = false;
  c10::IValue value_;
  intrusive_ptr<c10::ivalue::Future> future_;
  Clock::time_point issued_at_ = Clock::now(), completed_at_;
};

/// A posted send or receive. Whoever waits for it completes it.
class PeerWork final : public Work {
 public:
  PeerWork(int rank, OpType type, const char* title, const at::Tensor& tensor, Flat flat,
           std::shared_ptr<Communicator::Request> request, const std::shared_ptr<Queue>& waiter,
           std::shared_ptr<std::atomic<int>> waits)
      : Work(rank, type, title, 0, {tensor}),
        flat_(std::move(flat)),
        request_(std::move(request)),
        waiter_(waiter),
        waits_(std::move(waits)) {
    make_future();
  }

  /// Its buffer is not needed any more.
  bool done() const { return request_->done(); }
  bool isCompleted() override {
    if (done()) settle();
    return Work::isCompleted();
  }
  bool wait(Milliseconds timeout) override {
    with_python_errors([&] { request_->wait(timeout); });
    settle();
    return c10d::Work::wait();
  }
  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto waiter = waiter_.lock();
    if (waiter && !isCompleted()) {
      ++*waits_;
      auto self = intrusive_ptr<PeerWork>::unsafe_reclaim_from_nonowning(this);
      waiter->submit([self] {
        self->settle();
        --*self->waits_;
      });
    }
    return Work::getFuture();
  }
  int sourceRank() const override { return request_->source(); }

 private:
  void settle() {
    std::call_once(settled_, [this] {
      std::exception_ptr error;
      try {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        request_->wait();
        if (opType_ != OpType::SEND) flat_.finish();
      } catch (...) {
        error = as_python(std::current_exception());
      }
      complete(error);
    });
  }

  Flat flat_;
  std::shared_ptr<Communicator::Request> request_;
  std::weak_ptr<Queue> waiter_;              ///< for those who want a future
  std::shared_ptr<std::atomic<int>> waits_;  ///< that the waiter has
  std::once_flag settled_;
};

/// The parameters of one bucket, as compressed_all_reduce needs them. Made once per bucket; keeps
/// codecs and residuals alive. Each residual is a pair: side s is read and side 1 - s is written,
/// so that a step can be taken back.
class Layout {
 public:
  using Pair = std::optional<std::array<at::Tensor, 2>>;

  void add(size_t offset, size_t numel, const std::string& codec, uint32_t tensor, Pair residual,
           Pair owner_residual) {
    for (const Pair* pair : {&residual, &owner_residual}) {
      if (!*pair) continue;
      for (const at::Tensor& t : **pair)
        if (t.scalar_type() != at::kFloat || !t.is_contiguous() || !t.is_cpu() ||
            static_cast<size_t>(t.numel()) != numel)
          throw Error("a residual must be a contiguous float32 CPU tensor of " +
                      std::to_string(numel) + " values");
    }
    parts_.push_back({offset, numel, make_codec(codec), tensor, residual, owner_residual});
  }
  size_t numel() const { return parts_.empty() ? 0 : parts_.back().offset + parts_.back().numel; }

  std::vector<Piece> pieces(int side) const {
    std::vector<Piece> pieces;
    pieces.reserve(parts_.size());
    for (const Part& part : parts_) {
      Piece piece;
      piece.offset = part.offset;
      piece.numel = part.numel;
      piece.codec = part.codec.get();
      piece.tensor = part.tensor;
      if (part.residual) {
        piece.residual = (*part.residual)[side].const_data_ptr<float>();
        piece.new_residual = (*part.residual)[1 - side].mutable_data_ptr<float>();
      }
      if (part.owner_residual) {
        piece.owner_residual = (*part.owner_residual)[side].const_data_ptr<float>();
        piece.new_owner_residual = (*part.owner_residual)[1 - side].mutable_data_ptr<float>();
      }
      pieces.push_back(piece);
    }
    return pieces;
  }

 private:
  struct Part {
    size_t offset, numel;
    std::unique_ptr<Codec> codec;
    uint32_t tensor;
    Pair residual, owner_residual;
  };
  std::vector<Part> parts_;
};

}  // namespace pycomm::torch_binding
