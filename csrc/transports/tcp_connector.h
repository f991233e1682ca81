// Makes connections and accepts them: those of control when the group starts, those of a lane when
// one of its two ranks first sends, and any of them again when it is cut.
//
// Of two ranks the higher connects to the lower; a lower rank that wants a connection asks for it
// over the control connection, or, if that is the one that is cut, by a connection of its own that
// says no more (kCallBack). After the set-up a thread does this, since a rank must be reachable
// whatever its callers do. It sleeps while nothing is to be connected.
//
// Whether a peer is dead or only cut off shows when we connect: the kernel of a dead process
// refuses at once, that of a living one does not. A silent network leaves it open; then the
// deadlines of operations decide.
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

#include "transports/tcp_handshake.h"
#include "transports/tcp_mesh.h"
#include "transports/tcp_wire.h"

namespace pycomm::tcp {

class Control;

/// A connection of a lane, the `generation`th after the first of this socket.
struct Connection {
  int socket = 0;
  uint32_t generation = 0;
  Wire wire;
};

class Connector {
 public:
  Connector(const Rendezvous& meeting, Mesh mesh);
  ~Connector();

  /// Makes the control connections with all peers. Throws Timeout with the ranks that did not come,
  /// PeerLost if one died meanwhile, Error if one refuses us, and what the meeting's look_out
  /// throws.
  ///
  /// Strangers may knock at any time: each waiting connection has its own small state and deadline,
  /// so none holds up another.
  void connect_all(Control& control, const std::function<void()>& look_out);
  /// Starts the thread. It calls `on_ready(lane)` when sockets of a lane stand, and `tend` whenever
  /// it has done something, and soon again if that returns true.
  void start(std::function<void(int lane)> on_ready, std::function<bool()> tend);
  /// Ends the thread and closes the listeners. Not in a forked child, where there is no thread.
  void stop();
  /// True in a child that was forked from the rank.
  bool forked() const;
  const Mesh& mesh() const { return mesh_; }
  /// "bbr" and the like, of the first connection.
  const std::string& congestion_control() const { return congestion_control_; }

  // Any thread:

  /// Sockets of the lane are needed. Returns at once.
  void open(int rank, int lane);
  /// This connection is cut. Returns at once; a new one comes by take(), unless the peer is dead.
  void reopen(const Broken& broken);
  /// True once the sockets of the lane stand.
  bool ready(int rank, int lane) const;
  /// True if there are connections to take.
  bool fresh(int rank, int lane) const;
  /// All of the lane at first, then those that are made again; each once.
  std::vector<Connection> take(int rank, int lane);
  /// There is an obstacle to somebody.
  bool troubled() const { return troubled_.load(std::memory_order_acquire); }
  /// Why there will be no sockets to this peer, which is `gone` or not; empty if there may be.
  /// Throws Error if this rank cannot connect at all.
  std::string obstacle(int rank, int lane, bool gone);

 private:
  using Clock = Deadline::Clock;
  struct Place {  // of a connection that may be made again
    bool stood = false;
    bool broken = false;  // and a new one is on its way
    uint32_t generation = 0;
    Clock::time_point since{};
    Milliseconds pause{0};  // before it is made again: grows while connections do not last
  };
  struct Way {  // the connections of one lane
    std::vector<Place> places;
    std::vector<Connection> fresh;
    int missing = 0;
    bool wanted = false;  // we connect, or have asked the peer to
    std::atomic<bool> ready{false}, has_fresh{false};
  };
  struct Link {
    Peer peer;
    Wire control;
    Place control_place;
    std::array<Way, kLanes> ways;
    std::string obstacle;
  };
  struct Outgoing;
  struct Stranger;

  Link& link(int rank) const { return *by_rank_[static_cast<size_t>(rank)]; }
  Place& place(const Broken& broken) const;
  void run();
  void wait();
  void turn();
  void grant_wishes();
  void mend();
  void mend(const Broken& broken);
  void ask_again(Link& link);
  Hello hello_to(const Link& link, uint16_t lane) const;
  void connect(Link& link, uint16_t lane);
  void connect(Link& link, const Hello& hello, Clock::time_point when);
  void accept_all(const Fd& listener);
  void serve(Stranger& stranger);
  void serve(Outgoing& out);
  void retry(Outgoing& out, int error);
  void give_up(Outgoing& out);
  void join(Link& link, const Hello& hello, Wire wire);
  void note_refusal(const Stranger& stranger, bool refused);
  std::string name_of(const Link& link) const;
  [[noreturn]] void throw_incomplete() const;

  const std::string group_;
  const int rank_, size_;
  const Deadline deadline_;  // of the set-up
  const Milliseconds patience_;
  const Mesh mesh_;
  const pid_t process_;
  const Fd wake_;
  Control* control_ = nullptr;
  std::function<void(int)> on_ready_;
  std::function<bool()> tend_;
  bool tend_again_ = false;

  std::vector<std::unique_ptr<Link>> links_;  // as mesh_.peers
  std::vector<Link*> by_rank_;
  std::mutex mutex_;  // what the links hold, and all below
  std::list<Outgoing> outgoing_;
  std::list<Stranger> strangers_;
  Clock::time_point deaf_until_{};  // no descriptor was left for another connection
  std::exception_ptr broken_;
  std::string congestion_control_;
  std::string last_error_, last_refused_;
  int refused_ = 0;

  std::mutex wishes_mutex_;
  std::vector<std::pair<int, int>> wishes_;  // rank and lane
  std::vector<Broken> broken_ones_;
  std::atomic<bool> troubled_{false}, stop_{false};
  std::unique_ptr<std::thread> thread_;
};

}  // namespace pycomm::tcp
