// TCP rendezvous: membership, hosts, listening addresses and secrets of the peers.
#include "transports/tcp/connect/peers.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "core/env.h"
#include "core/error.h"
#include "transports/rendezvous.h"
#include "transports/tcp/connect/handshake.h"
#include "transports/tcp/tls/library.h"

namespace pycomm::tcp {
namespace {

constexpr const char* kTls = " tls";
constexpr const char* kNoDoor = "-";

class Meeting {
 public:
  Meeting(const Rendezvous& rendezvous, const std::vector<int>& peers, const TcpOptions& options)
      : rendezvous_(rendezvous), options_(options), us_("rank " + std::to_string(rendezvous.rank)) {
    for (const int peer : peers) {
      directory_.peers.emplace_back();
      directory_.peers.back().rank = peer;
    }
  }

  PeerDirectory run() {
    choose();
    for (const Interface& interface : directory_.interfaces) {
      directory_.listeners.push_back(listen_on(interface.address));
    }
    exchange_cards();
    return std::move(directory_);
  }

 private:
  // Returns a value of every peer, in their order. All ranks of the group take part: where one rank
  // does not reach another by shared memory, each rank has some that it does not reach so.
  std::vector<std::string> exchange_words(const char* topic, const std::string& word) const {
    const auto words = exchange(rendezvous_, topic, all_ranks(rendezvous_), word);
    std::vector<std::string> of_peers;
    for (const Peer& peer : directory_.peers)
      of_peers.push_back(words[static_cast<size_t>(peer.rank)]);
    return of_peers;
  }

  void choose() {
    directory_.door = rendezvous_.talk->door;
    if (!directory_.door) directory_.door = std::make_shared<HostDoor>();
    std::istringstream ours(host_word(*directory_.door));
    std::string host, cpus;
    ours >> host >> cpus;
    const auto words = exchange_words(kHostTopic, ours.str());
    size_t same = 0;
    for (size_t i = 0; i < words.size(); i++) {
      std::istringstream theirs(words[i]);
      std::string their_host, mask, door, process;
      theirs >> their_host >> mask >> door >> std::ws;
      std::getline(theirs, process);
      directory_.peers[i].process = Process(process);
      if (their_host != host) continue;
      const bool no_door = door.empty() || door == kNoDoor || directory_.door->name().empty();
      const auto look = no_door ? HostDoor::State::unknown : HostDoor::look(door);
      if (look == HostDoor::State::closed) continue;  // another machine that seems to be ours
      if (look == HostDoor::State::open) directory_.peers[i].door = door;
      same++;
      cpus.resize(std::max(cpus.size(), mask.size()), '0');
      for (size_t k = 0; k < mask.size(); k++) cpus[k] = std::max(cpus[k], mask[k]);
    }
    // Ranks that we do not reach by TCP share our memory, and so our host.
    const size_t here = static_cast<size_t>(rendezvous_.size) - directory_.peers.size() + same;
    directory_.crowded = here > static_cast<size_t>(std::count(cpus.begin(), cpus.end(), '1'));
    InterfaceRequest wish;
    wish.names = options_.interface;
    wish.store_host = env().master_addr;
    wish.one_host = same == words.size();
    directory_.bound = !wish.names.empty();
    directory_.interfaces = choose_interfaces(wish);
    directory_.sockets = std::max(options_.sockets, static_cast<int>(directory_.interfaces.size()));
    for (const Interface& interface : directory_.interfaces) {
      if (wish.one_host || !interface.address.is_loopback()) continue;
      throw Error("tcp: " + us_ + ": the ranks are on several hosts, but \"" + interface.name +
                  "\" is loopback, which no other host can reach; PYCOMM_INTERFACE (else "
                  "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME) says \"" +
                  options_.interface + "\": set it to an interface of your network");
    }
  }

  // The format is "address,address secret tls"; no secret if one was given to all ranks, no "tls"
  // without encryption.
  void exchange_cards() {
    const bool given = !options_.secret.empty();
    directory_.secret = given ? options_.secret : random_secret();
    std::string card;
    for (const Fd& listener : directory_.listeners) {
      card += (card.empty() ? "" : ",") + Address::local(listener.get()).text();
    }
    if (!given) card += " " + directory_.secret;
    directory_.tls = options_.tls;
    if (directory_.tls) {
      openssl::library();  // throws what to install, before any rank waits for us
      card += kTls;
    }
    auto cards = exchange_words(kCardTopic, card);
    for (size_t i = 0; i < cards.size(); i++) {
      Peer& peer = directory_.peers[i];
      const std::string who = us_ + " and rank " + std::to_string(peer.rank);
      const size_t mark = cards[i].size() - std::min(cards[i].size(), std::strlen(kTls));
      const bool tls = cards[i].compare(mark, std::string::npos, kTls) == 0;
      if (tls) cards[i].resize(mark);
      if (tls != directory_.tls) {
        throw Error("tcp: " + who + ": only rank " +
                    std::to_string(tls ? peer.rank : rendezvous_.rank) +
                    " encrypts; set the same PYCOMM_TLS on all ranks");
      }
      const size_t space = std::min(cards[i].find(' '), cards[i].size());
      for (size_t begin = 0; begin < space;) {
        const size_t end = std::min(cards[i].find(',', begin), space);
        peer.addresses.emplace_back();
        if (!Address::parse(cards[i].substr(begin, end - begin), peer.addresses.back())) {
          peer.addresses.clear();
          break;
        }
        begin = end + 1;
      }
      if (peer.addresses.empty()) {
        throw Error("tcp: " + who + ": the store holds \"" + cards[i] + "\" instead of an address");
      }
      if ((space == cards[i].size()) != given) {
        throw Error(
            "tcp: " + who +
            ": only one of them was given a secret; set the same PYCOMM_SECRET on all ranks");
      }
      peer.secret = given ? directory_.secret : cards[i].substr(space + 1);
    }
  }

  const Rendezvous& rendezvous_;
  const TcpOptions& options_;
  const std::string us_;
  PeerDirectory directory_;
};

}  // namespace

std::string host_word(const HostDoor& door) {
  const std::string cpus = cpu_mask();
  return host_id() + " " + (cpus.empty() ? "0" : cpus) + " " +
         (door.name().empty() ? kNoDoor : door.name()) + " " + process_name();
}

PeerDirectory meet(const Rendezvous& rendezvous, const std::vector<int>& peers,
                   const TcpOptions& options) {
  return Meeting(rendezvous, peers, options).run();
}

}  // namespace pycomm::tcp
