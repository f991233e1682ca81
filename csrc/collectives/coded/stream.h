// Payload streams between two ranks of a coded operation. A payload of variable size follows a
// message of 8 bytes with its size.
#pragma once
#include <deque>

#include "collectives/algorithms/context.h"

namespace pycomm::coded {

/// Payloads that one peer sends us, in order.
class Inbox {
 public:
  Inbox(CollectiveContext& context, int peer) : ex_(context), peer_(peer) {}
  Inbox(const Inbox&) = delete;  // receives write into it
  Inbox& operator=(const Inbox&) = delete;

  /// Expects the next payload, of `bytes` bytes or up to that many. Returns its number.
  size_t expect(uint8_t* to, size_t bytes, bool variable);
  /// True once payload `i` has arrived; lets later ones arrive as far as possible.
  bool arrived(size_t i);
  /// Returns a payload that has arrived.
  Span<const uint8_t> payload(size_t i) const { return {messages_[i].to, messages_[i].bytes}; }

 private:
  struct Message {
    uint8_t* to;
    size_t bytes;
    bool sized;           ///< its bytes are known
    uint64_t ticket = 0;  ///< of its size, then of the payload
    uint64_t said = 0;    ///< its size as the peer states it
  };

  /// Posts receives up to the first payload whose size is not known.
  void post();
  void check(const Message& message) const;

  CollectiveContext& ex_;
  int peer_;
  std::deque<Message> messages_;  // a receive writes to `said`, which must stay where it is
  size_t posted_ = 0;
};

/// Payloads that we send.
class Outbox {
 public:
  explicit Outbox(CollectiveContext& context) : ex_(context) {}
  void send(int peer, const uint8_t* payload, size_t bytes, bool variable);

 private:
  CollectiveContext& ex_;
  std::deque<uint64_t> sizes_;  // on their way
};

}  // namespace pycomm::coded
