// How operations of the "pycomm" process group run: synchronous ones on the caller's thread,
// asynchronous ones in order on the group's own. A part of _c10d.
#pragma once
#include <atomic>
#include <mutex>

#include "binding/c10d_work.h"
#include "collectives/queue.h"

namespace pycomm::torch_binding {

/// Everything that operations use. Whoever runs one holds it, so shutdown() on one thread cannot
/// take it away from another.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  Engine(const intrusive_ptr<c10d::Store>& store, int rank, int size,
         const CommunicatorOptions& options)
      : comm_(std::make_shared<TorchStore>(store), rank, size, options) {}

  Communicator& comm() { return comm_; }
  uint64_t seq() const { return seq_; }
  c10d::ErrorType error() const { return error_; }

  /// `notes`: the trace shows it from now on, not only from when it runs.
  intrusive_ptr<Work> make_work(const Call& call, Tensors outputs, bool notes = true) {
    const uint64_t noted = notes ? comm_.note_issued(issued_tag(call, outputs, comm_.size())) : 0;
    auto work = c10::make_intrusive<Work>(comm_.rank(), call, ++seq_, std::move(outputs));
    work->set_noted(noted);
    return work;
  }

  /// Runs op(communicator) on the caller's thread.
  template <typename F>
  WorkPtr run(const Call& call, Tensors outputs, const F& op) {
    auto work = make_work(call, std::move(outputs), !queue_.idle());
    with_python_errors([&] { queue_.run([&] { perform(*work, op); }); });
    work->complete();
    report(*work);
    return work;
  }

  /// Runs op(communicator) on the group's thread. A callback of another operation is there already:
  /// what it issues runs at once, so that it comes before all later operations on every rank.
  template <typename F>
  void submit(const intrusive_ptr<Work>& work, F op) {
    work->set_engine(weak_from_this());
    auto run = [self = shared_from_this(), work, op = std::move(op)] {
      try {
        self->perform(*work, op);
        work->complete();
      } catch (...) {
        work->fail(std::current_exception());
      }
      self->report(*work);
    };
    if (queue_.inside()) return run();
    queue_.submit(std::move(run));
  }

  // Point to point: requests are under way from the start, and queue for nothing.

  WorkPtr post(const Call& call, const at::Tensor& tensor, int peer, int tag);
  /// Completes the work on a thread of its own when its request is done.
  void settle_later(intrusive_ptr<PeerWork> work);

  // Completion and timing.

  /// Keeps the kind of an error for getError().
  void note(const std::exception_ptr& error) { error_ = error_type(error); }
  void time_operations() { timed_ = true; }
  /// `hook` is called after every operation, by the thread that ran it. Before the first of them.
  void set_hook(Hook hook) {
    hook_ = std::move(hook);
    timed_ = true;
  }
  void report(const Work& work) {
    if (hook_) hook_(work.info());
  }

  /// Waits until every collective that was issued has ended.
  void drain() {
    if (!queue_.inside()) queue_.run([] {});
  }
  /// The same, and every send and receive.
  void settle_all();
  /// Finishes the collectives. Sends and receives are given up: nobody may ever answer them.
  void finish();
  void abort(const std::string& why) noexcept {
    comm_.abort("rank " + std::to_string(comm_.rank()) + " " + why);
  }

 private:
  /// Runs `op`, timed if asked.
  template <typename F>
  void perform(Work& work, const F& op) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const bool timed = timed_;
    if (timed) work.start();
    comm_.resume(work.noted());
    try {
      op(comm_);
      comm_.resume(0);
    } catch (...) {
      comm_.resume(0);
      note(std::current_exception());
      if (timed) work.stop();
      throw;
    }
    if (timed) work.stop();
  }

  std::mutex posted_mutex_;
  // Requests write to the buffers of posted works, so the communicator must go before these.
  std::vector<intrusive_ptr<PeerWork>> posted_;  ///< may not be done
  std::vector<intrusive_ptr<PeerWork>> wanted_;  ///< those that peer_waiter_ waits for

  Communicator comm_;
  std::atomic<uint64_t> seq_{0}, peer_seq_{0};
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::atomic<bool> timed_{false};
  Hook hook_;

  Queue peer_waiter_;  ///< waits for posted requests whose futures are wanted
  Queue queue_;        ///< the last member: it finishes before anything else goes
};

}  // namespace pycomm::torch_binding
