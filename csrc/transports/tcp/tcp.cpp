// TCP transport: its set-up, lanes and channels, and its close.
#include <algorithm>
#include <memory>
#include <mutex>
#include <thread>

#include "transports/openssl.h"
#include "transports/tcp/channel.h"
#include "transports/tcp/connect/connector.h"
#include "transports/tcp/connect/control.h"
#include "transports/tcp/net/pacer.h"
#include "transports/tcp/net/tuning.h"
#include "transports/tcp/poller.h"
#include "transports/tcp/transport.h"

namespace pycomm {
namespace tcp {
namespace {

// The time that a leaving rank waits for its last bytes to be acknowledged.
constexpr auto kLinger = Milliseconds(2000);
// The time that it waits for an answer to its close: a peer that takes longer is not running.
constexpr auto kCloseTimeout = Milliseconds(500);
// Each of the two is longer by this many round trips.
constexpr int kRoundTrips = 4;

bool all_loopback(const std::vector<Interface>& interfaces) {
  return std::all_of(interfaces.begin(), interfaces.end(),
                     [](const Interface& interface) { return interface.address.is_loopback(); });
}

class TcpTransport final : public Transport {
 public:
  TcpTransport(const Rendezvous& rendezvous, const std::vector<int>& peers, PeerDirectory directory,
               const SharedRankState* rank_state)
      : peers_(peers),
        pacer_(parse_link_rate(directory.options.link).paced),
        control_(rank_state),
        connector_(rendezvous, std::move(directory)),
        checks_payload_(!connector_.directory().encrypts &&
                        !all_loopback(connector_.directory().own.interfaces)),
        channels_(static_cast<size_t>(rendezvous.size)) {
    connector_.connect_all(control_, rendezvous.interrupt_check);
    control_.on_wanted([this](const WantedConnection& wanted) { connector_.request(wanted); });
    control_.on_close([this] { connector_.wake(); });
    for (uint16_t lane = 0; lane < kLanes; lane++) {
      pollers_[lane] = std::make_unique<Poller>(lane, rendezvous.rank, control_, pacer_,
                                                !connector_.directory().crowded);
    }
    connector_.start([this](int lane) { pollers_[static_cast<size_t>(lane)]->ring(); },
                     [this] { return on_tick(); });
  }

  ~TcpTransport() override {
    if (!connector_.forked()) {
      if (control_.aborted()) {
        flush_abort();
      } else {
        leave();
      }
    }
    connector_.stop();  // its thread looks at the channels
  }

  std::string_view name() const override { return "tcp"; }

  bool reaches(int rank) const override {
    return std::find(peers_.begin(), peers_.end(), rank) != peers_.end();
  }

  Channel& channel(int rank, Lane lane) override {
    auto& slot = channels_[static_cast<size_t>(rank)][static_cast<size_t>(lane)];
    if (!slot) {
      std::lock_guard<std::mutex> lock(pollers_[static_cast<size_t>(lane)]->mutex());
      slot = std::make_unique<TcpChannel>(rank, connector_, *pollers_[static_cast<size_t>(lane)],
                                          checks_payload_);
    }
    return *slot;
  }

  void idle(Lane lane, std::chrono::microseconds limit) override {
    pollers_[static_cast<size_t>(lane)]->idle(limit);
  }

  void check() override { control_.check(); }

  Milliseconds round_trip() const override { return control_.round_trip(); }
  std::chrono::microseconds round_trip(int rank) const override {
    return control_.round_trip(rank);
  }
  void ask() override { control_.ask(); }
  PeerStatus look(int rank) override { return control_.look(rank); }

  void abort(const Notice& notice) noexcept override { control_.abort(notice); }

  uint64_t sent_bytes() const override {
    uint64_t bytes = control_.sent_bytes();
    for (const auto& poller : pollers_) bytes += poller->sent_bytes();
    return bytes;
  }

  std::string describe() const override {
    std::string text = "tcp to ";
    for (const int peer : peers_) text += (peer == peers_[0] ? "" : ",") + std::to_string(peer);
    text += " by ";
    const PeerDirectory& directory = connector_.directory();
    for (const Interface& interface : directory.own.interfaces) {
      text += interface.name + " (" + interface.address.ip() + "), ";
    }
    const auto [least, most] = connector_.sockets();
    return text + std::to_string(least) + (least == most ? "" : " to " + std::to_string(most)) +
           (most == 1 ? " socket each, " : " sockets each, ") + connector_.congestion_control() +
           (directory.encrypts ? ", TLS 1.3" : "");
  }

 private:
  template <typename Use>
  void for_each_channel(const Use& use) {
    for (auto& lanes : channels_) {
      for (auto& channel : lanes) {
        if (channel) use(*channel);
      }
    }
  }

