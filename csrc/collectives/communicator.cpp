// The public face: checks arguments, gives each call its number, has an algorithm run it, and makes
// sure that an error on one rank is an error on all.
#include "collectives/communicator.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>

#include "collectives/coded.h"
#include "collectives/direct.h"
#include "collectives/dispatch.h"
#include "collectives/point_to_point.h"
#include "collectives/shared.h"
#include "core/crc32c.h"
#include "core/error.h"
#include "core/fork_guard.h"
#include "core/reduce.h"

namespace pycomm {
namespace {

Rendezvous meeting(std::shared_ptr<Store> store, int rank, int size,
                   const CommunicatorOptions& options) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw Error("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                " ranks: the rank must be at least 0 and less than the number of ranks");
  }
  if (!store && size > 1) throw Error("a group of more than one rank needs a store");
  constexpr const char* kTransports[] = {"auto", "shm", "tcp", "local"};
  if (std::find(std::begin(kTransports), std::end(kTransports), options.transport) ==
      std::end(kTransports)) {
    throw Error("unknown transport \"" + options.transport +
                "\"; use one of auto, shm, tcp, local");
  }
  Rendezvous result;
  result.store = std::move(store);
  result.group = options.group;
  result.rank = rank;
  result.size = size;
  result.deadline = Deadline::after(options.timeout);
  return result;
}

std::shared_ptr<Trace> make_trace(int rank, int size, const CommunicatorOptions& options) {
  TraceOwner owner{options.group, options.description, rank, options.global_ranks};
  if (owner.global_ranks.size() != static_cast<size_t>(size)) {
    owner.global_ranks.resize(static_cast<size_t>(size));
    std::iota(owner.global_ranks.begin(), owner.global_ranks.end(), 0);
  }
  return Trace::make(std::move(owner), static_cast<size_t>(options.trace_size));
}

OpTag make_tag(Op op, size_t numel, DType dtype, ReduceOp redop = ReduceOp::sum, int root = -1) {
  OpTag tag;
  tag.op = op;
  tag.numel = numel;
  tag.dtype = dtype;
  tag.redop = redop;
  tag.root = root;
  return tag;
}

/// For an op whose parts have the same sizes on all ranks. Uneven sizes are hashed into the tag.
template <typename T>
OpTag make_tag(Op op, const BasicParts<T>& parts, int ranks, DType dtype,
               ReduceOp redop = ReduceOp::sum) {
  if (parts.even(ranks)) return make_tag(op, parts.numel(0), dtype, redop);
  OpTag tag = make_tag(op, parts.total(ranks), dtype, redop);
  std::string label = "parts of ";
  for (int r = 0; r < ranks; r++) {
    const uint64_t numel = parts.numel(r);
    tag.codec = crc32c({reinterpret_cast<const uint8_t*>(&numel), sizeof numel}, tag.codec);
    label += (r == 0 ? "" : ",") + std::to_string(numel);
  }
  label.copy(tag.label, sizeof tag.label - 1);
  return tag;
}

/// " in all_reduce #7 (...)" or " after all_reduce #7", for the middle of a sentence.
std::string doing(const Standing& standing) {
  if (standing.inside()) return " in " + describe(standing.call);
  if (standing.waits.op != Op::none) return " in " + describe(standing.waits);
  if (standing.completed == 0) return "";
  return std::string(" after ") + name(standing.completed_op) + " #" +
         std::to_string(standing.completed);
}

}  // namespace

class Communicator::Impl {
 public:
  Impl(std::shared_ptr<Store> store, int rank, int size, CommunicatorOptions options)
      : options_(std::move(options)),
        algo_(parse_algo(options_.algo)),
        timeout_(options_.timeout.count()),
        mesh_(meeting(std::move(store), rank, size, options_), options_, failure_),
        trace_(make_trace(rank, size, options_)),
        point_to_point_(std::make_shared<PointToPoint>(mesh_, failure_, *trace_,
                                                       [this] { over(Lane::point_to_point); })) {
    if (Window* window = mesh_.node_window()) window->note_waits(&spent_);
  }

  ~Impl() { point_to_point_->close(); }

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

