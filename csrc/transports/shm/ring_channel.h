// Ring channel: a Channel over two rings of a shared region, one each way. Messages are copied in
// and copied out; long ones stream through.
//
// Ring bytes: a Frame, then the payload, then zeros to the next multiple of kFrameAlign; and so on.
#pragma once
#include <deque>

#include "transports/shm/failure_detector.h"

namespace pycomm {

struct Frame {
  uint64_t bytes;
  uint32_t hash;  ///< of the tag
  uint32_t reserved;
  OpTag tag;
};

/// The joint progress of the channels of one lane.
struct Traffic {
  bool moved = false;  ///< bytes have moved since this was last cleared
  std::atomic<uint64_t> sent_bytes{0};
};

class RingChannel final : public Channel {
 public:
  RingChannel(const SharedRegion& region, FailureDetector& detector, int self, int peer, Lane lane,
              Traffic& traffic);

  uint64_t send(const OpTag& tag, Span<const uint8_t> data) override;
  uint64_t recv(const OpTag& tag, Span<uint8_t> data) override;
  uint64_t sent() const override { return sent_; }
  uint64_t received() const override { return received_; }
  bool progress() override;

  /// True if progress() would move something or throw.
  bool ready() const;

 private:
  struct Outgoing {
    Frame frame;
    Span<const uint8_t> data;
    size_t done = 0;
    bool framed = false;
  };
  struct Incoming {
    OpTag tag;
    Span<uint8_t> data;
    size_t done = 0;
    bool framed = false;
  };

  bool push();
  bool pull();
  void check_frame(const Frame& frame, const Incoming& wanted) const;
  size_t free_bytes() const {
    return kRingBytes - (head_ - out_->tail.load(std::memory_order_acquire));
  }
  size_t filled_bytes() const { return in_->head.load(std::memory_order_acquire) - tail_; }

  FailureDetector& detector_;
  int self_;
  int peer_;
  Ring* out_;
  Ring* in_;
  Doorbell* peer_bell_;
  Traffic& traffic_;
  uint64_t head_ = 0;  ///< the value of out_->head; we are its only writer
  uint64_t tail_ = 0;  ///< the value of in_->tail
  std::deque<Outgoing> sends_;
  std::deque<Incoming> recvs_;
  uint64_t posted_sends_ = 0;
  uint64_t posted_recvs_ = 0;
  uint64_t sent_ = 0;
  uint64_t received_ = 0;
};

}  // namespace pycomm
