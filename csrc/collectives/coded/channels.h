// Channels: the exchange of a coded operation over the channels of a mesh. Payloads of all shots
// are in transit at once: a rank sends another, in this order, its contributions to what the other
// owns, what it shows, and the results that it owns. A payload of variable size follows a message
// of 8 bytes with its size.
#pragma once
#include <array>
#include <list>

#include "collectives/algorithms/context.h"
#include "collectives/coded/exchange.h"

namespace pycomm::coded {

class Channels : public Exchange {
 public:
  Channels(CollectiveContext& context, const Plan& plan);

  int member(int rank) const override { return context_.member(rank); }
  uint8_t* room(Shot shot, int owner, size_t s) override;
  void put(Shot shot, int owner, size_t s, size_t bytes) override;
  void flush(Shot) override {}
  bool has(Shot shot, int rank, size_t s) override;
  Span<const uint8_t> get(Shot shot, int rank, size_t s) override;
  void wait(const std::function<bool()>& done) override { context_.wait_until(done); }

 private:
  /// A payload that comes from a peer, or that we put for us, too.
  struct Payload {
    uint8_t* place;
    size_t bytes;         ///< the most, until they are known
    bool sized;           ///< they are known
    uint64_t ticket = 0;  ///< of its size, then of the payload; of ours: 1 once it is put
    uint64_t said = 0;    ///< its size as the peer states it
  };
  /// The payloads of a rank: contributions to what we own, what it shows, its results.
  struct Inbox {
    size_t first, posted, end;
  };

  Payload& payload(Shot shot, int rank, size_t s) {
    return payloads_[inboxes_[rank].first + before_[static_cast<size_t>(shot)] + s];
  }
  const Segment& segment(Shot shot, int owner, size_t s) const {
    return shot == Shot::shown ? plan_.shown.at(0, s) : plan_.owned.at(owner, s);
  }
  /// Place of a payload that comes from a rank, ours included.
  uint8_t* place(Shot shot, int rank, size_t s) const;
  /// Posts receives from a peer, up to the first payload whose size is not known.
  void post(int peer);
  void check(int peer, const Payload& payload) const;
  void send(int peer, const uint8_t* payload, const Segment& segment, size_t bytes);

  CollectiveContext& context_;
  const Plan& plan_;
  std::array<size_t, 3> before_{};  ///< payloads in an inbox before those of a shot
  std::vector<Payload> payloads_;   ///< of all ranks; receives write into them, so they never move
  std::vector<Inbox> inboxes_;      ///< per rank
  std::list<uint64_t> sizes_;       ///< of payloads that we send, on their way
  // There is one place for every payload to and from owners: first for our contributions, then for
  // the results, which cannot arrive before the owner has had the contribution. There is another
  // one for what each rank sends us to own, and for what it shows.
  uint8_t* sent_;
  uint8_t* incoming_;
  uint8_t* shown_;
};

}  // namespace pycomm::coded
