// Set-up of the TCP transport: one loop over the listener, our connections and those of strangers
// that may turn out to be peers.
#include "transports/tcp_mesh.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>

#include "core/env.h"
#include "transports/meeting.h"
#include "transports/tcp_handshake.h"

namespace pycomm::tcp {
namespace {

using Clock = Deadline::Clock;

// How long a connection may take for its handshake, which is four small messages. Late peers are
// not hurt: they try again.
constexpr auto kHandshakeLimit = std::chrono::seconds(10);
// Connections that have not authenticated; more push out the oldest.
constexpr size_t kMaxStrangers = 512;
constexpr auto kFirstRetry = Milliseconds(20);
constexpr auto kLastRetry = Milliseconds(1000);

enum class Progress : uint8_t { waits, closed, over };

// Moves a handshake as far as it goes now. `error` gets the reason of `closed`, 0 for an orderly
// end.
Progress advance(int fd, Handshake& handshake, int& error) {
  for (;;) {
    while (handshake.to_send().size > 0) {
      const auto out = handshake.to_send();
      const ssize_t n = ::send(fd, out.data, out.size, MSG_NOSIGNAL);
      if (n < 0) {
        error = errno;
        return error == EAGAIN || error == EINTR ? Progress::waits : Progress::closed;
      }
      handshake.sent(static_cast<size_t>(n));
    }
    if (handshake.state() != Handshake::State::running) return Progress::over;
    const auto in = handshake.wanted();
    const ssize_t n = ::recv(fd, in.data, in.size, 0);
    if (n <= 0) {
      error = n < 0 ? errno : 0;
      return error == EAGAIN || error == EINTR ? Progress::waits : Progress::closed;
    }
    handshake.received(static_cast<size_t>(n));
  }
}

short events_of(const Handshake& handshake) {
  return handshake.to_send().size > 0 ? POLLOUT : POLLIN;
}

// A connection that we make, again and again until it stands.
struct Outgoing {
  size_t link;
  Hello hello;
  Fd fd;
  std::optional<Handshake> handshake;  // none while the connection is being made
  Clock::time_point retry_at = Clock::now();
  Milliseconds pause = kFirstRetry;
};

// A connection that somebody made to us.
struct Stranger {
  Fd fd;
  Handshake handshake;
  Clock::time_point give_up;
};

class Meeting {
 public:
  Meeting(const Rendezvous& meeting, const std::vector<int>& peers, const TcpOptions& options)
      : meeting_(meeting), options_(options), us_("rank " + std::to_string(meeting.rank)) {
    for (const int peer : peers) {
      Link link;
      link.rank = peer;
      for (auto& lane : link.lanes) lane.resize(static_cast<size_t>(options.sockets));
      mesh_.links.push_back(std::move(link));
    }
  }

  Mesh run() {
    choose();
    listener_ = listen_on(mesh_.interface.address);
    exchange_cards();
    prepare();
    while (!complete()) turn();
    return std::move(mesh_);
  }

 private:
  // A word of every peer, in the order of links.
  std::vector<std::string> exchange_words(const char* topic, const std::string& word) const {
    std::vector<int> ranks = {meeting_.rank};
    for (const Link& link : mesh_.links) ranks.push_back(link.rank);
    std::vector<std::string> words = exchange(meeting_, topic, ranks, word);
    words.erase(words.begin());
    return words;
  }

  void choose() {
    // Rank by rank: "host cpus".
    const std::string host = host_id() + " ";
    std::string cpus = cpu_mask();
    const auto words = exchange_words("tcp-host", host + cpus);
    size_t same = 0;
    for (const std::string& word : words) {
      if (word.compare(0, host.size(), host) != 0) continue;
      same++;
      const std::string mask = word.substr(host.size());
      cpus.resize(std::max(cpus.size(), mask.size()), '0');
      for (size_t i = 0; i < mask.size(); i++) cpus[i] = std::max(cpus[i], mask[i]);
    }
    mesh_.crowded = same + 1 > static_cast<size_t>(std::count(cpus.begin(), cpus.end(), '1'));
    InterfaceWish wish;
    wish.names = options_.interface;
    wish.store_host = env().master_addr;
    wish.one_host = same == words.size();
    mesh_.interface = choose_interface(wish);
    if (!wish.one_host && mesh_.interface.address.is_loopback()) {
      throw Error("tcp: " + us_ + ": the ranks are on several hosts, but PYCOMM_INTERFACE \"" +
                  options_.interface +
                  "\" is loopback, which no other host can reach; set it to an interface of your "
                  "network");
    }
  }

