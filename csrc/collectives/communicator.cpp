// Public face of the collectives: checks arguments, numbers each call, runs an algorithm for it,
// and makes sure that an error on one rank is an error on all.
#include "collectives/communicator.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>

#include "collectives/algorithms/algorithms.h"
#include "collectives/algorithms/dispatch.h"
#include "collectives/algorithms/rails.h"
#include "collectives/coded/coded.h"
#include "collectives/point_to_point/point_to_point.h"
#include "collectives/queue.h"
#include "core/arithmetic.h"
#include "core/fork_guard.h"
#include "core/interrupt.h"

namespace pycomm {
namespace {

/// Throws Error for a timeout of a group in which nothing can be done.
void check_timeout(int rank, Milliseconds timeout) {
  if (timeout > Milliseconds(0)) return;
  throw Error("rank " + std::to_string(rank) + ": the timeout of the group is " +
              std::to_string(timeout.count()) + " ms; give one that is more than 0");
}

Rendezvous rendezvous(std::shared_ptr<Store> store, int rank, int size,
                      const CommunicatorOptions& options) {
  check_timeout(rank, options.timeout);
  if (options.secret.substr(0, 5) == "file:") {
    throw Error("rank " + std::to_string(rank) +
                ": the option secret is the secret itself; only PYCOMM_SECRET names a file");
  }
  constexpr const char* kTransports[] = {"auto", "shm", "tcp"};
  if (std::find(std::begin(kTransports), std::end(kTransports), options.transport) ==
      std::end(kTransports)) {
    throw Error("unknown transport \"" + options.transport + "\"; use one of auto, shm, tcp");
  }
  return make_rendezvous(std::move(store), options.group, rank, size, options.secret,
                         options.timeout);
}

std::shared_ptr<Trace> make_trace(int rank, int size, const CommunicatorOptions& options) {
  TraceOwner owner{options.group, options.description, rank, options.global_ranks};
  if (owner.global_ranks.size() != static_cast<size_t>(size)) {
    owner.global_ranks.resize(static_cast<size_t>(size));
    std::iota(owner.global_ranks.begin(), owner.global_ranks.end(), 0);
  }
  return Trace::make(std::move(owner));
}

/// What a rank brings to a call: its data, or a copy of them.
///
/// Of a premul_sum that is its data times its own factor. Factors differ between ranks, so each
/// rank scales its own data before another rank can see the first byte. From there on a premul_sum
/// is a sum (core/reduce.h), whatever way the data take. The product is rounded to the dtype, in
/// which it travels. Where a call overwrites what it is to send, it is that.
///
/// It owns the memory of copies, so it outlives the operation that reads them.
class Contribution {
 public:
  /// Returns the call with our contribution as its input. The product of one buffer lies where the
  /// caller wants the result, if he wants one: after an error its contents are undefined anyway.
  Collective of(Collective call, int rank, int ranks) {
    const bool scales = call.redop == ReduceOp::premul_sum && call.reduces();
    const bool apart = call.overwrites(rank, ranks);
    if (!scales && !apart) return call;
    const size_t element = size_of(call.dtype);
    const int parts = call.has_in_parts() ? ranks : 1;
    void* const result = parts == 1 && scales && !apart ? call.out.data() : nullptr;
    auto* place = result ? static_cast<uint8_t*>(result) : room(call.in.total(parts) * element);
    const uint8_t* const begin = place;
    for (int r = 0; r < parts; r++) {
      if (scales) scale(call.dtype, call.in[r].data, place, call.in.numel(r), call.factor);
      if (!scales) copy_bytes(place, call.in[r].data, call.in.bytes(r));
      list_.push_back({place, call.in.numel(r)});
      place += call.in.bytes(r);
    }
    call.in = call.in.is_list() ? ConstParts(list_).of(element)
                                : ConstParts(begin, call.in.numel(0)).of(element);
    return call;
  }

 private:
  uint8_t* room(size_t bytes) {
    copy_.reset(new uint8_t[bytes]);
    return copy_.get();
  }

