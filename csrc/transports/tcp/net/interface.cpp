// Choice of the network interfaces: those that the user names; else loopback if all ranks are on
// one host; else the route to the store; else the first that other hosts may reach.
#include "transports/tcp/net/interface.h"

#include <fnmatch.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sched.h>

#include <algorithm>

#include "core/error.h"

namespace pycomm::tcp {
namespace {

bool starts_with(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

// True for bridges of containers and virtual machines, which lead to no other host.
bool is_inner(const Interface& interface) {
  for (const char* prefix : {"docker", "br-", "virbr", "veth", "cni", "podman"}) {
    if (starts_with(interface.name, prefix)) return true;
  }
  return false;
}

[[noreturn]] void throw_none(const std::string& why, const std::vector<Interface>& interfaces) {
  std::string list;
  for (const Interface& interface : interfaces) {
    list += (list.empty() ? "" : ", ") + interface.name + " (" + interface.address.ip() + ")";
  }
  throw Error("tcp: " + why + "; interfaces that are up: " + (list.empty() ? "none" : list) +
              "; set PYCOMM_INTERFACE to one that the other ranks can reach");
}

struct NameList {
  std::vector<std::string> wanted, unwanted;
  bool whole = false;

  explicit NameList(const std::string& text) {
    bool negated = false;
    for (std::string name : split_list(text)) {
      // Both marks hold for the rest of the list, as in NCCL.
      while (!name.empty() && (name[0] == '^' || name[0] == '=')) {
        (name[0] == '^' ? negated : whole) = true;
        name.erase(0, 1);
      }
      if (!name.empty()) (negated ? unwanted : wanted).push_back(name);
    }
  }

  bool fits(const std::string& name, const std::string& pattern) const {
    if (pattern.find_first_of("*?") != std::string::npos)
      return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
    return whole ? name == pattern : starts_with(name, pattern);
  }
  bool excludes(const std::string& name) const {
    return std::any_of(unwanted.begin(), unwanted.end(),
                       [&](const std::string& pattern) { return fits(name, pattern); });
  }
};

// Adds an interface, unless it is there already by an earlier address.
void add(std::vector<Interface>& chosen, const Interface& candidate) {
  const bool known = std::any_of(chosen.begin(), chosen.end(), [&](const Interface& other) {
    return other.name == candidate.name;
  });
  if (!known) chosen.push_back(candidate);
}

std::vector<Interface> fitting(const NameList& list, const std::vector<Interface>& candidates) {
  std::vector<Interface> chosen;
  for (const std::string& pattern : list.wanted) {
    const size_t before = chosen.size();
    Address address;
    for (const Interface& candidate : candidates) {
      const bool named = Address::parse(pattern, address) ? candidate.address.ip() == address.ip()
                                                          : candidate.name == pattern;
      if (named && !list.excludes(candidate.name)) add(chosen, candidate);
    }
    if (chosen.size() > before) continue;
    for (const Interface& candidate : candidates) {
      if (list.fits(candidate.name, pattern) && !list.excludes(candidate.name)) {
        add(chosen, candidate);
      }
    }
  }
  return chosen;
}

// The kernel picks our end of a UDP "connection" by the route, without sending a packet.
bool route_to(const std::string& host, Address& out) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (host.empty() || ::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return false;
  bool ok = false;
  for (const addrinfo* info = found; info != nullptr && !ok; info = info->ai_next) {
    const Fd probe(::socket(info->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!probe || ::connect(probe.get(), info->ai_addr, info->ai_addrlen) != 0) continue;
    out = Address::local(probe.get());
    ok = !out.is_loopback() && !out.is_link_local();
  }
  ::freeaddrinfo(found);
  return ok;
}

}  // namespace

std::vector<Interface> interfaces() {
  std::vector<Interface> result;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return result;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      if ((entry->ifa_flags & IFF_UP) == 0) continue;
      const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      const Address address(entry->ifa_addr, size);
      if (!address.is_link_local()) result.push_back({entry->ifa_name, address});
    }
  }
  ::freeifaddrs(list);
  return result;
}

std::string cpu_mask() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::string mask;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return mask;
  for (int cpu = 0, left = CPU_COUNT(&set); left > 0; cpu++) {
    mask += CPU_ISSET(cpu, &set) ? '1' : '0';
    left -= CPU_ISSET(cpu, &set) ? 1 : 0;
  }
  return mask;
}

std::vector<Interface> choose_interfaces(const InterfaceRequest& request,
                                         const std::vector<Interface>& candidates) {
  const NameList list(request.names);
  if (!list.wanted.empty()) {
    auto chosen = fitting(list, candidates);
    if (!chosen.empty()) return chosen;
    throw_none("no interface fits PYCOMM_INTERFACE \"" + request.names + "\"", candidates);
  }

  const auto find = [&](auto&& test) {
    std::vector<Interface> found;
    for (const Interface& candidate : candidates) {
      if (found.empty() && !list.excludes(candidate.name) && test(candidate)) {
        found.push_back(candidate);
      }
    }
    return found;
  };
  if (request.one_host) {
    auto found = find([](const Interface& i) { return i.address.is_loopback(); });
    if (!found.empty()) return found;
  }
  Address address;
  if (route_to(request.store_host, address)) {
    auto found = find([&](const Interface& i) { return i.address.ip() == address.ip(); });
    if (!found.empty()) return found;
  }
  for (const bool inner : {false, true}) {
    auto found =
        find([&](const Interface& i) { return !i.address.is_loopback() && is_inner(i) == inner; });
    if (!found.empty()) return found;
  }
  throw_none(request.names.empty()
                 ? "the ranks are on several hosts and only loopback is up"
                 : "PYCOMM_INTERFACE \"" + request.names + "\" leaves no interface to other hosts",
             candidates);
}

}  // namespace pycomm::tcp
