// Engine: runs the operations of the "pycomm" process group, synchronous ones on the caller's
// thread, asynchronous ones in order on the group's own. A part of _c10d.
#pragma once
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <map>
#include <mutex>

#include "binding/torch/device_work.h"
#include "binding/torch/peer_watch.h"
#include "binding/torch/peers.h"
#include "binding/torch/store.h"
#include "collectives/queue.h"
#include "core/interrupt.h"

namespace pycomm::torch_binding {

/// Operations may take this long to end before they are aborted, when the group is formed anew or
/// left in the middle: those of ranks that are all alive do, and others would take until their
/// deadline.
constexpr Milliseconds kGrace(2000);

/// All state that operations use. The thread that runs one holds a reference, so shutdown() on
/// another thread cannot destroy it.
class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(const std::shared_ptr<Store>& store, int rank, int size,
         const CommunicatorOptions& options, std::string device_path)
      : comm_(store, rank, size, options),
        store_(store),
        group_(options.group),
        secret_(options.secret),
        device_path_(std::move(device_path)) {}

  ~Engine() {
    const DisposalGuard on(used_device_);
    pending_.clear();
    lanes_.clear();
    watch_.reset();
    peers_.clear();
  }

  Communicator& comm() { return comm_; }
  const std::shared_ptr<Store>& store() const { return store_; }
  const std::string& group() const { return group_; }
  /// Returns how many groups of this name these ranks have made from this one, including the next.
  int64_t count_child(const std::string& name, const std::vector<int>& ranks) {
    const std::lock_guard<std::mutex> lock(children_mutex_);
    return ++children_[{name, ranks}];
  }
  std::string describe();
  uint64_t seq() const { return seq_; }
  c10d::ErrorType error() const { return error_; }

  /// `notes`: the trace shows the operation from now on, not only from when it runs.
  template <typename W = Work, typename... More>
  intrusive_ptr<W> make_work(bool notes, const Call& call, Tensors outputs, More... more) {
    comm_.note_caller();
    const uint64_t noted = notes ? comm_.note_issued(issued_tag(call, outputs, comm_.size())) : 0;
    auto work = c10::make_intrusive<W>(comm_.rank(), call, ++seq_, std::move(outputs), more...);
    work->set_noted(noted);
    return work;
  }

  /// Runs op(communicator) on the caller's thread.
  template <typename F>
  WorkPtr run(const Call& call, Tensors outputs, const F& op) {
    auto work = make_work(!queue_.idle(), call, std::move(outputs));
    with_python_errors([&] {
      ending_if_interrupted([&] { queue_.run([&] { perform(*work, op); }); });
      InterpreterEnd::stay_if_begun();
    });
    work->complete();
    return work;
  }

  /// Runs op(communicator) on the group's thread. A callback of another operation runs there
  /// already: an operation that it issues runs at once, so that it comes before all later
  /// operations on every rank. `device`: what it uses is there, and another thread disposes of it.
  template <typename F>
  void submit(const intrusive_ptr<Work>& work, F op, std::optional<c10::Device> device = {}) {
    work->set_engine(weak_from_this());
    struct Operation {
      intrusive_ptr<Work> work;
      F op;
    };
    auto run = [self = shared_from_this(), device,
                operation = std::make_shared<Operation>(Operation{work, std::move(op)})]() mutable {
      std::exception_ptr error;
      try {
        self->perform(*operation->work, operation->op);
      } catch (...) {
        error = std::current_exception();
      }
      operation->work->end(error);
      if (device) self->dispose(std::move(operation), *device);
    };
    if (queue_.inside()) return run();
    queue_.submit(std::move(run));
  }
  /// Destroys something on a thread of its own, if this was the last reference. Destructors of what
  /// devices use call the driver: torch's allocators record an event for a tensor that a stream
  /// uses. Another thread may hold the driver's lock, in a copy to memory that is not pinned, until
  /// our next operation has ended: so no thread that ends operations may wait for the lock.
  template <typename T>
  void dispose(T thing, c10::Device device) noexcept {
    try {
      disposal_.submit([kept = new T(std::move(thing)), device] {
        try {
          stay_on(device);
        } catch (...) {  // the device has failed
        }
        delete kept;
      });
    } catch (...) {  // in a forked child, or where no more threads start: it is left as it is
    }
  }

