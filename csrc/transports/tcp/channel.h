// Channel to one peer on one lane: two queues of messages, spread over several sockets, which are
// connected when one of the two ranks first sends, and again when a connection is cut while the
// peer lives.
#pragma once
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <vector>

#include "transports/tcp/connect/connector.h"
#include "transports/tcp/net/socket.h"
#include "transports/tcp/poller.h"
#include "transports/tcp/stream.h"
#include "transports/transport.h"

namespace pycomm::tcp {

/// A TCP channel. Each member except on_tick() and ended() takes the poller's mutex.
class TcpChannel final : public Channel {
 public:
  TcpChannel(int peer, Connector& connector, Poller& poller, bool checks_payload);
  ~TcpChannel() override;

  uint64_t send(const OpTag& tag, Span<const uint8_t> data) override;
  uint64_t recv(const OpTag& tag, Span<uint8_t> data) override;
  uint64_t sent() const override { return sent_.load(std::memory_order_acquire); }
  uint64_t received() const override { return received_.load(std::memory_order_acquire); }
  bool progress() override;
  LinkUse use() const override;

  /// Announces on all sockets that nothing more will come. The kernel still delivers what was sent.
  void finish();
  /// Returns the number of bytes that the peer's host has not acknowledged.
  size_t unacknowledged();
  /// True while the peer may need bytes that were lost with a cut connection, or may yet be,
  /// because its host has not acknowledged them. Call reconnect() until it is false.
  bool interrupted();
  /// Notices cuts, reconnects and repeats lost bytes, without completing any operation.
  void reconnect();
  /// True if the peer's host has told the end of all that the peer has sent, or no connection is
  /// left. The caller has the mutex.
  bool ended();
  /// Calls reconnect() if there are new connections or bytes to repeat, since on a lane that nobody
  /// drives the peer may wait for either. Returns true if it should be called again soon. The
  /// caller has the mutex. Leaves callers' memory alone.
  bool on_tick();

 private:
  struct Outgoing {
    OpTag tag;
    uint32_t tag_hash;
    Span<const uint8_t> data;
    size_t cut = 0;     ///< bytes that have a frame
    size_t frames = 0;  ///< those in use, and those whose checksum is not written yet
    bool done = false;
  };
  struct Incoming {
    OpTag tag;
    uint32_t tag_hash;
    Span<uint8_t> data;
    size_t begun = 0;  ///< bytes of frames whose header has come
    size_t read = 0;   ///< of those, bytes that have come whole and unchanged
    bool done = false;
  };
  struct Socket;

  bool connected();
  void resume(bool pushes);
  void adopt_connections();
  bool advance();
  void look_at_paths();
  bool release_buffers();
  bool stalled();
  void cut(Socket& socket, const std::string& how);
  bool greet(Socket& socket);
  void check_for_loss() const;

  bool push(Socket& socket);
  bool take_frame(Socket& socket);
  const uint8_t* cut_frame(Socket& socket, FrameHeader& header);
  bool write(Socket& socket);
  bool acknowledge(Socket& socket, uint64_t received);
  void keep(Socket& socket);
  void proof_written(Socket& socket);
  void released(uint64_t number);

  bool pull(Socket& socket);
  bool pull_header(Socket& socket);
  bool has_header(Socket& socket);
  bool pull_payload(Socket& socket);
  bool has_receive(uint64_t message) const { return message - received_ <= incoming_.size(); }
  void accept_frame(const FrameHeader& header, Incoming& message) const;
  void check_payload(const FrameHeader& header, uint32_t crc, uint32_t expected) const;
  void frame_read(const FrameHeader& header);
  size_t read(Socket& socket, Span<uint8_t> payload);

  [[noreturn]] void throw_damaged(const std::string& how) const;
  [[noreturn]] void throw_lost(const std::string& how) const;

  const int peer_;
  Connector& connector_;
  Poller& poller_;
  const bool checks_payload_;
  bool opening_ = false;  // the sockets have been requested
  std::vector<std::unique_ptr<Socket>> sockets_;
  // The queues hold messages sent_ + 1, sent_ + 2, ... and received_ + 1, ... . A message leaves
  // when it and all before it are done.
  std::deque<Outgoing> outgoing_;
  std::deque<Incoming> incoming_;
  std::atomic<uint64_t> sent_{0}, received_{0};
  size_t cutting_ = 0;  // first of outgoing_ that has bytes without a frame
  uint64_t polls_seen_ = 0;
  int cuts_ = 0;  // sockets without a connection
  std::chrono::steady_clock::time_point
      stalled_since_;                                 // when progress stopped; zero if it has not
  bool tick_again_ = false;                           // on_tick() has work left
  std::chrono::steady_clock::time_point paths_seen_;  // when look_at_paths() last looked
};

}  // namespace pycomm::tcp