  // Where each rank listens, and what must be proven to it.
  void exchange_cards() {
    const bool given = !options_.secret.empty();
    secret_ = given ? options_.secret : random_secret();
    const std::string address = Address::local(listener_.get()).text();
    const auto cards = exchange_words("tcp-card", address + (given ? "" : " " + secret_));
    for (size_t i = 0; i < cards.size(); i++) {
      Link& link = mesh_.links[i];
      const size_t space = std::min(cards[i].find(' '), cards[i].size());
      const std::string who = us_ + " and rank " + std::to_string(link.rank);
      if (!Address::parse(cards[i].substr(0, space), link.address)) {
        throw Error("tcp: " + who + ": the store holds \"" + cards[i] + "\" instead of an address");
      }
      if ((space == cards[i].size()) != given) {
        throw Error(
            "tcp: " + who +
            ": only one of them was given a secret; set the same PYCOMM_SECRET on all ranks");
      }
      secrets_.push_back(given ? secret_ : cards[i].substr(space + 1));
    }
  }

  void prepare() {
    const auto sockets = static_cast<uint16_t>(options_.sockets);
    for (size_t i = 0; i < mesh_.links.size(); i++) {
      const int peer = mesh_.links[i].rank;
      if (peer > meeting_.rank) continue;
      Hello hello;
      hello.size = static_cast<uint32_t>(meeting_.size);
      hello.rank = static_cast<uint32_t>(meeting_.rank);
      hello.target = static_cast<uint32_t>(peer);
      hello.sockets = sockets;
      for (uint16_t lane = 0; lane < kLanes; lane++) {
        for (uint16_t socket = 0; socket < sockets; socket++) {
          hello.lane = lane;
          hello.socket = socket;
          outgoing_.push_back({i, hello, {}, {}});
        }
      }
      hello.lane = kControl;
      hello.socket = 0;
      outgoing_.push_back({i, hello, {}, {}});
    }
  }

  Fd& slot(Link& link, const Hello& hello) const {
    return hello.lane == kControl ? link.control : link.lanes[hello.lane][hello.socket];
  }

  void join(Fd& slot, Fd fd) {
    choose_congestion_control(fd.get());
    mesh_.congestion_control = congestion_control(fd.get());
    slot = std::move(fd);
  }

  static bool complete(const Link& link) {
    const auto stands = [](const Fd& fd) { return static_cast<bool>(fd); };
    return stands(link.control) &&
           std::all_of(link.lanes.begin(), link.lanes.end(), [&](const std::vector<Fd>& lane) {
             return std::all_of(lane.begin(), lane.end(), stands);
           });
  }

  bool complete() const {
    return std::all_of(mesh_.links.begin(), mesh_.links.end(),
                       [](const Link& link) { return complete(link); });
  }

  // One round of the loop: wait, then serve everybody once.
  void turn() {
    const auto now = Clock::now();
    auto wake = now + meeting_.deadline.left();
    std::vector<pollfd> polls = {{listener_.get(), POLLIN, 0}};
    for (const Outgoing& out : outgoing_) {
      if (!out.fd) wake = std::min(wake, out.retry_at);
      polls.push_back(
          {out.fd.get(), out.handshake ? events_of(*out.handshake) : short(POLLOUT), 0});
    }
    for (const Stranger& stranger : strangers_) {
      wake = std::min(wake, stranger.give_up);
      polls.push_back({stranger.fd.get(), events_of(stranger.handshake), 0});
    }
    const auto pause = std::chrono::duration_cast<Milliseconds>(wake - now).count();
    ::poll(polls.data(), polls.size(), static_cast<int>(std::clamp<int64_t>(pause, 0, 60000)) + 1);
    if (meeting_.deadline.expired()) throw_incomplete();

    const size_t first_stranger = 1 + outgoing_.size();
    for (size_t i = 0; i < outgoing_.size(); i++) {
      if (polls[1 + i].revents != 0 || !outgoing_[i].fd) serve(outgoing_[i]);
    }
    for (size_t i = 0; i < strangers_.size(); i++) {
      if (polls[first_stranger + i].revents != 0) serve(strangers_[i]);
    }
    const auto later = Clock::now();
    outgoing_.erase(
        std::remove_if(outgoing_.begin(), outgoing_.end(),
                       [&](const Outgoing& out) {
                         return static_cast<bool>(slot(mesh_.links[out.link], out.hello));
                       }),
        outgoing_.end());
    strangers_.erase(std::remove_if(strangers_.begin(), strangers_.end(),
                                    [&](const Stranger& stranger) {
                                      return !stranger.fd || later >= stranger.give_up;
                                    }),
                     strangers_.end());
    if (polls[0].revents != 0) accept_all();
  }

