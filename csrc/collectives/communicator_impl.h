// Implementation of Communicator: its mesh, its trace, the numbers of its calls, and the error that
// it failed with. Included where Communicator is implemented.
#pragma once
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collectives/algorithms/dispatch.h"
#include "collectives/algorithms/rails.h"
#include "collectives/algorithms/round_trips.h"
#include "collectives/coded/coded.h"
#include "collectives/communicator.h"
#include "collectives/point_to_point/point_to_point.h"
#include "collectives/queue.h"
#include "core/arithmetic.h"
#include "core/error.h"
#include "core/fork_guard.h"
#include "core/interrupt.h"

namespace pycomm {

class Communicator::Impl {
 public:
  Impl(std::shared_ptr<Store> store, int rank, int size, CommunicatorOptions options);
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
  std::string explain(Op op, size_t bytes, const CodedArgs* coded) const;
  Milliseconds timeout() const { return Milliseconds(timeout_.load()); }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout.count(); }
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
    trace_->end(recording_, tag, timing_);
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
      if (mesh_.learns_links()) learn_links(context);
      body(context);
      mesh_.rank_state().end(tag);
      mesh_.note_links(*trace_);
    };
    run(tag, timeout, over_channels);
  }

  void learn_links(CollectiveContext& context) {
    if (!mesh_.links().has_round_trips()) {
      mesh_.set_round_trips(gather_round_trips(context, mesh_));
    } else {
      mesh_.set_rates(gather_rates(context, mesh_.measured_rate()));
      context.links_changed();
    }
  }

  /// Runs body(context) of an operation with codecs and returns its result.
  template <typename Body>
  bool exchange_coded(Op op, const CodedArgs& args, Milliseconds timeout, const Body& body) {
    const ReduceOp redop = args.average ? ReduceOp::avg : ReduceOp::sum;
    OpTag tag = make_tag(op, args.data.size, args.data.dtype, redop);
    tag.codec = coded::signature(args);
    coded::label(args).copy(tag.label, sizeof tag.label - 1);
    bool result = false;
    exchange(tag, timeout, [&](CollectiveContext& context) { result = body(context); });
    return result;
  }

  /// See Failure::end().
  void over(Lane lane) {
    failure_.end(mesh_, lane, *trace_, [this] { return callers_.advice(rank()); });
  }
  void abort(const std::string& reason) noexcept {
    if (!in_child()) failure_.abort(mesh_, *trace_, reason);  // the parent's group stays usable
  }

  /// Checks a buffer with elements of the given size: their number may come from anywhere, so their
  /// size in bytes may wrap.
  void check_buffer(Op op, const void* data, size_t numel, size_t element_bytes) const {
    if (!data && numel > 0) fail(op, "got no buffer for " + std::to_string(numel) + " elements");
    const auto address = reinterpret_cast<uintptr_t>(data);
    if (numel > kLargestBuffer / element_bytes || address > UINTPTR_MAX - numel * element_bytes) {
      fail(op, "got " + std::to_string(numel) + " elements, which no memory holds");
    }
  }
  /// Checks that there is one part per rank, with memory.
  template <typename T>
  void check_parts(Op op, const BasicParts<T>& parts, size_t element_bytes) const {
    if (parts.is_list() && parts.listed() != static_cast<size_t>(size())) {
      fail(op, "needs one part per rank, " + std::to_string(size()) + ", and got " +
                   std::to_string(parts.listed()));
    }
    if (!parts.is_list()) {  // parts of one buffer
      const auto ranks = static_cast<size_t>(size());
      if (parts.numel(0) > kLargestBuffer / ranks) {
        fail(op, "got " + std::to_string(parts.numel(0)) + " elements for each of " +
                     std::to_string(ranks) + " ranks, which no memory holds");
      }
      return check_buffer(op, parts.data(), parts.numel(0) * ranks, element_bytes);
    }
    size_t left = kLargestBuffer / element_bytes;
    for (int r = 0; r < size(); r++) {
      check_buffer(op, parts[r].data, parts.numel(r), element_bytes);
      if (parts.numel(r) > left) fail(op, "got parts that no memory holds together");
      left -= parts.numel(r);
    }
  }
  /// Compares the two sizes of our own part, which is copied on this rank. `alone`: the other
  /// ranks' calls may be right, and they would wait for this one until their deadline; so they get
  /// an error, and the group fails.
  void check_own(Op op, size_t in, size_t out, bool alone) {
    if (in == out) return;
    const std::string what =
        "has " + std::to_string(in) + " elements for itself but expects " + std::to_string(out);
    if (alone && size() > 1) abort(std::string("its ") + name(op) + " " + what);
    fail(op, what);
  }
  void check_dtype(Op op, DType dtype) const {
    if (static_cast<int>(dtype) >= kDTypes) fail(op, "got an unknown dtype");
  }
  void check_rank(Op op, const char* what, int r) const {
    if (r >= 0 && r < size()) return;
    fail(op, std::string("got ") + what + " " + std::to_string(r) + " in a group of " +
                 std::to_string(size()));
  }
  [[noreturn]] void fail(Op op, const std::string& what) const {
    throw Error("rank " + std::to_string(rank()) + ": " + name(op) + " " + what);
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

  /// Returns the memory over which exact collectives go; null: they go over channels.
  Window* window() const {
    const bool over_channels = algo_ != Algo::automatic && algo_ != Algo::hierarchical;
    return over_channels ? nullptr : mesh_.window();
  }

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

}  // namespace pycomm
