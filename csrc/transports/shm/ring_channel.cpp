#include "transports/shm/ring_channel.h"

#include <algorithm>
#include <cstring>

namespace pycomm {
namespace {

constexpr size_t kFrameAlign = 16;
/// Each piece is published at once, so that the peer copies out while we copy in.
constexpr size_t kPiece = kRingBytes / 8;
static_assert(kPiece % kFrameAlign == 0 && sizeof(Frame) % kFrameAlign == 0);

size_t padding(size_t bytes) { return (kFrameAlign - bytes % kFrameAlign) % kFrameAlign; }

void write_ring(Ring& ring, uint64_t at, const void* from, size_t bytes) {
  if (bytes == 0) return;  // an empty message may have no address, which memcpy does not take
  const size_t start = at % kRingBytes;
  const size_t first = std::min(bytes, kRingBytes - start);
  std::memcpy(ring.data + start, from, first);
  std::memcpy(ring.data, static_cast<const uint8_t*>(from) + first, bytes - first);
}

void read_ring(const Ring& ring, uint64_t at, void* to, size_t bytes) {
  if (bytes == 0) return;
  const size_t start = at % kRingBytes;
  const size_t first = std::min(bytes, kRingBytes - start);
  std::memcpy(to, ring.data + start, first);
  std::memcpy(static_cast<uint8_t*>(to) + first, ring.data, bytes - first);
}

}  // namespace

RingChannel::RingChannel(const SharedRegion& region, FailureDetector& detector, int self, int peer,
                         Lane lane, Traffic& traffic)
    : detector_(detector),
      self_(self),
      peer_(peer),
      out_(&region.ring(self, peer, lane)),
      in_(&region.ring(peer, self, lane)),
      peer_bell_(&region.rank_slot(peer).moved[static_cast<size_t>(lane)]),
      traffic_(traffic) {}

uint64_t RingChannel::send(const OpTag& tag, Span<const uint8_t> data) {
  Outgoing message;
  message.frame = {data.size, tag.hash(), 0, tag};
  message.data = data;
  sends_.push_back(message);
  push();
  return ++posted_sends_;
}

uint64_t RingChannel::recv(const OpTag& tag, Span<uint8_t> data) {
  Incoming message;
  message.tag = tag;
  message.data = data;
  recvs_.push_back(message);
  return ++posted_recvs_;
}

bool RingChannel::progress() {
  const bool pushed = push();
  const bool pulled = pull();
  if (pushed || pulled) return true;
  if (sends_.empty() && recvs_.empty()) return false;
  if (detector_.aborted()) detector_.check_now();
  if (!detector_.left(peer_)) return false;
  // The peer's bytes from before it left still count.
  if (pull()) return true;
  detector_.throw_left(peer_);
}

bool RingChannel::ready() const {
  if (sends_.empty() && recvs_.empty()) return false;
  if (!sends_.empty() && free_bytes() >= sizeof(Frame)) return true;
  if (!recvs_.empty() && filled_bytes() > 0) return true;
  return detector_.left(peer_) || detector_.aborted();
}

bool RingChannel::push() {
  bool moved = false;
  while (!sends_.empty()) {
    Outgoing& message = sends_.front();
    if (free_bytes() < (message.framed ? 1 : sizeof(Frame))) break;
    if (!message.framed) {
      write_ring(*out_, head_, &message.frame, sizeof(Frame));
      head_ += sizeof(Frame);
      message.framed = true;
    }
    const size_t left = message.data.size - message.done;
    const size_t bytes = std::min({left, free_bytes(), kPiece});
    // Head and tail are multiples of kFrameAlign whenever they are published, so the padding that
    // goes with the last byte has room.
    write_ring(*out_, head_, message.data.data + message.done, bytes);
    message.done += bytes;
    head_ += bytes;
    const bool whole = message.done == message.data.size;
    if (whole) head_ += padding(message.data.size);
    out_->head.store(head_, std::memory_order_release);
    peer_bell_->ring();
    moved = true;
    if (whole) {
      traffic_.sent_bytes.fetch_add(sizeof(Frame) + message.data.size, std::memory_order_relaxed);
      sends_.pop_front();
      sent_ += 1;
    }
  }
  traffic_.moved = traffic_.moved || moved;
  return moved;
}

bool RingChannel::pull() {
  bool moved = false;
  while (!recvs_.empty() && filled_bytes() > 0) {
    Incoming& message = recvs_.front();
    if (!message.framed) {
      Frame frame;
      read_ring(*in_, tail_, &frame, sizeof frame);
      check_frame(frame, message);
      tail_ += sizeof frame;
      message.framed = true;
    }
    const size_t bytes = std::min({message.data.size - message.done, filled_bytes(), kPiece});
    read_ring(*in_, tail_, message.data.data + message.done, bytes);
    message.done += bytes;
    tail_ += bytes;
    const bool whole = message.done == message.data.size;
    if (whole) tail_ += padding(message.data.size);
    in_->tail.store(tail_, std::memory_order_release);
    peer_bell_->ring();
    moved = true;
    if (whole) {
      recvs_.pop_front();
      received_ += 1;
    }
  }
  traffic_.moved = traffic_.moved || moved;
  return moved;
}

void RingChannel::check_frame(const Frame& frame, const Incoming& wanted) const {
  const bool same_tag = frame.hash == wanted.tag.hash();
  if (same_tag && frame.bytes == wanted.data.size) return;
  throw mismatch({detector_.member(self_), wanted.data.size, wanted.tag},
                 {detector_.member(peer_), frame.bytes, frame.tag});
}

}  // namespace pycomm
