// TCP rendezvous: membership, hosts, listening addresses and secrets of the peers.
#include "transports/tcp/connect/peers.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <sstream>
#include <utility>

#include "core/env.h"
#include "core/error.h"
#include "transports/host_socket.h"
#include "transports/openssl.h"
#include "transports/seal.h"
#include "transports/tcp/connect/handshake.h"
#include "transports/tcp/net/tuning.h"

namespace pycomm::tcp {
namespace {

// Far away, a random loss halves for many round trips what a socket without bbr sends, so several
// send more together. With bbr more than two gain nothing: each remembers the best part of the path
// that it has had, so that they send more than it carries, and a message waits for what is lost at
// the end of each.
constexpr int kFewSockets = 2, kManySockets = 4;
constexpr auto kManyFrom = std::chrono::milliseconds(10);

// Returns true if the ranks name several hosts. That all of them see alike.
bool spans_hosts(const std::vector<std::string>& hosts) {
  const auto name = [](const std::string& value) { return value.substr(0, value.find(' ')); };
  return std::any_of(hosts.begin(), hosts.end(),
                     [&](const std::string& value) { return name(value) != name(hosts.front()); });
}

std::string host_value() {
  const std::string host = host_id(), cpus = cpu_mask();
  if (host.front() == '/') {  // it lacks the machine's name: ranks of one host would seem apart
    const Fd file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
    throw Error(
        "tcp: cannot tell hosts apart: /proc cannot be read: " +
        (!file && lacks_descriptor(errno) ? error_text(errno) : "mount it in this container"));
  }
  return host + " " + (cpus.empty() ? "0" : cpus) + " " + process_name();
}

// Returns what PYCOMM_ADVERTISE says, one address for each interface, or none.
std::vector<Address> advertised_addresses(const GroupOptions& options, size_t interfaces) {
  std::vector<Address> addresses;
  const std::string& text = options.advertise;
  const std::string what = "tcp: PYCOMM_ADVERTISE=" + text;
  for (const std::string& one : split_list(text)) {
    addresses.emplace_back();
    if (!Address::parse(one, addresses.back()) || addresses.back().is_link_local()) {
      throw Error(what + ": \"" + one +
                  "\" is no address that other hosts can reach: want 203.0.113.7, fd00::2, or with "
                  "a port 203.0.113.7:40000 or [fd00::2]:40000");
    }
    const PortRange ports = parse_ports(options.ports);
    if (addresses.back().port() != 0 && (ports.first == 0 || ports.first != ports.last)) {
      throw Error(what + ": a mapped port leads to one port; set PYCOMM_PORTS to that one");
    }
  }
  if (addresses.empty() || addresses.size() == interfaces) return addresses;
  throw Error(what + " has " + std::to_string(addresses.size()) + " addresses for " +
              std::to_string(interfaces) +
              " interfaces; give one for each, or name the interfaces in PYCOMM_INTERFACE");
}

}  // namespace

void AddressExchange::announce(const Rendezvous& rendezvous, bool may_span_hosts) {
  try {
    pycomm::announce(rendezvous, kHostTopic, host_value());
    if (!may_span_hosts) return;
    TcpListeners listeners = listen(directory_.options, false);
    pycomm::announce(rendezvous, kFarCardTopic, listeners.card);
    announced_ = std::move(listeners);
  } catch (const Error&) {  // of no importance unless the exchange needs it, which says so then
  }
}

PeerDirectory AddressExchange::run(const Rendezvous& rendezvous, const std::vector<int>& peers) {
  us_ = "rank " + std::to_string(rendezvous.rank);
  directory_.encrypts = encrypts(directory_.options);
  for (const int peer : peers) {
    directory_.peers.emplace_back();
    directory_.peers.back().rank = peer;
  }
  // All ranks of the group take part: where one rank does not reach another by shared memory, each
  // rank has some that it does not reach so.
  const auto hosts = all_gather_values(rendezvous, kHostTopic, all_ranks(rendezvous), host_value());
  const bool one_host = look_at_hosts(rendezvous, hosts);
  take_cards(exchange_cards(rendezvous, hosts, one_host));
  directory_.session = rendezvous.exchange->session;
  directory_.far_bbr = gives_bbr(directory_.options.congestion);
  return std::move(directory_);
}

// Returns true if all peers are on our host.
bool AddressExchange::look_at_hosts(const Rendezvous& rendezvous,
                                    const std::vector<std::string>& hosts) {
  std::istringstream ours(hosts[static_cast<size_t>(rendezvous.rank)]);
  std::string host, cpus;
  ours >> host >> cpus;
  size_t same = 0;
  for (Peer& peer : directory_.peers) {
    std::istringstream theirs(hosts[static_cast<size_t>(peer.rank)]);
    std::string their_host, mask, process;
    theirs >> their_host >> mask >> std::ws;
    std::getline(theirs, process);
    peer.process = Process(process);
    peer.near = their_host == host;
    if (!peer.near) continue;
    same++;
    cpus.resize(std::max(cpus.size(), mask.size()), '0');
    for (size_t k = 0; k < mask.size(); k++) cpus[k] = std::max(cpus[k], mask[k]);
  }
  // Ranks that we do not reach by TCP share our memory, and so our host.
  const size_t here = static_cast<size_t>(rendezvous.size) - directory_.peers.size() + same;
  directory_.crowded = here > static_cast<size_t>(std::count(cpus.begin(), cpus.end(), '1'));
  return same == directory_.peers.size();
}

// Returns the cards of all ranks. Whether they have been announced already, and whether they are
// to be used, each rank reads from the same values.
std::vector<std::string> AddressExchange::exchange_cards(const Rendezvous& rendezvous,
                                                         const std::vector<std::string>& hosts,
                                                         bool one_host) {
  RendezvousExchange& exchange = *rendezvous.exchange;
  const auto card = exchange.received.find(kFarCardTopic);
  TcpListeners& ours = directory_.own;
  if (announced_ && card != exchange.received.end() && spans_hosts(hosts)) {
    ours = std::move(*announced_);
    exchange.received[kCardTopic] = card->second;
  } else {
    announced_.reset();  // its ports may be all that PYCOMM_PORTS has
    ours = listen(directory_.options, one_host);
  }
  for (const Interface& interface : ours.interfaces) {
    if (one_host || !interface.address.is_loopback()) continue;
    throw Error("tcp: " + us_ + ": the ranks are on several hosts, but \"" + interface.name +
                "\" is loopback, which no other host can reach; PYCOMM_INTERFACE (else "
                "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME) says \"" +
                directory_.options.interface + "\": set it to an interface of your network");
  }
  return all_gather_values(rendezvous, kCardTopic, all_ranks(rendezvous), ours.card);
}

// The format is "address,address secret"; no secret if one was given to all ranks.
void AddressExchange::take_cards(const std::vector<std::string>& cards) {
  const bool given = !directory_.options.secret.empty();
  for (Peer& peer : directory_.peers) {
    const std::string& card = cards[static_cast<size_t>(peer.rank)];
    const std::string who = us_ + " and rank " + std::to_string(peer.rank);
    const size_t space = std::min(card.find(' '), card.size());
    peer.addresses = Address::parse_list(card.substr(0, space));
    if (peer.addresses.empty()) {
      throw Error("tcp: " + who + ": the store holds \"" + card + "\" instead of an address");
    }
    check_paths(who, peer);
    const size_t secret = std::min(space + 1, card.size());
    peer.secret = given ? directory_.own.secret : card.substr(secret);
  }
}

// A rank with fewer paths would leave some of the others' unused, and unseen.
void AddressExchange::check_paths(const std::string& who, const Peer& peer) const {
  const auto list = [](const auto& addresses, const auto& text) {
    std::string result;
    for (const auto& each : addresses) result += (result.empty() ? "" : ", ") + text(each);
    return std::to_string(addresses.size()) + " (" + result + ")";
  };
  if (peer.addresses.size() == directory_.paths()) return;
  throw Error("tcp: " + who + " have different sets of paths: " + us_ + " has " +
              list(directory_.own.interfaces, [](const Interface& i) { return i.name; }) +
              ", rank " + std::to_string(peer.rank) + " has " +
              list(peer.addresses, [](const Address& a) { return a.ip(); }) +
              "; let PYCOMM_INTERFACE name as many interfaces on each host, in the same order");
}

int PeerDirectory::sockets_at(std::chrono::milliseconds round_trip) const {
  const int usual = far_bbr || round_trip < kManyFrom ? kFewSockets : kManySockets;
  const int wanted = options.sockets > 0 ? options.sockets : usual;
  return std::min(std::max(static_cast<int>(paths()), wanted), kMostSockets);
}

TcpListeners listen(const GroupOptions& options, bool one_host) {
  TcpListeners ours;
  ours.interfaces = choose_interfaces({options.interface, env().master_addr, one_host});
  const PortRange ports = parse_ports(options.ports);
  const std::vector<Address> advertised =
      one_host ? std::vector<Address>() : advertised_addresses(options, ours.interfaces.size());
  for (size_t i = 0; i < ours.interfaces.size(); i++) {
    ours.sockets.push_back(listen_on(ours.interfaces[i].address, ports));
    Address address = Address::local(ours.sockets.back().get());
    if (!advertised.empty()) {
      const uint16_t mapped = advertised[i].port();
      address = advertised[i].with_port(mapped != 0 ? mapped : address.port());
    }
    ours.addresses.push_back(address);
  }
  ours.card = list_text(ours.addresses);
  const bool given = !options.secret.empty();
  ours.secret = given ? key_of_secret(options.secret) : random_secret();
  if (!given) ours.card += " " + ours.secret;
  if (encrypts(options)) openssl::library();  // throws what to install, before ranks wait for us
  return ours;
}

}  // namespace pycomm::tcp
