// Connector: makes and accepts connections, namely the control connections when the group starts,
// those of a lane when one of its two ranks first sends, and any of them again when it is cut.
//
// Of two ranks the higher connects to the lower; a lower rank that wants a connection asks for it
// over the control connection, or, if that one is cut, by a connection of its own that carries
// nothing else (kCallBack). After the set-up a thread does this, since a rank must be reachable
// whatever its callers do. The thread sleeps while there is nothing to connect.
//
// An attempt to connect shows whether a peer is dead or only cut off: the kernel of a dead process
// refuses, that of a living one does not. On our own host we then see that the process is gone;
// elsewhere a peer counts as dead when it has refused for a while, since firewalls and proxies may
// refuse in its name. A silent network leaves the question open; then the deadlines of operations
// decide.
#pragma once
#include <sys/types.h>

#include <array>
#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "transports/tcp/connect/handshake.h"
#include "transports/tcp/connect/peers.h"
#include "transports/tcp/tls/session.h"
#include "transports/transport.h"

namespace pycomm::tcp {

class Control;

/// A connection of a lane: the `generation`th after the first of this socket.
struct Connection {
  int socket = 0;
  uint32_t generation = 0;
  SecureSocket sock;
};

/// A peer whose answer takes this long is far away: round trips count more than sockets.
constexpr auto kFarAway = std::chrono::milliseconds(1);

class Connector {
 public:
  Connector(const Rendezvous& rendezvous, PeerDirectory directory);
  ~Connector();

  /// Makes the control connections with all peers. Throws Timeout with the missing ranks, PeerLost
  /// if one died meanwhile, and whatever interrupt_check throws. Who refuses us is asked again
  /// until the deadline, since it has proven nothing.
  ///
  /// Strangers may connect at any time: each waiting connection has its own small state and
  /// deadline, so none delays another.
  void connect_all(Control& control, const std::function<void()>& interrupt_check);
  /// Starts the thread. It calls `on_ready(lane)` when sockets of a lane are connected, and
  /// `on_tick` after each round of work, and soon again if that returns true.
  void start(std::function<void(int lane)> on_ready, std::function<bool()> on_tick);
  /// Ends the thread and closes the listeners. In a forked child, which has no such thread, it
  /// joins nothing.
  void stop();
  /// True in a child that was forked from the rank.
  bool forked() const;
  const PeerDirectory& directory() const { return directory_; }

  // These may be called by any thread:

  /// Lets the thread look at everything once. Any thread.
  void wake();
  /// Requests this connection. Returns at once; take() returns it later, unless the peer is dead.
  void request(const WantedConnection& wanted);
  /// True once the sockets of the lane are connected.
  bool ready(int rank, int lane) const;
  /// Returns the number of sockets of a lane that is ready.
  int sockets(int rank, int lane) const;
  /// Returns the least and the most sockets of the lanes that are connected, or would be, of all
  /// peers.
  std::pair<int, int> sockets() const;
  /// Returns the congestion control of the last control connection: "bbr" and the like.
  std::string congestion_control() const;
  /// True if there are connections to take.
  bool fresh(int rank, int lane) const;
  /// Returns new connections, each once: at first all of the lane, then those that replace cut
  /// ones.
  std::vector<Connection> take(int rank, int lane);
  /// True if connection_error() has an error for some peer.
  bool has_errors() const { return has_errors_.load(std::memory_order_acquire); }
  /// Returns why there will be no sockets to this peer, which is `gone` or not; empty if there may
  /// be. Throws Error if this rank cannot connect at all.
  std::string connection_error(int rank, int lane, bool gone);

