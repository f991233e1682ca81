// What a communicator consists of: its mesh, its trace, the numbers of its calls, and the error
// that ends it. Included where Communicator is implemented.
#pragma once
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/coded.h"
#include "collectives/communicator.h"
#include "collectives/digests.h"
#include "collectives/exchange.h"
#include "collectives/point_to_point.h"
#include "core/error.h"
#include "core/fork_guard.h"

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
  Mesh& mesh() { return mesh_; }
  const Failure& failure() const { return failure_; }
  int rank() const { return mesh_.rank(); }
  int size() const { return mesh_.size(); }
  PointToPoint& point_to_point() { return *point_to_point_; }
  const Trace& trace() const { return *trace_; }
  Algo algo() const { return algo_; }
  std::vector<int> levels() const {
    std::vector<int> nodes;
    if (!goes_by_levels(mesh_.topology(), algo_)) return nodes;
    for (int r = 0; r < size(); r++) nodes.push_back(mesh_.topology().node_of(r));
    return nodes;
  }
  Milliseconds timeout() const { return Milliseconds(timeout_.load()); }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout.count(); }
  /// Memory that all ranks share, unless an algorithm over channels was asked for.
  Window* window() const {
    const bool over_channels = algo_ != Algo::automatic && algo_ != Algo::hierarchical;
    return over_channels ? nullptr : mesh_.window();
  }

  /// One collective: body(deadline), with the call's number in the tag.
  template <typename Body>
  void run(OpTag& tag, Milliseconds timeout, const Body& body, const Alike& alike = {}) {
    std::lock_guard<std::mutex> one(one_at_a_time_);
    tag.seq = ++seq_;
    if (failure_.happened()) failure_.rethrow_in(tag, rank());
    digests_.stamp(tag);
    recording_ = trace_->start(tag, issued_);
    issued_ = 0;
    spent_ = {};
    trace_->set_algo(recording_, "window");  // over channels the algorithms say more
    try {
      body(Deadline::on_demand(timeout.count() > 0 ? timeout : this->timeout()));
    } catch (...) {
      trace_->end(recording_, false);
      over(Lane::collective);
      failure_.rethrow_in(tag, rank());
    }
    trace_->end(recording_, tag, spent_);
    digests_.keep(tag, alike);
  }

  /// In a body: what this rank sends and gets in an all_to_all, for the trace.
  void note_parts(size_t sent, size_t received) { trace_->set_parts(recording_, sent, received); }
  /// The operation that runs next is one that was noted when it was issued.
  void resume(uint64_t issued) {
    if (issued == 0) trace_->end(issued_);  // it had nothing to run
    issued_ = issued;
  }
  uint64_t note_issued(const OpTag& tag) { return trace_->schedule(tag); }

  /// The same over channels.
  template <typename Body>
  void exchange(OpTag& tag, Milliseconds timeout, const Body& body, const Alike& alike = {}) {
    const auto over_channels = [&](const Deadline& deadline) {
      Exchange ex(mesh_, scratch_, tag, deadline, options_.segment_bytes,
                  {*trace_, recording_, spent_});
      body(ex);
      mesh_.standing().end(tag);
      mesh_.note_links(*trace_);
    };
    run(tag, timeout, over_channels, alike);
  }

  /// body(exchange) of an operation with codecs, about which it returns something.
  template <typename Body>
  bool exchange_coded(Op op, const CodedArgs& args, Milliseconds timeout, const Body& body,
                      const Alike& alike = {}) {
    const ReduceOp redop = args.average ? ReduceOp::avg : ReduceOp::sum;
    OpTag tag = make_tag(op, args.data.size, args.data.dtype, redop);
    tag.codec = coded::signature(args);
    coded::label(args).copy(tag.label, sizeof tag.label - 1);
    bool result = false;
    exchange(tag, timeout, [&](Exchange& ex) { result = body(ex); }, alike);
    return result;
  }

  /// Called with an error in flight that no rank can go on after: tells everybody. From then on
  /// there is a failure.
  void over(Lane lane);
  void abort(const std::string& reason) noexcept;

  void compare(const std::string& what, uint32_t digest) {
    std::lock_guard<std::mutex> one(one_at_a_time_);
    digests_.compare(what, digest);
  }
  bool compares() const { return digests_.on(); }

  void check_buffer(Op op, const void* data, size_t numel) const {
    if (!data && numel > 0) fail(op, "got no buffer for " + std::to_string(numel) + " elements");
  }
  /// One part per rank, with memory.
  template <typename T>
  void check_parts(Op op, const BasicParts<T>& parts) const {
    if (parts.is_list() && parts.listed() != static_cast<size_t>(size())) {
      fail(op, "needs one part per rank, " + std::to_string(size()) + ", and got " +
                   std::to_string(parts.listed()));
    }
    for (int r = 0; r < size(); r++) check_buffer(op, parts[r].data, parts.numel(r));
  }
  /// Our own part is copied on this rank, so its two sizes are compared here.
  void check_own(Op op, size_t in, size_t out) const {
    if (in == out) return;
    fail(op,
         "has " + std::to_string(in) + " elements for itself but expects " + std::to_string(out));
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
  const ForkGuard fork_{};
  const CommunicatorOptions options_;
  const Algo algo_;
  std::atomic<Milliseconds::rep> timeout_;
  Digests digests_;
  Failure failure_;
  Mesh mesh_;
  Scratch scratch_;
  std::mutex one_at_a_time_;
  uint64_t seq_ = 0;
  const std::shared_ptr<Trace> trace_;
  // Numbers in the trace: of the running collective, and of the one that runs next if it is known.
  uint64_t recording_ = 0, issued_ = 0;
  Spent spent_;  // of the running collective
  std::shared_ptr<PointToPoint> point_to_point_;
};

}  // namespace pycomm