  std::unique_ptr<uint8_t[]> copy_;
  std::vector<ConstPart> list_;
};

/// Returns the round trips in microseconds: those between rank i and rank j are at i * ranks + j,
/// the less of what the two have measured. All ranks call this together, in the group's first
/// collective over channels (ChannelMesh::lacks_round_trips()): each tells all others what it has
/// measured, which costs one way to the farthest rank.
std::vector<uint32_t> gather_round_trips(CollectiveContext& context, const ChannelMesh& mesh) {
  // Up to this many ranks each sends to each: one way instead of a logarithm of them.
  constexpr int kMostDirect = 64;
  const int n = context.size();
  const auto size = static_cast<size_t>(n);
  std::vector<uint32_t> measured(size * size);
  std::vector<uint32_t> own(size);
  for (int r = 0; r < n; r++) own[static_cast<size_t>(r)] = mesh.round_trip(r);
  const Parts rows = Parts(measured.data(), size).of(sizeof(uint32_t));
  const Collective call{Op::all_gather, DType::uint8, {own.data(), rows.bytes(0)}, rows};
  (n <= kMostDirect ? direct::exchange : bruck::all_gather)(context, call);
  std::vector<uint32_t> round_trips = measured;
  for (size_t i = 0; i < size; i++) {
    for (size_t j = 0; j < size; j++) {
      // 0 says that a rank does not know: the connection may just be cut.
      const auto [less, more] = std::minmax(measured[i * size + j], measured[j * size + i]);
      round_trips[i * size + j] = less > 0 ? less : more;
    }
  }
  return round_trips;
}

}  // namespace

/// A group's mesh, its trace, the numbers of its calls, and the error that it failed with.
class Communicator::Impl {
 public:
  Impl(std::shared_ptr<Store> store, int rank, int size, CommunicatorOptions options)
      : options_(std::move(options)),
        algo_(parse_algo(options_.algo)),
        timeout_(options_.timeout.count()),
        mesh_(rendezvous(std::move(store), rank, size, options_), options_, failure_),
        trace_(make_trace(rank, size, options_)),
        point_to_point_(std::make_shared<PointToPoint>(mesh_, failure_, *trace_,
                                                       [this] { over(Lane::point_to_point); })) {
    if (Window* window = mesh_.node_window()) window->note_waits(&timing_);
  }
  ~Impl() {
    point_to_point_->close();
    mesh_.leave();
    point_to_point_->forget();
  }

  bool in_child() const { return fork_.in_child(); }
  /// Throws Error if this process is a forked child, which must not use anything that peers see.
  void check_process(const char* what) const {
    if (in_child()) fork_.refuse("rank " + std::to_string(rank()), what);
  }
  ChannelMesh& mesh() { return mesh_; }
  const Failure& failure() const { return failure_; }
  int rank() const { return mesh_.rank(); }
  int size() const { return mesh_.size(); }
  PointToPoint& point_to_point() { return *point_to_point_; }
  const Trace& trace() const { return *trace_; }
  Algo algo() const { return algo_; }
  std::vector<int> levels() const {
    std::vector<int> nodes;
    const Topology topology = mesh_.known_network().first;
    if (!goes_by_levels(topology, algo_)) return nodes;
    for (int r = 0; r < size(); r++) nodes.push_back(topology.node_of(r));
    return nodes;
  }
  std::vector<uint32_t> shares() const {
    const auto [topology, links] = mesh_.known_network();
    if (!goes_by_levels(topology, algo_)) return links.shares().begins();
    return links.shares(hierarchical::rail(topology, 0)).begins();
  }
  Milliseconds timeout() const { return Milliseconds(timeout_.load()); }
  void set_timeout(Milliseconds timeout) {
    check_timeout(rank(), timeout);
    timeout_ = timeout.count();
  }
  /// Runs one collective: body(deadline), with the call's number in the tag.
  template <typename Body>
  void run(OpTag& tag, Milliseconds timeout, const Body& body) {
    check_process(name(tag.op));
    callers_.note();
    const auto turn = take_turn(tag.op);
    tag.seq = ++seq_;
    if (failure_.happened()) failure_.rethrow_in(tag, rank());
    recording_ = trace_->start(tag, issued_);
    issued_ = 0;
    timing_ = {};
    trace_->set_algo(recording_, "window");  // over channels the algorithms say more
    const DefaultArithmetic arithmetic;
    try {
      body(Deadline::on_demand(timeout.count() > 0 ? timeout : this->timeout()));
    } catch (const Interrupted&) {
      trace_->end(recording_, false);
      over(Lane::collective);
      throw;
    } catch (...) {
      trace_->end(recording_, false);
      over(Lane::collective);
      failure_.rethrow_in(tag, rank());
    }
    trace_->end(recording_, timing_);
  }