 private:
  using Clock = Deadline::Clock;
  struct SocketState {  // of a connection that may be made again
    bool established = false;
    bool broken = false;  // a new one is on its way
    uint32_t generation = 0;
    Clock::time_point since{};
    Milliseconds pause{0};  // before the next attempt; grows while connections do not last
  };
  struct LaneState {                         // the connections of one lane
    std::vector<SocketState> socket_states;  // none until their number is known
    std::vector<Connection> fresh;
    int missing = 0;      // first connections
    bool wanted = false;  // we connect, or have asked the peer to
    bool complete() const { return !socket_states.empty() && missing == 0; }
    std::atomic<bool> ready{false}, has_fresh{false};
  };
  struct Link {
    Peer peer;
    SecureSocket control;
    SocketState control_state;
    Milliseconds round_trip{0};  // measured when the control connection was made
    std::array<LaneState, kLanes> lane_states;
    std::string connection_error;
  };
  /// A connection that we make, with repeated attempts until it is accepted.
  struct Outgoing {
    Link* link;
    Hello hello;
    Fd fd;
    std::optional<Greeting> greeting;       // none while the connection is being made
    Clock::time_point wake = Clock::now();  // time of the next attempt, or of the end of this one
    Milliseconds pause{20};                 // before the next attempt
    Clock::time_point refused_since{};  // when attempts began to be refused; zero: the last was not
    Clock::time_point starved_since{};  // when descriptors ran out; zero: there was one
    size_t attempt = 0;                 // picks the pair of our and the peer's interface
    bool returns = false;  // to the socket's own path: it replaces a connection by another one
    bool ready = false;
    bool over = false;
  };
  /// An accepted connection that has not authenticated yet.
  struct PendingConnection {
    Fd fd;
    Greeting greeting;
    Clock::time_point wake;  // when to give it up
    bool ready = false;
  };

  Link& link(int rank) const { return *by_rank_[static_cast<size_t>(rank)]; }
  SocketState& state_of(const WantedConnection& wanted) const;
  void run();
  void report_abort();
  bool wait();
  void turn();
  void process_requests();
  void open(const WantedConnection& wanted);
  void reopen(const WantedConnection& broken);
  void ask_again(Link& link);
  Hello hello_to(const Link& link, uint16_t lane) const;
  uint16_t sockets_of(const Link& link, uint16_t lane) const;
  void connect(Link& link, uint16_t lane, Milliseconds round_trip);
  static void set_sockets(LaneState& lane_state, int count);
  void connect(Link& link, const Hello& hello, Clock::time_point when);
  void return_later(Link& link, const Hello& hello);
  void accept_all(const Fd& listener);
  void serve(PendingConnection& pending);
  void serve(Outgoing& out);
  void connect_early(Link& link, Milliseconds round_trip);
  void retry(Outgoing& out, int error);
  void starve(Clock::time_point& since, int error, bool may_wait) const;
  bool expects() const;
  void give_up(Outgoing& out, const std::string& how);
  bool is_outdated(const Outgoing& out) const;
  std::chrono::milliseconds connect_limit() const;
  void join(Link& link, const Hello& hello, SecureSocket sock);
  void note_refusal(const PendingConnection& pending, bool refused);
  std::string name_of(const Link& link) const;
  [[noreturn]] void throw_incomplete() const;

  const std::string group_;
  const int rank_, size_;
  const Deadline deadline_;  // of the set-up
  const Milliseconds poll_interval_;
  const Milliseconds store_round_trip_;  ///< if it is far, most peers are as well
  const PeerDirectory directory_;
  const std::string label_;  ///< of the group and its session, in handshakes
  const pid_t process_;
  const Fd wake_;
  Control* control_ = nullptr;
  std::function<void(int)> on_ready_;
  std::function<bool()> on_tick_;
  bool tick_again_ = false;

  std::vector<std::unique_ptr<Link>> links_;  // in the order of directory_.peers
  std::vector<Link*> by_rank_;
  mutable std::mutex mutex_;  // guards what the links hold, and all below
  std::list<Outgoing> outgoing_;
  std::list<PendingConnection> pending_connections_;
  Clock::time_point accept_backoff_until_{};  // no descriptor was left for another connection
  Clock::time_point starved_since_{};  // when descriptors for peers ran out; zero: there was one
  std::exception_ptr broken_;
  std::string congestion_control_;
  std::string last_error_, last_refused_;
  int refused_ = 0;

  std::mutex requests_mutex_;
  std::vector<WantedConnection> requests_;
  std::atomic<bool> has_errors_{false}, stop_{false};
  std::unique_ptr<std::thread> thread_;
};

}  // namespace pycomm::tcp