  // Operations on device tensors.

  /// Queues the operation on the host's copies of device tensors, after the current stream.
  intrusive_ptr<DeviceWork> submit(const Call& call, Tensors outputs, c10::Device device,
                                   const std::vector<DevicePart>& parts);
  /// A route among devices, or why there is none.
  struct RouteOrReason {
    std::shared_ptr<PeerRoute> route;
    std::string why;
  };
  /// The first time all ranks ask together.
  RouteOrReason peers(c10::Device device, PeerRoute::Kind kind = PeerRoute::Kind::exact);
  /// Queues op(route), which uses these tensors.
  intrusive_ptr<DeviceWork> submit(const Call& call, Tensors outputs,
                                   const std::shared_ptr<PeerRoute>& route, const Tensors& used,
                                   const std::function<void(PeerRoute&)>& op);
  /// Queues the copy of received data to its device.
  void deliver_peer(const Mirror& mirror, c10::Event& done);
  /// Returns the device that was used last.
  std::optional<c10::Device> used_device();

  // Point-to-point operations: requests are under way from the start, and are not queued.

  WorkPtr post(const Call& call, const at::Tensor& tensor, int peer, int tag);
  WorkPtr post(const Call& call, const at::Tensor& tensor, const Staging& staging,
               const at::Tensor& host, int peer, int tag);
  /// Completes the work on a separate thread when its request is done.
  void settle_later(intrusive_ptr<PeerWork> work);

  // Completion.

  /// Keeps the kind of an error for getError().
  void note(const std::exception_ptr& error) { error_ = error_type(error); }
  void set_timeout(Milliseconds timeout);
  bool runs_here() const { return queue_.inside(); }

  /// Runs a wait, and ends the group if a signal ends the wait.
  template <typename F>
  void ending_if_interrupted(const F& wait) {
    try {
      wait();
    } catch (const Interrupted& interrupted) {
      abort(std::string("was interrupted while it waited: ") + interrupted.what());
      throw;
    }
  }
  /// Waits for a future of this group's operations.
  void wait(Future& future) {
    with_python_errors([&] { ending_if_interrupted([&] { wait_for(future); }); });
  }
  /// DDP waits for the futures of its buckets at the end of a backward, where no signal is seen.
  /// In a backward on Python's main thread, this lets the same wait happen here, just before.
  void wait_after_backward(const intrusive_ptr<Future>& future) {
    if (!handles_signals() || torch::autograd::get_current_graph_task_id() < 0) return;
    torch::autograd::Engine::get_default_engine().queue_callback([future, weak = weak_from_this()] {
      const auto engine = weak.lock();
      if (engine && !future->completed()) engine->wait(*future);
    });
  }
  /// Waits until every collective that was issued has ended.
  void drain() {
    if (!queue_.inside()) ending_if_interrupted([&] { queue_.run([] {}); });
  }
  /// Finishes the collectives. Sends and receives are given up: a peer may never answer them.
  /// Returns Interrupted if a signal came, after which the group was aborted, or null.
  std::exception_ptr finish();
  /// Waits for the collectives, but at most so long: then their group is aborted with this reason.
  void end_within(Milliseconds limit, const std::string& why);
  void abort(const std::string& why) noexcept {
    const std::string reason = "rank " + std::to_string(comm_.rank()) + " " + why;
    comm_.abort(reason);
    aborted_ = true;  // after the reason is known
    abort_peers(reason);
  }
  /// Throws the error of operations on device tensors, for which only streams may have waited.
  void check();