  /// One collective: body(tag, deadline) with the call's number in the tag.
  template <typename Body>
  void run(OpTag& tag, Milliseconds timeout, const Body& body) {
    std::lock_guard<std::mutex> one(one_at_a_time_);
    failure_.rethrow();
    tag.seq = ++seq_;
    recording_ = trace_->start(tag, issued_);
    issued_ = 0;
    spent_ = {};
    trace_->set_algo(recording_, "window");  // over channels the algorithms say more
    try {
      body(Deadline::on_demand(timeout.count() > 0 ? timeout : this->timeout()));
    } catch (...) {
      trace_->end(recording_, false);
      over(Lane::collective);
    }
    trace_->end(recording_, tag, spent_);
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
  void exchange(OpTag& tag, Milliseconds timeout, const Body& body) {
    run(tag, timeout, [&](const Deadline& deadline) {
      Exchange ex(mesh_, scratch_, tag, deadline, options_.segment_bytes,
                  {*trace_, recording_, spent_});
      body(ex);
      mesh_.standing().end(tag);
      mesh_.note_links(*trace_);
    });
  }

  /// body(exchange) of an operation with codecs, about which it returns something.
  template <typename Body>
  bool exchange_coded(Op op, const CodedArgs& args, Milliseconds timeout, const Body& body) {
    const ReduceOp redop = args.average ? ReduceOp::avg : ReduceOp::sum;
    OpTag tag = make_tag(op, args.data.size, args.data.dtype, redop);
    tag.codec = coded::signature(args);
    coded::label(args).copy(tag.label, sizeof tag.label - 1);
    bool result = false;
    exchange(tag, timeout, [&](Exchange& ex) { result = body(ex); });
    return result;
  }

  /// Called with an error in flight that no rank can go on after: tells everybody, and throws the
  /// group's first error.
  [[noreturn]] void over(Lane lane) {
    const std::exception_ptr thrown = from_reason(std::current_exception());
    if (!failure_.happened()) {
      try {
        const std::exception_ptr error = mesh_.aborted() ? thrown : explained(thrown, mesh_, lane);
        // What another rank has said meanwhile is the cause.
        const std::exception_ptr cause = mesh_.aborted();
        failure_.set(cause ? cause : error);
        mesh_.abort(to_reason(cause ? cause : error));
        trace_->set_error(failure_.text());
      } catch (const std::bad_alloc&) {  // not enough for long words
        failure_.set(thrown);
        mesh_.abort("out of memory");
      }
    }
    failure_.rethrow();
    std::abort();  // not reached: an error is set
  }

  void abort(const std::string& reason) noexcept {
    if (in_child()) return;  // the parent's group goes on
    const std::string text = "rank " + std::to_string(rank()) + " was aborted" +
                             doing(mesh_.standing().load()) + ": " + reason;
    failure_.set(std::make_exception_ptr(Error(text)));
    mesh_.abort(text);
    trace_->set_error(text);
  }

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
  const ForkGuard fork_;
  const CommunicatorOptions options_;
  const Algo algo_;
  std::atomic<Milliseconds::rep> timeout_;
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

Communicator::Communicator(std::shared_ptr<Store> store, int rank, int size,
                           CommunicatorOptions options)
    : impl_(std::make_unique<Impl>(std::move(store), rank, size, std::move(options))) {}
Communicator::~Communicator() {
  // In a forked child nothing can be ended, so it is left as it is.
  if (impl_->in_child()) static_cast<void>(impl_.release());
}

int Communicator::rank() const { return impl_->rank(); }
int Communicator::size() const { return impl_->size(); }
Milliseconds Communicator::timeout() const { return impl_->timeout(); }
void Communicator::set_timeout(Milliseconds timeout) { impl_->set_timeout(timeout); }
std::vector<int> Communicator::levels() const { return impl_->levels(); }
std::string Communicator::describe() const { return impl_->mesh().describe(); }
uint64_t Communicator::wire_bytes() const { return impl_->mesh().wire_bytes(); }
uint64_t Communicator::sent_bytes() const { return impl_->mesh().sent_bytes(); }
uint64_t Communicator::note_issued(const OpTag& tag) { return impl_->note_issued(tag); }
void Communicator::resume(uint64_t issued) { impl_->resume(issued); }
const Trace& Communicator::trace() const { return impl_->trace(); }
void Communicator::abort(const std::string& reason) noexcept { impl_->abort(reason); }
std::exception_ptr Communicator::over() const { return impl_->failure().error(); }
std::string Communicator::whereabouts() const { return pycomm::whereabouts(impl_->mesh()); }
bool Communicator::lost(int rank) const { return impl_->mesh().lost(rank); }
std::shared_ptr<SharedHeap> Communicator::heap() const { return impl_->mesh().heap(); }

std::shared_ptr<void> Communicator::allocate(size_t bytes) {
  if (auto heap = impl_->mesh().heap()) return allocate_shared(heap, bytes);
  constexpr size_t kAlign = 64;
  void* data =
      std::aligned_alloc(kAlign, (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign);
  if (!data) throw Error("no memory for " + std::to_string(bytes) + " bytes");
  return {data, &std::free};
}

// ------------------------------------------------------------------ collectives that reduce

void Communicator::all_reduce(void* data, size_t numel, DType dtype, ReduceOp op, double factor,
                              Milliseconds timeout) {
  impl_->check_dtype(Op::all_reduce, dtype);
  check_reducible(dtype, op);
  impl_->check_buffer(Op::all_reduce, data, numel);
  OpTag tag = make_tag(Op::all_reduce, numel, dtype, op);
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      shared::all_reduce(*window, tag, data, factor, deadline);
    });
  }
  impl_->exchange(tag, timeout, [&](Exchange& ex) {
    dispatch::all_reduce(ex, impl_->algo(), data, numel, {dtype, op, factor});
  });
}

