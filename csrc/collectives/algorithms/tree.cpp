#include "collectives/algorithms/algorithms.h"
#include "collectives/common/schedule.h"

namespace pycomm::tree {
namespace {

// Place of this rank in the tree. Ranks are numbered from the root on; the parent of number v is v
// without its lowest bit.
class Place {
 public:
  Place(const CollectiveContext& context, int root) : size_(context.size()), root_(root) {
    number_ = (context.rank() - root + size_) % size_;
    while (span_ < size_ && (number_ & span_) == 0) span_ *= 2;
  }

  bool is_root() const { return number_ == 0; }
  int parent() const { return rank_of(number_ & (number_ - 1)); }
  /// Calls visit(peer) for each child, the one with the largest subtree first.
  template <typename Visit>
  void down(const Visit& visit) const {
    for (int d = span_ / 2; d > 0; d /= 2) {
      if (number_ + d < size_) visit(rank_of(number_ + d));
    }
  }

 private:
  int rank_of(int number) const { return (number + root_) % size_; }

  int size_;
  int root_;
  int number_;
  int span_ = 1;  // children are at the powers of two below it
};

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
    place.down([&](int peer) { context.send(peer, at + part.begin, part.size()); });
  }
  context.wait_all();
}

}  // namespace pycomm::tree