  /// Records that the calling thread issues a collective, perhaps for another one to run.
  void note_caller() { callers_.note(); }

  /// Records in the trace what this rank sends and receives in an all_to_all; called in a body.
  void note_parts(size_t sent, size_t received) { trace_->set_parts(recording_, sent, received); }
  /// Links the operation that runs next to the record `issued`.
  void resume(uint64_t issued) {
    if (issued == 0) trace_->end(issued_);  // it had nothing to run
    issued_ = issued;
  }
  uint64_t note_issued(const OpTag& tag) {
    check_process(name(tag.op));
    return trace_->schedule(tag);
  }

  /// Runs one collective: body(route), where the call goes over memory that all ranks share, unless
  /// there is none or an algorithm over channels was asked for.
  template <typename Body>
  void collective(OpTag& tag, Milliseconds timeout, const Body& body) {
    Window* const window = this->window();
    if (window == nullptr) {
      return exchange(tag, timeout,
                      [&](CollectiveContext& context) { body(dispatch::Route(context, algo_)); });
    }
    run(tag, timeout,
        [&](const Deadline& deadline) { body(dispatch::Route(*window, tag, deadline)); });
  }

  /// Runs one collective over channels.
  template <typename Body>
  void exchange(OpTag& tag, Milliseconds timeout, const Body& body) {
    const auto over_channels = [&](const Deadline& deadline) {
      CollectiveContext context(mesh_, scratch_, tag, deadline, options_.segment_bytes,
                                {*trace_, recording_, timing_});
      if (mesh_.lacks_round_trips()) mesh_.set_round_trips(gather_round_trips(context, mesh_));
      body(context);
      mesh_.rank_state().end(tag);
      mesh_.note_links(*trace_);
    };
    run(tag, timeout, over_channels);
  }

  /// See Failure::end().
  void over(Lane lane) {
    failure_.end(mesh_, lane, *trace_, [this] { return callers_.advice(rank()); });
  }
  void abort(const std::string& reason) noexcept {
    if (!in_child()) failure_.abort(mesh_, *trace_, reason);  // the parent's group stays usable
  }

  CallCheck check(Op op) const { return {rank(), size(), op}; }
  /// Returns the memory over which exact collectives go; null: they go over channels.
  Window* window() const {
    const bool over_channels = algo_ != Algo::automatic && algo_ != Algo::hierarchical;
    return over_channels ? nullptr : mesh_.window();
  }

 private:
  /// The threads that call collectives. Those of two threads have no order that ranks share.
  class Callers {
   public:
    void note() {
      if (Queue::inside_any()) return;  // a group's own thread keeps the order of its callers
      const uint64_t call = calls_.fetch_add(1, std::memory_order_relaxed) + 1;
      const std::thread::id here = std::this_thread::get_id();
      const std::thread::id last = last_.exchange(here, std::memory_order_relaxed);
      if (last != here && last != std::thread::id()) changed_ = call;
    }
    /// Returns a part of a sentence if several threads have called lately, or "".
    std::string advice(int rank) const {
      constexpr uint64_t kLately = 100;
      if (changed_ == 0 || calls_ - changed_ > kLately) return "";
      return "; rank " + std::to_string(rank) +
             " calls this group from several threads, whose calls have no order that ranks share: "
             "give each thread a group of its own (dist.new_group(); dcp.async_save takes it as "
             "process_group)";
    }