bool Communicator::all_reduce_coded(const CodedArgs& args, Milliseconds timeout) {
  impl_->check_buffer(Op::all_reduce, args.data.data, args.data.size);
  coded::check("all_reduce_coded", args, 1);
  return impl_->exchange_coded(Op::all_reduce, args, timeout, [&](Exchange& ex) {
    return coded::all_reduce(ex, impl_->algo(), args);
  });
}

bool Communicator::reduce_scatter_coded(const CodedArgs& args, void* out, Milliseconds timeout) {
  const auto ranks = static_cast<size_t>(size());
  impl_->check_buffer(Op::reduce_scatter, args.data.data, args.data.size);
  impl_->check_buffer(Op::reduce_scatter, out, args.data.size / ranks);
  coded::check("reduce_scatter_coded", args, ranks);
  return impl_->exchange_coded(Op::reduce_scatter, args, timeout,
                               [&](Exchange& ex) { return coded::reduce_scatter(ex, args, out); });
}

bool Communicator::all_gather_coded(const CodedArgs& args, void* out, Milliseconds timeout) {
  impl_->check_buffer(Op::all_gather, args.data.data, args.data.size);
  impl_->check_buffer(Op::all_gather, out, args.data.size);
  coded::check("all_gather_coded", args, 1);
  return impl_->exchange_coded(Op::all_gather, args, timeout,
                               [&](Exchange& ex) { return coded::all_gather(ex, args, out); });
}

void Communicator::reduce_scatter(const ConstParts& in, void* out, DType dtype, ReduceOp op,
                                  double factor, Milliseconds timeout) {
  impl_->check_dtype(Op::reduce_scatter, dtype);
  check_reducible(dtype, op);
  impl_->check_parts(Op::reduce_scatter, in);
  impl_->check_buffer(Op::reduce_scatter, out, in.numel(rank()));
  OpTag tag = make_tag(Op::reduce_scatter, in, size(), dtype, op);
  const ConstParts parts = in.of(size_of(dtype));
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      shared::reduce_scatter(*window, tag, parts, out, factor, deadline);
    });
  }
  impl_->exchange(tag, timeout, [&](Exchange& ex) {
    dispatch::reduce_scatter(ex, impl_->algo(), parts, out, {dtype, op, factor});
  });
}

void Communicator::reduce(const void* in, void* out, size_t numel, DType dtype, ReduceOp op,
                          int root, double factor, Milliseconds timeout) {
  impl_->check_dtype(Op::reduce, dtype);
  check_reducible(dtype, op);
  impl_->check_rank(Op::reduce, "root", root);
  impl_->check_buffer(Op::reduce, in, numel);
  if (rank() == root) impl_->check_buffer(Op::reduce, out, numel);
  OpTag tag = make_tag(Op::reduce, numel, dtype, op, root);
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      shared::reduce(*window, tag, in, out, factor, deadline);
    });
  }
  impl_->exchange(tag, timeout, [&](Exchange& ex) {
    dispatch::reduce(ex, impl_->algo(), in, out, numel, {dtype, op, factor}, root);
  });
}

// ------------------------------------------------------------------ collectives that move

void Communicator::all_gather(const void* in, const Parts& out, DType dtype, Milliseconds timeout) {
  impl_->check_dtype(Op::all_gather, dtype);
  impl_->check_parts(Op::all_gather, out);
  impl_->check_buffer(Op::all_gather, in, out.numel(rank()));
  OpTag tag = make_tag(Op::all_gather, out, size(), dtype);
  const Parts parts = out.of(size_of(dtype));
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      shared::all_gather(*window, tag, in, parts, deadline);
    });
  }
  impl_->exchange(tag, timeout,
                  [&](Exchange& ex) { dispatch::all_gather(ex, impl_->algo(), in, parts); });
}

