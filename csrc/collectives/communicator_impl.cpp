// Start and failure of a communicator.
#include "collectives/communicator_impl.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <utility>

#include "collectives/coded/one_shot.h"
#include "transports/seal.h"
#include "transports/shm/window.h"

namespace pycomm {
namespace {

Rendezvous rendezvous(std::shared_ptr<Store> store, int rank, int size,
                      const CommunicatorOptions& options) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw Error("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                " ranks: the rank must be at least 0 and less than the number of ranks");
  }
  if (options.timeout <= Milliseconds(0)) {
    throw Error("rank " + std::to_string(rank) + ": the timeout of the group is " +
                std::to_string(options.timeout.count()) +
                " ms; give one that is more than 0, in which all ranks can join");
  }
  if (!store && size > 1) throw Error("a group of more than one rank needs a store; pass one");
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
  result.kept_heaps = options.kept_heaps;
  result.key = key_of_secret(options.secret);
  result.deadline = Deadline::after(options.timeout);
  return result;
}

/// Heaps that the group does not keep are unmapped with their last tensor.
CommunicatorOptions without_heaps(CommunicatorOptions options) {
  options.kept_heaps = nullptr;
  return options;
}

std::shared_ptr<Trace> make_trace(int rank, int size, const CommunicatorOptions& options) {
  TraceOwner owner{options.group, options.description, rank, options.global_ranks};
  if (owner.global_ranks.size() != static_cast<size_t>(size)) {
    owner.global_ranks.resize(static_cast<size_t>(size));
    std::iota(owner.global_ranks.begin(), owner.global_ranks.end(), 0);
  }
  return Trace::make(std::move(owner), static_cast<size_t>(options.trace_size));
}

/// " in all_reduce #7 (...)" or " after all_reduce #7", for the middle of a sentence.
std::string doing(const RankState& rank_state) {
  if (rank_state.inside()) return " in " + describe(rank_state.call);
  if (rank_state.waits.op != Op::none) return " in " + describe(rank_state.waits);
  if (rank_state.completed == 0) return "";
  return std::string(" after ") + name(rank_state.completed_op) + " #" +
         std::to_string(rank_state.completed);
}

}  // namespace

Communicator::Impl::Impl(std::shared_ptr<Store> store, int rank, int size,
                         CommunicatorOptions options)
    : options_(without_heaps(options)),
      algo_(parse_algo(options_.algo)),
      timeout_(options_.timeout.count()),
      mesh_(rendezvous(std::move(store), rank, size, options), options_, failure_),
      trace_(make_trace(rank, size, options_)),
      point_to_point_(std::make_shared<PointToPoint>(mesh_, failure_, *trace_,
                                                     [this] { over(Lane::point_to_point); })) {
  if (Window* window = mesh_.node_window()) window->note_waits(&timing_);
}

void Communicator::Impl::over(Lane lane) {
  std::exception_ptr thrown;
  try {
    throw;
  } catch (const Interrupted& e) {  // its cause is for the caller alone
    thrown = std::make_exception_ptr(Error("rank " + std::to_string(rank()) + " was interrupted" +
                                           doing(mesh_.rank_state().load()) + ": " + e.what()));
  } catch (...) {
    thrown = from_notice(std::current_exception());
  }
  if (failure_.happened()) {
    // The thread that was first may not have told the others yet; all must be able to know before
    // our caller continues.
    mesh_.abort(to_notice(failure_.error(), rank()));
  } else {
    end_with(thrown, lane);
  }
  if (lane != Lane::collective) return;
  const std::string problem = mesh_.take_back_heap();
  if (!problem.empty()) failure_.add(problem);
}

void Communicator::Impl::end_with(const std::exception_ptr& thrown, Lane lane) {
  try {
    const std::exception_ptr error =
        mesh_.aborted() ? thrown : with_rank_states(thrown, mesh_, lane, callers_.advice(rank()));
    // What another rank has reported meanwhile is the cause.
    const std::exception_ptr cause = mesh_.aborted();
    failure_.set(cause ? cause : error);
    mesh_.abort(to_notice(cause ? cause : error, rank()));
    trace_->set_error(failure_.text());
  } catch (const std::bad_alloc&) {  // not enough memory for the full text
    failure_.set(thrown);
    mesh_.abort(plain_notice("out of memory", rank()));
  }
}

std::string Communicator::Impl::explain(Op op, size_t bytes, const CodedArgs* coded) const {
  if (size() == 1) return "nothing travels: the group has one rank";
  if (!coded && window()) return "window: all ranks share memory";
  const auto [topology, links] = mesh_.known_network();
  if (goes_by_levels(topology, algo_) && !(coded && op != Op::all_reduce)) {
    return std::string("hierarchical: ranks of a node share memory") +
           (coded ? ", and nodes exchange payloads" : "");
  }
  if (!coded) return pycomm::explain({op, size(), bytes, mesh_.slowest(), links.speed()}, algo_);
  if (op != Op::all_reduce) return "one_shot, its only algorithm";
  return coded::explain(*coded, algo_, size(), links.speed());
}

void Communicator::Impl::abort(const std::string& reason) noexcept {
  if (in_child()) return;  // the parent's group stays usable
  const std::string text = "rank " + std::to_string(rank()) + " was aborted" +
                           doing(mesh_.rank_state().load()) + ": " + reason;
  failure_.set(std::make_exception_ptr(Error(text)));
  mesh_.abort(plain_notice(text, rank()));
  trace_->set_error(text);
}

}  // namespace pycomm