 private:
  /// Runs `op`.
  template <typename F>
  void perform(Work& work, const F& op) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    comm_.resume(work.noted());
    try {
      op(comm_);
      comm_.resume(0);
    } catch (...) {
      comm_.resume(0);
      note(std::current_exception());
      throw;
    }
  }

  /// Returns the lane. Sends and receives have streams of their own, so that they wait for no
  /// collective.
  DeviceLane& lane(c10::Device device, bool of_peers = false);
  std::shared_ptr<Communicator::Request> request(const Call& call, const Flat& flat, int peer,
                                                 int tag);
  /// The work that a request keeps until it is done, because the work has the buffer, even if the
  /// caller drops it. (A weak reference of torch's would keep the work's memory.)
  struct KeptWork {
    intrusive_ptr<PeerWork> work;
    /// Data get into their tensor also if no caller waits for the work.
    ~KeptWork() {
      const auto engine = work->engine();
      if (engine && work->copies()) work->settle();
      const auto device = work->device();
      if (engine && device) engine->dispose(std::move(work), *device);
    }
  };
  WorkPtr keep(intrusive_ptr<PeerWork> work, Communicator::Request& request);
  /// Orders the lane after deliveries of earlier operations whose output this operation may read
  /// without a wait in between.
  void follow_deliveries(const std::vector<const void*>& reads, DeviceLane& lane,
                         std::unique_lock<std::mutex>& lock);
  /// Waits for the work that was queued on a device, as long as the operation may take.
  void await(const c10::Event& event, const Call& call, c10::Device device);
  void abort_peers(const std::string& reason) noexcept;
  /// Ends the operations of routes that wait for a rank whose process is gone.
  void look_for_lost_peers() noexcept;
  RouteOrReason open_peers(c10::Device device, PeerRoute::Kind kind);
  /// Throws if a wait at a rendezvous among devices is in vain.
  void interrupt_check();
  void check_lost();
  void set_lost(const std::exception_ptr& error) {
    const std::lock_guard<std::mutex> lock(lost_mutex_);
    if (!lost_) lost_ = error;
  }

  std::mutex children_mutex_;
  std::map<std::pair<std::string, std::vector<int>>, int64_t> children_;
  std::mutex wanted_mutex_;
  std::vector<intrusive_ptr<PeerWork>> wanted_;  ///< peer_waiter_ waits for these

  Communicator comm_;
  const std::shared_ptr<Store> store_;
  const std::string group_;
  const std::string secret_;
  const std::string device_path_;
  std::atomic<bool> aborted_{false};
  std::mutex device_mutex_;  ///< held while the streams of lanes get work
  std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, bool>, std::unique_ptr<DeviceLane>> lanes_;
  struct Pending {
    std::vector<const void*> memory;  ///< memory that it writes
    std::shared_ptr<c10::Event> delivered;
    c10::weak_intrusive_ptr<DeviceWork> work;
  };
  std::vector<Pending> pending_;  ///< deliveries that may not be done
  std::optional<c10::Device> used_device_;
  std::mutex lost_mutex_;
  std::exception_ptr lost_;   ///< error of an operation for which only streams waited
  std::mutex opening_mutex_;  ///< held while a route is opened
  std::mutex routes_mutex_;
  std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, PeerRoute::Kind>, RouteOrReason> peers_;
  std::optional<PeerWatch> watch_;  ///< of the ranks with which there are routes
  std::atomic<uint64_t> seq_{0}, peer_seq_{0};
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};

  Queue disposal_;     ///< destroys what operations on devices leave behind
  Queue leaving_;      ///< posts sends when they have left their device
  Queue peer_waiter_;  ///< waits for posted requests whose futures are wanted
  Queue queue_;        ///< the last member: it finishes before the others are destroyed
};

}  // namespace pycomm::torch_binding
