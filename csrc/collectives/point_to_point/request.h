// Request: a posted send or receive, and how it travels.
#pragma once
#include "collectives/point_to_point/point_to_point.h"

namespace pycomm {

inline Span<uint8_t> bytes_of(void* data, size_t bytes) {
  return {static_cast<uint8_t*>(data), bytes};
}

class PointToPoint::Request final : public Transfer {
 public:
  Request(std::shared_ptr<PointToPoint> owner, bool is_send, void* data, size_t bytes, int peer,
          int tag, Milliseconds limit)
      : owner(std::move(owner)),
        is_send(is_send),
        data(data),
        bytes(bytes),
        tag(tag),
        peer(peer),
        limit(limit),
        recording(this->owner->trace_.start(describing_tag())) {}

  bool done() override {
    check_process();
    std::lock_guard<std::mutex> lock(owner->mutex_);
    return finished;
  }
  void wait(Milliseconds asked) override {
    check_process();
    owner->wait(*this, asked.count() > 0 ? asked : limit);
  }
  int source() const override {
    check_process();
    std::lock_guard<std::mutex> lock(owner->mutex_);
    return from;
  }
  void keep(std::shared_ptr<void> thing) override {
    std::lock_guard<std::mutex> lock(owner->mutex_);
    if (!finished && !owner->closed_) kept.swap(thing);
  }

  /// A forked child must not move what is under way in its parent, nor take its locks.
  void check_process() const {
    if (!owner->fork_.in_child()) return;
    owner->fork_.refuse("rank " + std::to_string(owner->rank_), is_send ? "send" : "recv");
  }
  bool matches(int source, int64_t tag) const {
    return (peer < 0 || peer == source) && this->tag == tag;
  }
  OpTag describing_tag() const { return peer_tag(is_send ? Op::send : Op::recv, bytes, peer, tag); }
  std::string describe() const {
    return "rank " + std::to_string(owner->rank_) + ": " + pycomm::describe(describing_tag());
  }
  void expect(uint64_t theirs, int source) const {
    if (theirs == bytes) return;
    throw WireMismatch(describe() + " does not match a " + (is_send ? "recv" : "send") + " of " +
                       std::to_string(theirs) + " bytes " + (is_send ? "on" : "from") + " rank " +
                       std::to_string(source) + "; both ends must name the same size");
  }

  const std::shared_ptr<PointToPoint> owner;
  const bool is_send;
  void* const data;
  const uint64_t bytes;
  const int64_t tag;
  const int peer;  // -1: any
  const Milliseconds limit;
  const uint64_t recording;  // number in the trace
  Header header;             // of a send, while it is under way
  bool ready = false;        // of a receive: its peer knows the place
  uint64_t ticket = 0;
  bool finished = false;
  int from = -1;
  std::exception_ptr error;
  std::shared_ptr<void> kept;  // until it is done
};

// Takes the lock, and releases it before what is to be released is destroyed.
class PointToPoint::UnlockingGuard {
 public:
  explicit UnlockingGuard(PointToPoint& self) : self_(self), lock_(self.mutex_) {}
  ~UnlockingGuard() { self_.release_unneeded(lock_); }
  UnlockingGuard(const UnlockingGuard&) = delete;
  Lock& lock() { return lock_; }

 private:
  PointToPoint& self_;
  Lock lock_;
};

}  // namespace pycomm
