#include "collectives/algorithms/algorithms.h"
#include "collectives/common/schedule.h"

namespace pycomm::tree {
namespace {

// Place of this rank in the tree. Ranks are numbered from the root on; the parent of number v is v
// without its lowest bit, so a subtree is a run of numbers.
class Place {
 public:
  Place(const CollectiveContext& context, int root) : size_(context.size()), root_(root) {
    number_ = (context.rank() - root + size_) % size_;
    while (span_ < size_ && (number_ & span_) == 0) span_ *= 2;
  }

  bool is_root() const { return number_ == 0; }
  int parent() const { return rank_of(number_ & (number_ - 1)); }
  /// Returns the number of ranks in our subtree, including this one.
  int subtree() const { return std::min(span_, size_ - number_); }

  /// Calls visit(peer, distance, ranks in its subtree) for each child, the largest subtree first.
  template <typename Visit>
  void down(const Visit& visit) const {
    for (int d = span_ / 2; d > 0; d /= 2) visit_child(d, visit);
  }
  /// Calls visit() likewise, the smallest subtree first: it is the first to be ready.
  template <typename Visit>
  void up(const Visit& visit) const {
    for (int d = 1; d < span_; d *= 2) visit_child(d, visit);
  }

 private:
  int rank_of(int number) const { return (number + root_) % size_; }
  template <typename Visit>
  void visit_child(int distance, const Visit& visit) const {
    if (number_ + distance >= size_) return;
    visit(rank_of(number_ + distance), distance, std::min(distance, size_ - number_ - distance));
  }

  int size_;
  int root_;
  int number_;
  int span_ = 1;  // children are at the powers of two below it
};

// Gathers the inputs of our subtree, ours first, in `parts`; all ranks but the root pass them on.
void gather_up(CollectiveContext& context, const Place& place, uint8_t* parts, size_t bytes) {
  place.up([&](int peer, int distance, int ranks) {
    context.recv(peer, parts + distance * bytes, ranks * bytes);
  });
  context.wait_all();
  if (!place.is_root()) context.send(place.parent(), parts, place.subtree() * bytes);
  context.wait_all();
}

}  // namespace

void broadcast(CollectiveContext& context, const Collective& call) {
  const Place place(context, call.root);
  context.set_source(call.root);
  auto* at = static_cast<uint8_t*>(call.out.data());
  const schedule::Range all{0, call.out.bytes(0)};
  const size_t segment = context.segment_numel(1);
  const size_t segments = schedule::num_segments(all, segment);
  const auto part_of = [&](size_t s) { return schedule::segment(all, segment, s); };
  std::vector<uint64_t> tickets;
  for (size_t s = 0; !place.is_root() && s < segments; s++) {
    tickets.push_back(context.recv(place.parent(), at + part_of(s).begin, part_of(s).size()));
  }
  for (size_t s = 0; s < segments; s++) {
    if (!place.is_root()) context.wait(place.parent(), tickets[s]);
    const schedule::Range part = part_of(s);
    place.down([&](int peer, int, int) { context.send(peer, at + part.begin, part.size()); });
  }
  context.wait_all();
}

void reduce(CollectiveContext& context, const Collective& call) {
  const Place place(context, call.root);
  const size_t bytes = call.in.bytes(0);
  uint8_t* parts = context.scratch(place.subtree() * bytes);
  copy_bytes(parts, call.in.data(), bytes);
  gather_up(context, place, parts, bytes);
  if (!place.is_root()) return;
  std::vector<const void*> inputs(context.size());
  for (int i = 0; i < context.size(); i++) {
    inputs[(call.root + i) % context.size()] = parts + i * bytes;
  }
  call.fold()(inputs.data(), context.size(), call.out.data(), call.in.numel(0));
}

}  // namespace pycomm::tree
