#include "collectives/coded/nodes.h"

namespace pycomm::coded {

Nodes::Nodes(CollectiveContext& rail, Node& node, const Topology& topology, const Plan& plan,
             const CodedArgs& args)
    : Channels(rail, plan), node_(node), topology_(topology), plan_(plan), args_(args) {
  size_t most = 0;
  for (const BucketLayout& place : plan.places) most = std::max(most, place.most_bytes());
  arrivals_.resize(most * plan.places.size());
  for (size_t s = 0; s < plan.count(rank()); s++) order_.emplace_back(rank(), s);
  for (size_t s = 0; s < plan.most(); s++) {
    for (int i = 1; i < size(); i++) {
      if (s < plan.count(after(i))) order_.emplace_back(after(i), s);
    }
  }
}

void Nodes::make(int owner, size_t s) {
  std::vector<ConstPart> parts(static_cast<size_t>(node_.size()));
  for (size_t p = 0; p < plan_.places.size(); p++) {
    const BucketLayout& place = plan_.places[p];
    if (s >= place.count(owner)) continue;
    const Span<const PieceRun> runs = place.runs(place.at(owner, s));
    parts[p] = {args_.data.at(args_.pieces[runs[0].piece].offset + runs[0].offset), numel_of(runs)};
  }
  void* const own = const_cast<void*>(parts[static_cast<size_t>(node_.place())].data);
  node_.reduce_scatter(ConstParts(parts).of(sizeof(float)).aligned(), own,
                       {DType::float32, ReduceOp::sum});
}

bool Nodes::has(Shot shot, int rank, size_t s) {
  if (shot != Shot::result) return Channels::has(shot, rank, s);
  if (turn_ == order_.size() || order_[turn_] != std::make_pair(rank, s)) return false;
  return s >= plan_.owned.count(rank) || Channels::has(shot, rank, s);
}

Span<const Received> Nodes::get_places(int owner, size_t s) {
  results_.clear();
  std::vector<Part> parts;
  uint8_t* place = arrivals_.data();
  for (size_t p = 0; p < static_cast<size_t>(node_.size()); p++) {
    const bool has = p < plan_.places.size() && s < plan_.places[p].count(owner);
    parts.push_back({place, has ? plan_.places[p].at(owner, s).bytes : 0});
    place += parts.back().numel;
  }
  const auto ours = static_cast<size_t>(node_.place());
  if (parts[ours].numel > 0) {
    parts[ours].data = const_cast<uint8_t*>(get(Shot::result, owner, s).data);
  }
  node_.all_gather(parts[ours].data, parts);
  for (size_t p = 0; p < plan_.places.size(); p++) {
    results_.push_back(
        {{static_cast<uint8_t*>(parts[p].data), parts[p].numel}, topology_.node(owner)[p]});
  }
  turn_++;
  return {results_.data(), results_.size()};
}

}  // namespace pycomm::coded
