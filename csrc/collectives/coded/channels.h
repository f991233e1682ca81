// Channels: the exchange of a coded operation over the channels of a mesh. Payloads of all shots
// are in transit at once: a rank sends another, in this order, its contributions to what the other
// owns, what it shows, and the results that it owns. A payload of variable size follows a message
// of 8 bytes with its size.
#pragma once
#include <array>
#include <deque>

#include "collectives/algorithms/context.h"
#include "collectives/coded/exchange.h"

namespace pycomm::coded {

/// Payloads that one peer sends us, in order.
class Inbox {
 public:
  Inbox(CollectiveContext& context, int peer) : context_(context), peer_(peer) {}
  Inbox(const Inbox&) = delete;  // receives write into it
  Inbox& operator=(const Inbox&) = delete;

  /// Expects the next payload at `to`.
  void expect(uint8_t* to, const Segment& segment);
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

  CollectiveContext& context_;
  int peer_;
  std::deque<Message> messages_;  // a receive writes to `said`, which must stay where it is
  size_t posted_ = 0;
};

class Channels final : public Exchange {
 public:
  Channels(CollectiveContext& context, const Plan& plan);

  int member(int rank) const override { return context_.member(rank); }
  uint8_t* room(Shot shot, int owner, size_t s) override;
  void put(Shot shot, int owner, size_t s, size_t bytes) override;
  void flush(Shot) override {}
  bool has(Shot shot, int rank, size_t s) override {
    return rank == this->rank() ? s < own_[static_cast<size_t>(shot)].size()
                                : inboxes_[rank].arrived(number(shot, s));
  }
  Span<const uint8_t> get(Shot shot, int rank, size_t s) override;
  void wait(const std::function<bool()>& done) override { context_.wait_until(done); }

 private:
  const Segment& segment(Shot shot, int owner, size_t s) const {
    return shot == Shot::shown ? plan_.shown.at(0, s) : plan_.owned.at(owner, s);
  }
  /// Place of a payload that comes from a rank, ours included.
  uint8_t* place(Shot shot, int rank, size_t s) const;
  size_t number(Shot shot, size_t s) const { return before_[static_cast<size_t>(shot)] + s; }
  void send(int peer, const uint8_t* payload, const Segment& segment, size_t bytes);

  CollectiveContext& context_;
  const Plan& plan_;
  std::array<size_t, 3> before_{};          ///< payloads in an inbox before those of a shot
  std::deque<Inbox> inboxes_;               ///< per rank
  std::deque<uint64_t> sizes_;              ///< of payloads that we send, on their way
  std::array<std::vector<size_t>, 3> own_;  ///< bytes of what we have put for us, too
  // There is one place for every payload to and from owners: first for our contributions, then for
  // the results, which cannot arrive before the owner has had the contribution. There is another
  // one for what each rank sends us to own, and for what it shows.
  uint8_t* payloads_;
  uint8_t* incoming_;
  uint8_t* shown_;
};

}  // namespace pycomm::coded
