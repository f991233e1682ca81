#include "collectives/coded/stream.h"

#include "core/error.h"

namespace pycomm::coded {

size_t Inbox::expect(uint8_t* to, size_t bytes, bool variable) {
  messages_.push_back({to, bytes, !variable});
  post();
  return messages_.size() - 1;
}

bool Inbox::arrived(size_t i) {
  post();
  return i < posted_ && ex_.received(peer_, messages_[i].ticket);
}

void Inbox::post() {
  for (; posted_ < messages_.size(); posted_++) {
    Message& m = messages_[posted_];
    if (!m.sized) {
      if (m.ticket == 0) m.ticket = ex_.recv(peer_, &m.said, sizeof m.said);
      if (!ex_.received(peer_, m.ticket)) return;
      check(m);
      m.bytes = m.said;
      m.sized = true;
    }
    m.ticket = ex_.recv(peer_, m.to, m.bytes);
  }
}

void Inbox::check(const Message& m) const {
  if (m.said <= m.bytes && m.said % 4 == 0) return;
  throw WireMismatch("rank " + std::to_string(ex_.member(peer_)) + " is to send " +
                     std::to_string(m.said) + " bytes of " + describe(ex_.tag()) +
                     ", but at most " + std::to_string(m.bytes) +
                     " in a multiple of 4 are possible; install the same pycomm on all hosts");
}

void Outbox::send(int peer, const uint8_t* payload, size_t bytes, bool variable) {
  if (variable) ex_.send(peer, &sizes_.emplace_back(bytes), sizeof(uint64_t));
  ex_.send(peer, payload, bytes);
}

}  // namespace pycomm::coded
