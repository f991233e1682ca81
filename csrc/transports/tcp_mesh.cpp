// Who is there, on which host, where it listens, and what must be proven to it.
#include "transports/tcp_mesh.h"

#include <algorithm>
#include <cstring>

#include "core/env.h"
#include "core/error.h"
#include "transports/meeting.h"
#include "transports/tcp_handshake.h"
#include "transports/tls_library.h"

namespace pycomm::tcp {
namespace {

constexpr const char* kTls = " tls";

class Meeting {
 public:
  Meeting(const Rendezvous& meeting, const std::vector<int>& peers, const TcpOptions& options)
      : meeting_(meeting), options_(options), us_("rank " + std::to_string(meeting.rank)) {
    for (const int peer : peers) mesh_.peers.push_back({peer, {}, {}});
  }

  Mesh run() {
    choose();
    for (const Interface& interface : mesh_.interfaces) {
      mesh_.listeners.push_back(listen_on(interface.address));
    }
    exchange_cards();
    return std::move(mesh_);
  }

 private:
  // A word of every peer, in their order.
  std::vector<std::string> exchange_words(const char* topic, const std::string& word) const {
    std::vector<int> ranks = {meeting_.rank};
    for (const Peer& peer : mesh_.peers) ranks.push_back(peer.rank);
    std::vector<std::string> words = exchange(meeting_, topic, ranks, word);
    words.erase(words.begin());
    return words;
  }

  void choose() {
    // Rank by rank: "host cpus".
    const std::string host = host_id() + " ";
    std::string cpus = cpu_mask();
    const auto words = exchange_words(kHostTopic, host + cpus);
    size_t same = 0;
    for (const std::string& word : words) {
      if (word.compare(0, host.size(), host) != 0) continue;
      same++;
      const std::string mask = word.substr(host.size());
      cpus.resize(std::max(cpus.size(), mask.size()), '0');
      for (size_t i = 0; i < mask.size(); i++) cpus[i] = std::max(cpus[i], mask[i]);
    }
    // Whom we do not reach by TCP shares our memory, and so our host.
    const size_t here = static_cast<size_t>(meeting_.size) - mesh_.peers.size() + same;
    mesh_.crowded = here > static_cast<size_t>(std::count(cpus.begin(), cpus.end(), '1'));
    InterfaceWish wish;
    wish.names = options_.interface;
    wish.store_host = env().master_addr;
    wish.one_host = same == words.size();
    mesh_.bound = !wish.names.empty();
    mesh_.interfaces = choose_interfaces(wish);
    mesh_.sockets = std::max(options_.sockets, static_cast<int>(mesh_.interfaces.size()));
    for (const Interface& interface : mesh_.interfaces) {
      if (wish.one_host || !interface.address.is_loopback()) continue;
      throw Error("tcp: " + us_ + ": the ranks are on several hosts, but \"" + interface.name +
                  "\" is loopback, which no other host can reach; PYCOMM_INTERFACE (else "
                  "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME) says \"" +
                  options_.interface + "\": set it to an interface of your network");
    }
  }

  // "address,address secret tls"; no secret if one was given to all ranks, no "tls" without
  // encryption.
  void exchange_cards() {
    const bool given = !options_.secret.empty();
    mesh_.secret = given ? options_.secret : random_secret();
    std::string card;
    for (const Fd& listener : mesh_.listeners) {
      card += (card.empty() ? "" : ",") + Address::local(listener.get()).text();
    }
    if (!given) card += " " + mesh_.secret;
    mesh_.tls = options_.tls;
    if (mesh_.tls) {
      openssl::library();  // or an error that says what to install, before anybody waits for us
      card += kTls;
    }
    auto cards = exchange_words(kCardTopic, card);
    for (size_t i = 0; i < cards.size(); i++) {
      Peer& peer = mesh_.peers[i];
      const std::string who = us_ + " and rank " + std::to_string(peer.rank);
      const size_t mark = cards[i].size() - std::min(cards[i].size(), std::strlen(kTls));
      const bool tls = cards[i].compare(mark, std::string::npos, kTls) == 0;
      if (tls) cards[i].resize(mark);
      if (tls != mesh_.tls) {
        throw Error("tcp: " + who + ": only rank " +
                    std::to_string(tls ? peer.rank : meeting_.rank) +
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
      peer.secret = given ? mesh_.secret : cards[i].substr(space + 1);
    }
  }

  const Rendezvous& meeting_;
  const TcpOptions& options_;
  const std::string us_;
  Mesh mesh_;
};

}  // namespace

Mesh meet(const Rendezvous& meeting, const std::vector<int>& peers, const TcpOptions& options) {
  return Meeting(meeting, peers, options).run();
}

}  // namespace pycomm::tcp