  // Called by the connector's thread, so that lanes that no thread drives resume on new
  // connections. It does not wait for the thread that drives a lane, which may be waiting for this
  // one.
  bool on_tick() {
    for (size_t lane = 0; lane < kLanes; lane++) {
      const std::unique_lock<std::mutex> lock(pollers_[lane]->mutex(), std::try_to_lock);
      if (!lock) {
        for (const int peer : peers_) {
          tick_again_[lane] |= connector_.fresh(peer, static_cast<int>(lane));
        }
        continue;
      }
      tick_again_[lane] = false;
      for (const int peer : peers_) {
        const auto& channel = channels_[static_cast<size_t>(peer)][lane];
        if (channel) tick_again_[lane] |= channel->on_tick();
      }
    }
    const bool closing = answer_closes();
    return closing || std::count(tick_again_.begin(), tick_again_.end(), true) > 0;
  }

  // Acknowledges the closes of peers whose bytes have come to their end: what stands between may
  // have taken them, and a peer that has the answer is gone. Returns true while others are coming.
  bool answer_closes() {
    bool coming = false;
    for (const int peer : peers_) {
      if (!control_.owes_answer(peer)) continue;
      bool ended = true;
      for (size_t lane = 0; lane < kLanes; lane++) {
        const std::unique_lock<std::mutex> lock(pollers_[lane]->mutex(), std::try_to_lock);
        const auto& channel = channels_[static_cast<size_t>(peer)][lane];
        ended = ended && lock && (!channel || channel->ended());
      }
      if (ended) control_.answer_close(peer);
      coming |= !ended;
    }
    return coming;
  }

  // Sends the abort to the peers whose connections have not been able to take it yet.
  void flush_abort() noexcept {
    for (const auto close_acknowledged =
             Deadline::after(kCloseTimeout + kRoundTrips * control_.round_trip());
         control_.unsent() && !close_acknowledged.expired();) {
      control_.poll();
      std::this_thread::sleep_for(Milliseconds(1));
    }
  }

  // Reconnects cut connections and repeats their bytes, which may be all that a peer waits for.
  // Returns true while some are not repeated yet.
  bool mend() noexcept {
    bool interrupted = control_.cut_off();
    try {
      for_each_channel([&](TcpChannel& channel) {
        channel.reconnect();
        interrupted |= channel.interrupted();
      });
    } catch (const std::exception&) {  // the peer reports what cannot be resumed
      return false;
    }
    return interrupted;
  }

  // Our close follows our last bytes: a peer that has heard it makes no connection again, and
  // without a close we would seem to have died. A connection may be cut at any time until then.
  void leave() noexcept {
    const auto round_trips = kRoundTrips * control_.round_trip();
    const auto deadline = Deadline::after(kLinger + round_trips);
    auto answer = Deadline::after(kCloseTimeout + round_trips);
    for (;; std::this_thread::sleep_for(std::chrono::microseconds(100))) {
      control_.poll();
      if (mend() && !deadline.expired() && !control_.aborted()) continue;
      if (control_.send_close()) answer = Deadline::after(kCloseTimeout + round_trips);
      for_each_channel([](TcpChannel& channel) { channel.finish(); });
      // Closing a socket that has unread bytes resets it, and a reset may overtake our last bytes.
      if (!any_peer_waits(!answer.expired()) || (answer.expired() && deadline.expired())) return;
    }
  }

  // True if a peer still waits for our bytes. A peer that has left reads no more, whatever is in
  // flight.
  bool any_peer_waits(bool until_close_acknowledged) {
    return std::any_of(peers_.begin(), peers_.end(), [&](int peer) {
      const auto& lanes = channels_[static_cast<size_t>(peer)];
      return !control_.gone(peer) &&
             ((until_close_acknowledged && !control_.close_acknowledged(peer)) ||
              control_.unacknowledged(peer) > 0 ||
              std::any_of(lanes.begin(), lanes.end(), [](const auto& channel) {
                return channel && channel->unacknowledged() > 0;
              }));
    });
  }

  const std::vector<int> peers_;
  Pacer pacer_;
  Control control_;
  std::array<std::unique_ptr<Poller>, kLanes> pollers_;
  Connector connector_;  // its thread uses the members above
  const bool checks_payload_;
  std::vector<std::array<std::unique_ptr<TcpChannel>, kLanes>> channels_;  // by rank
  std::array<bool, kLanes> tick_again_{};  // used by the connector's thread
};

}  // namespace
}  // namespace tcp

TcpSetup::TcpSetup(const GroupOptions& options) : options_(options), exchange_(options) {}
TcpSetup::~TcpSetup() = default;

std::unique_ptr<Transport> TcpSetup::make(const Rendezvous& rendezvous,
                                          const std::vector<int>& ranks,
                                          const SharedRankState* rank_state) {
  if (options_.sockets < 0 || options_.sockets > tcp::kMostSockets) {
    throw Error("tcp: " + std::to_string(options_.sockets) +
                " sockets per peer are not possible; set PYCOMM_SOCKETS to 1 to 16");
  }
  tcp::check_congestion_control(options_.congestion);
  openssl::warn_of_weakness(options_);
  std::vector<int> peers;
  for (const int rank : ranks) {
    if (rank != rendezvous.rank) peers.push_back(rank);
  }
  return std::make_unique<tcp::TcpTransport>(rendezvous, peers, exchange_.run(rendezvous, peers),
                                             rank_state);
}

}  // namespace pycomm
