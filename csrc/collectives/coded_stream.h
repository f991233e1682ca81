// Payloads on their way between two ranks of a coded operation. One whose size varies goes behind a
// message of 8 bytes that says how many there are.
#pragma once
#include <deque>

#include "collectives/exchange.h"

namespace pycomm::coded {

/// What one peer sends us, in order.
class Inbox {
 public:
  Inbox(Exchange& ex, int peer) : ex_(ex), peer_(peer) {}
  Inbox(const Inbox&) = delete;  // receives write into it
  Inbox& operator=(const Inbox&) = delete;

  /// The next payload, of `bytes` bytes or up to that many. Returns its number.
  size_t expect(uint8_t* to, size_t bytes, bool variable);
  /// True once payload `i` is there; lets later ones come as far as that can be.
  bool arrived(size_t i);
  /// Of a payload that is there.
  Span<const uint8_t> payload(size_t i) const { return {messages_[i].to, messages_[i].bytes}; }

 private:
  struct Message {
    uint8_t* to;
    size_t bytes;
    bool sized;           ///< its bytes are known
    uint64_t ticket = 0;  ///< of its size, then of itself
    uint64_t said = 0;    ///< its size in the peer's words
  };

  /// Posts receives up to the first payload whose size is not known.
  void post();
  void check(const Message& message) const;

  Exchange& ex_;
  int peer_;
  std::deque<Message> messages_;  // a receive writes to `said`, which must stay where it is
  size_t posted_ = 0;
};

/// What we send.
class Outbox {
 public:
  explicit Outbox(Exchange& ex) : ex_(ex) {}
  void send(int peer, const uint8_t* payload, size_t bytes, bool variable);

 private:
  Exchange& ex_;
  std::deque<uint64_t> sizes_;  // on their way
};

}  // namespace pycomm::coded
