// Start of a communicator.
#include "collectives/communicator_impl.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "collectives/coded/one_shot.h"

namespace pycomm {
namespace {

Rendezvous rendezvous(std::shared_ptr<Store> store, int rank, int size,
                      const CommunicatorOptions& options) {
  if (options.timeout <= Milliseconds(0)) {
    throw Error("rank " + std::to_string(rank) + ": the timeout of the group is " +
                std::to_string(options.timeout.count()) +
                " ms; give one that is more than 0, in which all ranks can join");
  }
  constexpr const char* kTransports[] = {"auto", "shm", "tcp", "local"};
  if (std::find(std::begin(kTransports), std::end(kTransports), options.transport) ==
      std::end(kTransports)) {
    throw Error("unknown transport \"" + options.transport +
                "\"; use one of auto, shm, tcp, local");
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
  return Trace::make(std::move(owner), static_cast<size_t>(options.trace_size));
}

}  // namespace

Communicator::Impl::Impl(std::shared_ptr<Store> store, int rank, int size,
                         CommunicatorOptions options)
    : options_(std::move(options)),
      algo_(parse_algo(options_.algo)),
      timeout_(options_.timeout.count()),
      mesh_(rendezvous(std::move(store), rank, size, options_), options_, failure_),
      trace_(make_trace(rank, size, options_)),
      point_to_point_(std::make_shared<PointToPoint>(mesh_, failure_, *trace_,
                                                     [this] { over(Lane::point_to_point); })) {
  options_.kept_heaps = nullptr;  // what the group does not keep is unmapped with its last tensor
  if (Window* window = mesh_.node_window()) window->note_waits(&timing_);
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

}  // namespace pycomm