void Communicator::all_to_all(const ConstParts& in, const Parts& out, DType dtype,
                              Milliseconds timeout) {
  impl_->check_dtype(Op::all_to_all, dtype);
  impl_->check_parts(Op::all_to_all, in);
  impl_->check_parts(Op::all_to_all, out);
  impl_->check_own(Op::all_to_all, in.numel(rank()), out.numel(rank()));
  OpTag tag = make_tag(Op::all_to_all, in.total(size()), dtype);
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      impl_->note_parts(in.total(size()), out.total(size()));
      shared::all_to_all(*window, tag, in, out, deadline);
    });
  }
  const size_t element = size_of(dtype);
  impl_->exchange(tag, timeout, [&](Exchange& ex) {
    impl_->note_parts(in.total(size()), out.total(size()));
    direct::all_to_all(ex, in.of(element), out.of(element));
  });
}

void Communicator::broadcast(void* data, size_t numel, DType dtype, int root,
                             Milliseconds timeout) {
  impl_->check_dtype(Op::broadcast, dtype);
  impl_->check_rank(Op::broadcast, "root", root);
  impl_->check_buffer(Op::broadcast, data, numel);
  OpTag tag = make_tag(Op::broadcast, numel, dtype, ReduceOp::sum, root);
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      shared::broadcast(*window, tag, data, deadline);
    });
  }
  const size_t bytes = numel * size_of(dtype);
  impl_->exchange(tag, timeout,
                  [&](Exchange& ex) { dispatch::broadcast(ex, impl_->algo(), data, bytes, root); });
}

void Communicator::gather(const void* in, size_t numel, const Parts& out, DType dtype, int root,
                          Milliseconds timeout) {
  impl_->check_dtype(Op::gather, dtype);
  impl_->check_rank(Op::gather, "root", root);
  impl_->check_buffer(Op::gather, in, numel);
  if (rank() == root) {
    impl_->check_parts(Op::gather, out);
    impl_->check_own(Op::gather, numel, out.numel(root));
  }
  OpTag tag = make_tag(Op::gather, numel, dtype, ReduceOp::sum, root);
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      shared::gather(*window, tag, in, out, deadline);
    });
  }
  const size_t element = size_of(dtype);
  impl_->exchange(tag, timeout, [&](Exchange& ex) {
    direct::gather(ex, in, numel * element, out.of(element), root);
  });
}

void Communicator::scatter(const ConstParts& in, void* out, size_t numel, DType dtype, int root,
                           Milliseconds timeout) {
  impl_->check_dtype(Op::scatter, dtype);
  impl_->check_rank(Op::scatter, "root", root);
  impl_->check_buffer(Op::scatter, out, numel);
  if (rank() == root) {
    impl_->check_parts(Op::scatter, in);
    impl_->check_own(Op::scatter, in.numel(root), numel);
  }
  OpTag tag = make_tag(Op::scatter, numel, dtype, ReduceOp::sum, root);
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout, [&](const Deadline& deadline) {
      shared::scatter(*window, tag, in, out, deadline);
    });
  }
  const size_t element = size_of(dtype);
  impl_->exchange(tag, timeout, [&](Exchange& ex) {
    direct::scatter(ex, in.of(element), out, numel * element, root);
  });
}

void Communicator::barrier(Milliseconds timeout) {
  OpTag tag = make_tag(Op::barrier, 0, DType::uint8);
  if (Window* window = impl_->window()) {
    return impl_->run(tag, timeout,
                      [&](const Deadline& deadline) { shared::barrier(*window, tag, deadline); });
  }
  impl_->exchange(tag, timeout, [&](Exchange& ex) { dispatch::barrier(ex, impl_->algo()); });
}

// ------------------------------------------------------------------ point to point

std::shared_ptr<Communicator::Request> Communicator::send(const void* data, size_t bytes, int dst,
                                                          int tag) {
  impl_->check_rank(Op::send, "destination", dst);
  impl_->check_buffer(Op::send, data, bytes);
  return impl_->point_to_point().send(data, bytes, dst, tag, impl_->timeout());
}

std::shared_ptr<Communicator::Request> Communicator::recv(void* data, size_t bytes, int src,
                                                          int tag) {
  if (src != -1) impl_->check_rank(Op::recv, "source", src);
  impl_->check_buffer(Op::recv, data, bytes);
  return impl_->point_to_point().recv(data, bytes, src, tag, impl_->timeout());
}

}  // namespace pycomm