  void accept_all() {
    while (Fd fd = accept_from(listener_.get())) {
      if (strangers_.size() == kMaxStrangers) strangers_.erase(strangers_.begin());
      strangers_.push_back(
          {std::move(fd),
           Handshake(secret_, meeting_.group, meeting_.rank, meeting_.size, options_.sockets),
           Clock::now() + kHandshakeLimit});
    }
    if (errno == EMFILE || errno == ENFILE) {
      throw Error("tcp: " + us_ + " cannot accept connections: " + error_text(errno) +
                  "; raise the limit of open files (ulimit -n)");
    }
  }

  void serve(Stranger& stranger) {
    int error = 0;
    const Progress progress = advance(stranger.fd.get(), stranger.handshake, error);
    if (progress == Progress::waits) return;
    if (stranger.handshake.state() == Handshake::State::done) {
      const Hello& hello = stranger.handshake.hello();
      for (Link& link : mesh_.links) {
        if (link.rank == static_cast<int>(hello.rank)) {
          join(slot(link, hello), std::move(stranger.fd));
        }
      }
    } else {
      note_refusal(stranger, progress == Progress::over);
    }
    stranger.fd.reset();
  }

  // For the error text of a set-up that fails. Who was refused tells more than who went away.
  void note_refusal(const Stranger& stranger, bool over) {
    refused_++;
    if (!over && !last_refused_.empty()) return;
    const Address from = Address::remote(stranger.fd.get());
    last_refused_ = (from.size() > 0 ? from.text() : "a stranger") + ": " +
                    (over ? stranger.handshake.problem() : "it went away during the handshake");
  }

  void serve(Outgoing& out) {
    Link& link = mesh_.links[out.link];
    int error = 0;
    if (!out.fd) {
      if (Clock::now() < out.retry_at) return;
      // The route decides by which interface we leave, unless the user has.
      const Address* from = options_.interface.empty() ? nullptr : &mesh_.interface.address;
      out.fd = connect_to(link.address, from, error);
      if (error != 0) retry(out, error);
      return;
    }
    if (!out.handshake) {
      error = pending_error(out.fd.get());
      if (error != 0) return retry(out, error);
      out.handshake.emplace(secrets_[out.link], meeting_.group, out.hello);
    }
    switch (advance(out.fd.get(), *out.handshake, error)) {
      case Progress::waits:
        return;
      case Progress::closed:
        return retry(out, error);
      case Progress::over:
        if (out.handshake->state() == Handshake::State::refused) {
          throw Error("tcp: " + us_ + " cannot join: " + name_of(link) + ": " +
                      out.handshake->problem());
        }
        join(slot(link, out.hello), std::move(out.fd));
    }
  }

  // A full queue, a router that wakes up, a listener that was flooded: such things pass. A closed
  // port does not, since the address was published after the port was open.
  void retry(Outgoing& out, int error) {
    const Link& link = mesh_.links[out.link];
    last_error_ =
        name_of(link) + ": " +
        (error == 0 ? "it closed the connection during the handshake" : error_text(error));
    if (error == ECONNREFUSED) {
      throw PeerLost(link.rank, "tcp: " + us_ + " cannot join: " + last_error_ +
                                    "; it died or gave up, or a firewall stands between");
    }
    out.fd.reset();
    out.handshake.reset();
    out.retry_at = Clock::now() + out.pause;
    out.pause = std::min(out.pause * 2, kLastRetry);
  }

  std::string name_of(const Link& link) const {
    return "rank " + std::to_string(link.rank) + " (" + link.address.text() + ")";
  }

  [[noreturn]] void throw_incomplete() const {
    std::string missing;
    for (const Link& link : mesh_.links) {
      if (complete(link)) continue;
      missing += (missing.empty() ? "" : ", ") + name_of(link);
    }
    std::string text = "no connection with " + missing;
    if (!last_error_.empty()) text += "; last error: " + last_error_;
    if (refused_ > 0) {
      text +=
          "; refused " + std::to_string(refused_) + " connections, the last from " + last_refused_;
    }
    throw Timeout("tcp: " + us_ + ": group \"" + meeting_.group +
                  "\" did not come together within " +
                  std::to_string(meeting_.deadline.limit().count()) + " ms: " + text);
  }

  const Rendezvous& meeting_;
  const TcpOptions& options_;
  const std::string us_;
  Mesh mesh_;
  Fd listener_;
  std::string secret_;                // that must be proven to us
  std::vector<std::string> secrets_;  // that we must prove, as mesh_.links
  std::vector<Outgoing> outgoing_;
  std::vector<Stranger> strangers_;
  std::string last_error_, last_refused_;
  int refused_ = 0;
};

}  // namespace

Mesh connect_mesh(const Rendezvous& meeting, const std::vector<int>& peers,
                  const TcpOptions& options) {
  return Meeting(meeting, peers, options).run();
}

}  // namespace pycomm::tcp
