#include "collectives/coded/channels.h"

#include "core/error.h"

namespace pycomm::coded {

void Inbox::expect(uint8_t* to, const Segment& segment) {
  messages_.push_back({to, segment.bytes, !segment.variable});
  post();
}

bool Inbox::arrived(size_t i) {
  post();
  return i < posted_ && context_.received(peer_, messages_[i].ticket);
}

void Inbox::post() {
  for (; posted_ < messages_.size(); posted_++) {
    Message& m = messages_[posted_];
    if (!m.sized) {
      if (m.ticket == 0) m.ticket = context_.recv(peer_, &m.said, sizeof m.said);
      if (!context_.received(peer_, m.ticket)) return;
      check(m);
      m.bytes = m.said;
      m.sized = true;
    }
    m.ticket = context_.recv(peer_, m.to, m.bytes);
  }
}

void Inbox::check(const Message& m) const {
  if (m.said <= m.bytes && m.said % 4 == 0) return;
  throw WireMismatch("rank " + std::to_string(context_.member(peer_)) + " is to send " +
                     std::to_string(m.said) + " bytes of " + describe(context_.tag()) +
                     ", but at most " + std::to_string(m.bytes) +
                     " in a multiple of 4 are possible; install the same pycomm on all hosts");
}

Channels::Channels(CollectiveContext& context, const Plan& plan)
    : Exchange(context.rank(), context.size()), context_(context), plan_(plan) {
  const BucketLayout &owned = plan.owned, &shown = plan.shown;
  const size_t ranks = static_cast<size_t>(size());
  const size_t mine = plan.scatters ? owned.count(rank()) : 0;
  before_ = {0, mine, mine + shown.count(0)};
  size_t spare = 0;  // in one shot, for a result
  for (const Segment& segment : shown.segments()) {
    if (plan.one_shot) spare = std::max(spare, segment.bytes);
  }
  const size_t sent = std::max(owned.bytes(), spare);
  const size_t incoming = plan.scatters ? ranks * owned.bytes(rank()) : 0;
  payloads_ = context.scratch(sent + incoming + ranks * shown.bytes());
  incoming_ = payloads_ + sent;
  shown_ = incoming_ + incoming;
  for (int r = 0; r < size(); r++) inboxes_.emplace_back(context, r);
  for (int i = 1; i < size(); i++) {
    const int peer = after(i);
    const auto expect = [&](Shot shot, int owner, size_t count) {
      for (size_t s = 0; s < count; s++) {
        inboxes_[peer].expect(place(shot, peer, s), segment(shot, owner, s));
      }
    };
    expect(Shot::contribution, rank(), mine);
    expect(Shot::shown, peer, shown.count(0));
    expect(Shot::result, peer, plan.gathers ? owned.count(peer) : 0);
  }
}

uint8_t* Channels::place(Shot shot, int from, size_t s) const {
  const size_t r = static_cast<size_t>(from);
  switch (shot) {
    case Shot::contribution:
      return incoming_ + r * plan_.owned.bytes(rank()) + plan_.owned.in_chunk(rank(), s);
    case Shot::shown:
      return shown_ + r * plan_.shown.bytes() + plan_.shown.at(0, s).payload;
    default:
      return plan_.one_shot ? payloads_ : payloads_ + plan_.owned.at(from, s).payload;
  }
}

uint8_t* Channels::room(Shot shot, int owner, size_t s) {
  const bool leaves = shot == Shot::contribution && owner != rank();
  return leaves ? payloads_ + plan_.owned.at(owner, s).payload : place(shot, rank(), s);
}

void Channels::put(Shot shot, int owner, size_t s, size_t bytes) {
  if (owner == rank()) own_[static_cast<size_t>(shot)].push_back(bytes);
  const uint8_t* const payload = room(shot, owner, s);
  const Segment& segment = this->segment(shot, owner, s);
  if (shot == Shot::contribution) {
    if (owner == rank()) return;
    send(owner, payload, segment, bytes);
  } else {
    for (int i = 1; i < size(); i++) send(after(i), payload, segment, bytes);
  }
  context_.progress();
}

Span<const uint8_t> Channels::get(Shot shot, int from, size_t s) {
  if (from != rank()) return inboxes_[from].payload(number(shot, s));
  return {place(shot, from, s), own_[static_cast<size_t>(shot)][s]};
}

void Channels::send(int peer, const uint8_t* payload, const Segment& segment, size_t bytes) {
  if (segment.variable) {
    context_.send(peer, &sizes_.emplace_back(bytes), sizeof(uint64_t));
  }
  context_.send(peer, payload, bytes);
}

}  // namespace pycomm::coded
