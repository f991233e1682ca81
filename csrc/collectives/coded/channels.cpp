#include "collectives/coded/channels.h"

#include "core/error.h"

namespace pycomm::coded {

Channels::Channels(CollectiveContext& context, const Plan& plan)
    : Exchange(context.rank(), context.size()), context_(context), plan_(plan) {
  const BucketLayout &owned = plan.owned, &shown = plan.shown;
  const size_t ranks = static_cast<size_t>(size());
  const size_t mine = plan.scatters ? owned.count(rank()) : 0;
  before_ = {0, mine, mine + shown.count(0)};
  // In one shot there is one for a result.
  const size_t sent = plan.one_shot ? shown.most_bytes() : owned.bytes();
  const size_t incoming = plan.scatters ? ranks * owned.bytes(rank()) : 0;
  sent_ = context.scratch(sent + incoming + ranks * shown.bytes());
  incoming_ = sent_ + sent;
  shown_ = incoming_ + incoming;
  inboxes_.reserve(ranks);
  payloads_.reserve(ranks * before_[2] + owned.segments().size);
  for (int r = 0; r < size(); r++) {
    const size_t first = payloads_.size();
    const auto expect = [&](Shot shot, int owner, size_t count) {
      for (size_t s = 0; s < count; s++) {
        const Segment& next = segment(shot, owner, s);
        payloads_.push_back({place(shot, r, s), next.bytes, !next.variable});
      }
    };
    expect(Shot::contribution, rank(), mine);
    expect(Shot::shown, r, shown.count(0));
    expect(Shot::result, r, plan.gathers ? owned.count(r) : 0);
    inboxes_.push_back({first, first, payloads_.size()});
  }
  for (int i = 1; i < size(); i++) post(after(i));
}

uint8_t* Channels::place(Shot shot, int from, size_t s) const {
  const size_t r = static_cast<size_t>(from);
  switch (shot) {
    case Shot::contribution:
      return incoming_ + r * plan_.owned.bytes(rank()) + plan_.owned.in_chunk(rank(), s);
    case Shot::shown:
      return shown_ + r * plan_.shown.bytes() + plan_.shown.at(0, s).payload;
    default:
      return plan_.one_shot ? sent_ : sent_ + plan_.owned.at(from, s).payload;
  }
}

uint8_t* Channels::room(Shot shot, int owner, size_t s) {
  const bool leaves = shot == Shot::contribution && owner != rank();
  return leaves ? sent_ + plan_.owned.at(owner, s).payload : place(shot, rank(), s);
}

void Channels::put(Shot shot, int owner, size_t s, size_t bytes) {
  const uint8_t* const from = room(shot, owner, s);
  const Segment& segment = this->segment(shot, owner, s);
  if (owner == rank()) {
    Payload& own = payload(shot, owner, s);
    own.bytes = bytes;
    own.ticket = 1;
  } else {
    send(owner, from, segment, bytes);
  }
  for (int i = 1; shot != Shot::contribution && i < size(); i++) {
    send(after(i), from, segment, bytes);
  }
  context_.progress();
}

bool Channels::has(Shot shot, int from, size_t s) {
  Payload& wanted = payload(shot, from, s);
  if (from == rank()) return wanted.ticket != 0;
  post(from);
  return &wanted < &payloads_[0] + inboxes_[from].posted && context_.received(from, wanted.ticket);
}

Span<const uint8_t> Channels::get(Shot shot, int from, size_t s) {
  const Payload& wanted = payload(shot, from, s);
  return {wanted.place, wanted.bytes};
}

void Channels::post(int peer) {
  Inbox& inbox = inboxes_[peer];
  for (; inbox.posted < inbox.end; inbox.posted++) {
    Payload& next = payloads_[inbox.posted];
    if (!next.sized) {
      if (next.ticket == 0) next.ticket = context_.recv(peer, &next.said, sizeof next.said);
      if (!context_.received(peer, next.ticket)) return;
      check(peer, next);
      next.bytes = next.said;
      next.sized = true;
    }
    next.ticket = context_.recv(peer, next.place, next.bytes);
  }
}

void Channels::check(int peer, const Payload& payload) const {
  if (payload.said <= payload.bytes && payload.said % 4 == 0) return;
  throw WireMismatch("rank " + std::to_string(context_.member(peer)) + " is to send " +
                     std::to_string(payload.said) + " bytes of " + describe(context_.tag()) +
                     ", but at most " + std::to_string(payload.bytes) +
                     " in a multiple of 4 are possible; install the same pycomm on all hosts");
}

void Channels::send(int peer, const uint8_t* payload, const Segment& segment, size_t bytes) {
  if (segment.variable) {
    context_.send(peer, &sizes_.emplace_back(bytes), sizeof(uint64_t));
  }
  context_.send(peer, payload, bytes);
}

}  // namespace pycomm::coded