   private:
    std::atomic<uint64_t> calls_{0}, changed_{0};
    std::atomic<std::thread::id> last_{};
  };

  using Turn = std::unique_lock<std::timed_mutex>;
  /// Waits for the end of another thread's call.
  Turn take_turn(Op op) {
    Turn turn(one_at_a_time_, std::try_to_lock);
    while (!turn.owns_lock() && !turn.try_lock_for(Milliseconds(100))) {
      try {
        check_interrupt();
      } catch (const Interrupted& e) {
        abort("its " + std::string(name(op)) +
              " was interrupted while another thread ran a collective: " + e.what());
        throw;
      }
    }
    return turn;
  }

  const ForkGuard fork_{};
  CommunicatorOptions options_;
  const Algo algo_;
  std::atomic<Milliseconds::rep> timeout_;
  Failure failure_;
  ChannelMesh mesh_;
  Scratch scratch_;
  std::timed_mutex one_at_a_time_;
  uint64_t seq_ = 0;
  Callers callers_;
  const std::shared_ptr<Trace> trace_;
  // Numbers in the trace: of the running collective, and of the one that runs next if it is known.
  uint64_t recording_ = 0, issued_ = 0;
  OpTiming timing_;  // of the running collective
  std::shared_ptr<PointToPoint> point_to_point_;
};

Communicator::Communicator(std::shared_ptr<Store> store, int rank, int size,
                           CommunicatorOptions options)
    : impl_(std::make_unique<Impl>(std::move(store), rank, size, std::move(options))) {}
Communicator::~Communicator() {
  // A forked child cannot end anything, so the implementation is left as it is.
  if (impl_->in_child()) static_cast<void>(impl_.release());
}

int Communicator::rank() const { return impl_->rank(); }
int Communicator::size() const { return impl_->size(); }
Milliseconds Communicator::timeout() const { return impl_->timeout(); }
void Communicator::set_timeout(Milliseconds timeout) { impl_->set_timeout(timeout); }
std::vector<int> Communicator::levels() const { return impl_->levels(); }
std::vector<uint32_t> Communicator::shares() const { return impl_->shares(); }
std::string Communicator::describe() const { return impl_->mesh().describe(); }
std::vector<std::string> Communicator::transports() const { return impl_->mesh().transports(); }
uint64_t Communicator::wire_bytes() const { return impl_->mesh().wire_bytes(); }
uint64_t Communicator::sent_bytes() const { return impl_->mesh().sent_bytes(); }
void Communicator::note_caller() { impl_->note_caller(); }
uint64_t Communicator::note_issued(const OpTag& tag) { return impl_->note_issued(tag); }
void Communicator::resume(uint64_t issued) { impl_->resume(issued); }
const Trace& Communicator::trace() const { return impl_->trace(); }
void Communicator::abort(const std::string& reason) noexcept { impl_->abort(reason); }
std::exception_ptr Communicator::over() const { return impl_->failure().error(); }
std::string Communicator::describe_ranks() const {
  impl_->check_process("describe_ranks");
  return pycomm::describe_ranks(impl_->mesh());
}
bool Communicator::lost(int rank) const { return impl_->mesh().lost(rank); }

std::string Communicator::explain(Op op, size_t bytes, const CodedArgs* coded) const {
  if (size() == 1) return "nothing travels: the group has one rank";
  if (!coded && impl_->window()) return "window: all ranks share memory";
  const auto [topology, links] = impl_->mesh().known_network();
  if (goes_by_levels(topology, impl_->algo()) && !(coded && op != Op::all_reduce)) {
    return std::string("hierarchical: ranks of a node share memory") +
           (coded ? ", and nodes exchange payloads" : "");
  }
  if (!coded) {
    return dispatch::explain({op, size(), bytes, impl_->mesh().slowest(), links.speed()},
                             impl_->algo());
  }
  if (op != Op::all_reduce) return "one_shot, its only algorithm";
  return coded::explain(*coded, impl_->algo(), size(), links.speed());
}

bool Communicator::uses_network() const { return impl_->mesh().slowest() == Medium::tcp; }
std::shared_ptr<SharedHeap> Communicator::heap() const { return impl_->mesh().heap(); }

std::shared_ptr<void> Communicator::allocate(size_t bytes) {
  impl_->check_process("allocate");
  const std::string bytes_text = std::to_string(bytes) + " bytes; allocate fewer";
  const std::string here = "rank " + std::to_string(rank()) + ": ";
  if (bytes > kLargestBuffer) throw Error(here + "no memory holds " + bytes_text);
  if (auto heap = impl_->mesh().heap()) return allocate_shared(heap, bytes);
  constexpr size_t kAlign = 64;
  void* data =
      std::aligned_alloc(kAlign, (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign);
  if (!data) throw Error(here + "no memory is left for " + bytes_text);
  return {data, &std::free};
}

// ------------------------------------------------------------------ collectives

void Communicator::run(const Collective& given, Milliseconds timeout) {
  const Collective call = given.checked(rank(), size());
  const std::string mismatch = call.own_mismatch(rank());
  if (!mismatch.empty()) {
    // The other ranks' calls may be right, and they would wait for this one until their deadline.
    const bool alone = size() > 1 && !call.all_parts_are_even(size());
    if (alone) impl_->abort(std::string("its ") + name(call.op) + " " + mismatch);
    impl_->check(call.op).fail(mismatch);
  }
  OpTag tag = call.tag(size());
  Contribution ours;
  impl_->collective(tag, timeout, [&](const dispatch::Route& route) {
    if (call.op == Op::all_to_all) impl_->note_parts(call.in.total(size()), call.out.total(size()));
    dispatch::run(route, ours.of(call, rank(), size()));
  });
}

void Communicator::exchange_paths(const void* in, void* out, size_t bytes) {
  const Collective call{Op::all_gather, DType::uint8, {in, bytes}, {out, bytes}};
  OpTag tag = call.tag(size());
  std::snprintf(tag.label, sizeof tag.label, "%s", kPathsLabel);
  impl_->collective(tag, {}, [&](const dispatch::Route& route) { dispatch::run(route, call); });
}

bool Communicator::run_coded(Op op, const CodedArgs& args, void* out, Milliseconds timeout) {
  const size_t ranks = static_cast<size_t>(size()), element = size_of(args.data.dtype);
  const bool scatters = op == Op::reduce_scatter;
  const CallCheck check = impl_->check(op);
  if (op != Op::all_reduce && !scatters) check.fail("takes no codecs");
  check.buffer(args.data.data, args.data.size, element);
  if (scatters) check.buffer(out, args.data.size / ranks, element);
  coded::check(name(op), args, scatters ? ranks : 1);
  OpTag tag = coded::tag_of(op, args);
  bool finite = false;
  impl_->exchange(tag, timeout, [&](CollectiveContext& context) {
    finite = coded::run(context, op, impl_->algo(), args, out);
  });
  return finite;
}

// ------------------------------------------------------------------ point to point

std::shared_ptr<Communicator::Request> Communicator::send(const void* data, size_t bytes, int dst,
                                                          int tag) {
  impl_->check_process("send");
  impl_->check(Op::send).rank("destination", dst);
  impl_->check(Op::send).buffer(data, bytes, 1);
  return impl_->point_to_point().send(data, bytes, dst, tag, impl_->timeout());
}

std::shared_ptr<Communicator::Request> Communicator::recv(void* data, size_t bytes, int src,
                                                          int tag) {
  impl_->check_process("recv");
  if (src != -1) impl_->check(Op::recv).rank("source", src);
  impl_->check(Op::recv).buffer(data, bytes, 1);
  return impl_->point_to_point().recv(data, bytes, src, tag, impl_->timeout());
}

void Communicator::end_requests() { impl_->point_to_point().close(); }

}  // namespace pycomm
